"""The front door of the configuration: a file, or a document at hand, to a checked ``ProbeConfig``.

Called once a job by ``arguments.Flags.load_config``, by ``attach`` and by the command line. Order: read,
translate if it is a file of msprobe, validate, apply what the command line overrides, and only then refuse
what this release does not have, so that a wrong value is always reported as wrong.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msprobe_megatron.config.availability import refuse_unavailable
from msprobe_megatron.config.document import read_document
from msprobe_megatron.config.msprobe_json import translate
from msprobe_megatron.config.node import Context, Node
from msprobe_megatron.config.schema import ProbeConfig
from msprobe_megatron.config.selection import parse_steps
from msprobe_megatron.config.validate import parse_output, validate


@dataclass(frozen=True)
class Overrides:
    """What the command line says over the file; None leaves the file's word.

    Example: ``load("probe.yaml", Overrides(steps="0,5-7"))``.
    """

    output: str | os.PathLike[str] | None = None
    steps: str | None = None
    strict: bool | None = None


def load(
    path: str | os.PathLike[str], overrides: Overrides | None = None, allow_unavailable: bool = False
) -> ProbeConfig:
    """Read a probe file, or a config.json of msprobe.

    ``allow_unavailable`` lets through what is valid but not in this release, for tools that only look.

    Example::

        config = load("probe.yaml")
        config.dump.level, config.steps.next_from(0)
    """
    return from_document(read_document(path), os.fspath(path), overrides, allow_unavailable)


def from_document(
    document: Any, source: str, overrides: Overrides | None = None, allow_unavailable: bool = False
) -> ProbeConfig:
    """Check a document that is already in memory; ``source`` names it in errors.

    Example: ``from_document({"dump": {"level": "L0"}}, "my script")``.
    """
    root = Node(document, "", Context(source))
    if not isinstance(document, Mapping):
        problem = "is empty" if document is None else "is not a mapping at the top"
        raise root.context.error("", problem, "keys such as output, steps, dump")
    root.mapping()
    translation = translate(root)
    if translation is not None:
        root = Node(translation.document, "", Context(source, translation.origins))
    config = replace(
        validate(root), raw=dict(document), notes=tuple(translation.notes) if translation is not None else ()
    )
    config = _override(config, overrides or Overrides())
    if not allow_unavailable:
        refuse_unavailable(config, root.context)
    return config


def _override(config: ProbeConfig, overrides: Overrides) -> ProbeConfig:
    if overrides.output is not None:
        node = Node(os.fspath(overrides.output), "--msprobe-output", Context("command line"))
        config = replace(config, output=parse_output(node))
    if overrides.steps is not None:
        config = replace(config, steps=parse_steps(overrides.steps))
    if overrides.strict is not None:
        config = replace(config, strict=overrides.strict)
    return config
