"""The JSON Schema of the probe file, for editors and other programs, generated from the declarations of its keys.

It accepts every probe file that ``load`` accepts. It does not know settings that exclude each other, so that ``load``
may refuse a file which it accepts.
"""

from typing import Any

from msprobe_megatron.config.keys import section_schema
from msprobe_megatron.config.sections.top import SECTIONS, ProbeConfig


def json_schema() -> dict[str, Any]:
    """The schema as plain values, to be written as JSON."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "probe file of msprobe_megatron",
        **section_schema(ProbeConfig),
        "anyOf": [{"required": [section]} for section in SECTIONS],
    }
