"""What a probe file says once it has been read: frozen dataclasses, one for each section.

Built by ``validate`` (from our own files) and, through it, by the translation of msprobe's files; read by the
session and the probes. Defaults stand here and nowhere else. Sizes are bytes, selections are objects that
answer membership, absent sections are None.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msprobe_megatron.config.selection import RankSelection, StepSelection

Level = Literal["L0", "L1", "mix", "debug"]
Task = Literal["statistics", "tensor", "structure", "nonfinite"]
Apis = Literal["core", "focus", "all"]
DataMode = Literal["all", "forward", "backward", "input", "output"]
Mode = Literal["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]
Handler = Literal["check", "fix"]
Stage = Literal["forward", "backward"]
Rule = Literal["nonfinite", "spike", "limit"]
Format = Literal["parquet", "tensorboard"]
Trigger = Literal["nonfinite", "alert", "signal"]

LEVELS: tuple[str, ...] = get_args(Level)
TASKS: tuple[str, ...] = get_args(Task)
APIS: tuple[str, ...] = get_args(Apis)
DATA_MODES: tuple[str, ...] = get_args(DataMode)
MODES: tuple[str, ...] = get_args(Mode)
HANDLERS: tuple[str, ...] = get_args(Handler)
STAGES: tuple[str, ...] = get_args(Stage)
RULES: tuple[str, ...] = get_args(Rule)
FORMATS: tuple[str, ...] = get_args(Format)
TRIGGERS: tuple[str, ...] = get_args(Trigger)
SECTIONS = ("dump", "monitor", "perturb", "checks", "recorder")


@dataclass(frozen=True)
class DumpConfig:
    """The ``dump`` section: which numbers of modules and API calls are written.

    ``list`` holds parts of names, or regular expressions between slashes; empty is every name. An axis that
    ``data_mode`` leaves out (forward and backward, input and output) is recorded on both sides.
    """

    level: Level = "L0"
    task: Task = "statistics"
    digest: bool | Literal["md5", "crc32"] = False
    sketch: int = 0
    list: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    data_mode: tuple[DataMode, ...] = ("all",)
    stacks: bool = True
    microbatches: StepSelection | None = None
    layers: StepSelection | None = None
    apis: Apis = "focus"


@dataclass(frozen=True)
class TensorChoice:
    """Which tensor of a module's arguments or results: the only one, or ``index`` of ``count``."""

    count: int | None = None
    index: int | None = None


@dataclass(frozen=True)
class Target:
    """A module or parameter the monitor watches; None takes every tensor, unless another side is named."""

    name: str
    input: TensorChoice | None = None
    output: TensorChoice | None = None
    input_grad: TensorChoice | None = None
    output_grad: TensorChoice | None = None


@dataclass(frozen=True)
class Alert:
    """A rule of the monitor.

    ``nonfinite``: a NaN or an Inf. ``spike``: a norm above (1 + threshold) times its moving mean. ``limit``:
    an absolute value above the threshold.
    """

    rule: Rule
    threshold: float | None = None


@dataclass(frozen=True)
class MonitorConfig:
    """The ``monitor`` section: what is watched all along the training; no targets means every module."""

    activations: bool = True
    gradients: bool = True
    optimizer: bool = True
    parameters: bool = False
    comm: bool = False
    every: int = 1
    targets: tuple[Target, ...] = ()
    alerts: tuple[Alert, ...] = ()
    format: tuple[Format, ...] = ("parquet",)


@dataclass(frozen=True)
class PerturbConfig:
    """The ``perturb`` section: operators run again on a changed input, to judge or to repair them."""

    mode: Mode = "improve_precision"
    handler: Handler = "check"
    stage: Stage = "forward"
    list: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    preheat: bool = False
    preheat_steps: int = 15
    max_samples: int = 20


@dataclass(frozen=True)
class ChecksConfig:
    """The ``checks`` section: comparisons across ranks, the only part of the kit that communicates."""

    replicas: bool = True
    collectives: bool = False


@dataclass(frozen=True)
class RecorderConfig:
    """The ``recorder`` section: the last steps kept in memory and written when something happens."""

    keep_steps: int = 4
    on: tuple[Trigger, ...] = ("nonfinite", "alert", "signal")


@dataclass(frozen=True)
class Limits:
    """The ``limits`` section, in bytes; a disk limit of None is what the file system allows."""

    host_memory: int = 2 << 30
    disk: int | None = None


@dataclass(frozen=True)
class ProbeConfig:
    """A whole probe file, checked.

    ``raw`` is the document as written, for run.json; ``notes`` says how a file of msprobe was translated.
    """

    output: Path = Path("probe_out")
    ranks: RankSelection = field(default_factory=RankSelection)
    steps: StepSelection = field(default_factory=StepSelection)
    dump: DumpConfig | None = None
    monitor: MonitorConfig | None = None
    perturb: PerturbConfig | None = None
    checks: ChecksConfig | None = None
    recorder: RecorderConfig | None = None
    limits: Limits = field(default_factory=Limits)
    strict: bool = False
    source: str = ""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()
