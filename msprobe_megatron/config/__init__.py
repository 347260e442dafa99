"""The probe file: what a user asks of the kit, read strictly, checked whole, frozen.

Everything else in the package receives a ``ProbeConfig`` and never looks at a file. The modules, in the order
the data passes them: ``document`` (text to plain values), ``msprobe_json`` and ``msprobe_monitor``
(translation of msprobe's files), ``validate`` (plain values to the dataclasses of ``schema``),
``availability`` (what this release does not have yet), ``load`` (the front door). No torch, no Megatron, no
numpy.
"""

from msprobe_megatron.config.availability import NOT_YET
from msprobe_megatron.config.describe import describe
from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.load import Overrides, from_document, load
from msprobe_megatron.config.replay import ReplayConfig
from msprobe_megatron.config.reproduce import ReproduceConfig
from msprobe_megatron.config.schema import (
    Alert,
    AlertAction,
    ChecksConfig,
    DumpConfig,
    Limits,
    MonitorConfig,
    PerturbConfig,
    ProbeConfig,
    RecorderConfig,
    Target,
    TensorChoice,
)
from msprobe_megatron.config.selection import RankSelection, StepSelection, parse_steps
from msprobe_megatron.config.sizes import format_size

__all__ = [
    "NOT_YET",
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
    "StepSelection",
    "Target",
    "TensorChoice",
    "describe",
    "format_size",
    "from_document",
    "load",
    "parse_steps",
]
