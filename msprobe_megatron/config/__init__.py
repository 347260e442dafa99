"""The probe file: what a user requests, read strictly, checked as a whole, frozen.

Everything else in the package receives a ``ProbeConfig`` and never opens the file. In the order of the data: ``load``
(entry point), ``document`` (text to plain values), ``msprobe`` (translation of msprobe's files), ``sections`` (one file
per section: keys, defaults, validation, meaning), on the declarations of ``keys``. No torch, no Megatron, no numpy.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msprobe_megatron.config.document import ConfigError, Context, Node, read_document
from msprobe_megatron.config.msprobe.config_json import translate
from msprobe_megatron.config.sections.alerts import Alert, AlertAction
from msprobe_megatron.config.sections.checks import ChecksConfig
from msprobe_megatron.config.sections.dump import DumpConfig, Slice
from msprobe_megatron.config.sections.limits import Limits, format_size
from msprobe_megatron.config.sections.monitor import MonitorConfig, Target, TensorChoice
from msprobe_megatron.config.sections.perturb import PerturbConfig
from msprobe_megatron.config.sections.recorder import RecorderConfig
from msprobe_megatron.config.sections.replay import ReplayConfig
from msprobe_megatron.config.sections.reproduce import ReproduceConfig
from msprobe_megatron.config.sections.top import ProbeConfig, describe, parse_output, read_probe_file
from msprobe_megatron.config.selection import RankSelection, StepSelection, parse_steps

__all__ = [
    "Alert",
    "AlertAction",
    "ChecksConfig",
    "ConfigError",
    "DumpConfig",
    "Limits",
    "MonitorConfig",
    "Overrides",
    "PerturbConfig",
    "ProbeConfig",
    "RankSelection",
    "RecorderConfig",
    "ReplayConfig",
    "ReproduceConfig",
    "Slice",
    "StepSelection",
    "Target",
    "TensorChoice",
    "describe",
    "format_size",
    "from_document",
    "load",
    "parse_steps",
]


@dataclass(frozen=True)
class Overrides:
    """Values of the command line that take precedence over the file; None keeps the value of the file."""

    output: str | os.PathLike[str] | None = None
    steps: str | None = None
    strict: bool | None = None


def load(path: str | os.PathLike[str], overrides: Overrides | None = None) -> ProbeConfig:
    """Read a probe file, or a config.json of msprobe; raises ``ConfigError``."""
    return from_document(read_document(path), os.fspath(path), overrides)


def from_document(document: Any, source: str, overrides: Overrides | None = None) -> ProbeConfig:
    """Check a document that is already in memory; ``source`` names it in errors."""
    root = Node(document, "", Context(source))
    if not isinstance(document, Mapping):
        problem = "is empty" if document is None else "is not a mapping at the top"
        raise root.context.error("", problem, "keys such as output, steps, dump")
    root.mapping()
    translation = translate(root)
    if translation is not None:
        root = Node(translation.document, "", Context(source, translation.origins))
    config = replace(read_probe_file(root), raw=dict(document), notes=tuple(translation.notes) if translation else ())
    return _override(config, overrides or Overrides())


def _override(config: ProbeConfig, overrides: Overrides) -> ProbeConfig:
    if overrides.output is not None:
        node = Node(os.fspath(overrides.output), "--msprobe-output", Context("command line"))
        config = replace(config, output=parse_output(node))
    if overrides.steps is not None:
        config = replace(config, steps=parse_steps(overrides.steps))
    if overrides.strict is not None:
        config = replace(config, strict=overrides.strict)
    return config
