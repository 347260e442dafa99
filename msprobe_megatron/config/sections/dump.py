"""What a probe file says once it has been read: frozen dataclasses, one for each section.

Built by ``validate`` (from our own files) and, through it, by the translation of msprobe's files; read by the
session and the probes. Defaults stand here and nowhere else. Sizes are bytes, selections are objects that
answer membership, absent sections are None.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msprobe_megatron.config.replay import ReplayConfig
from msprobe_megatron.config.reproduce import ReproduceConfig
from msprobe_megatron.config.selection import RankSelection, StepSelection
from msprobe_megatron.config.shards import ShardRule

Level = Literal["L0", "L1", "mix", "debug"]
Task = Literal["statistics", "tensor", "structure", "nonfinite"]
Apis = Literal["core", "focus", "all"]
DataMode = Literal["all", "forward", "backward", "input", "output"]
Mode = Literal["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]
Handler = Literal["check", "fix"]
Stage = Literal["forward", "backward"]
Profile = Literal["ulp", "msprobe"]
Twin = Literal["precision", "sibling"]
Rule = Literal["nonfinite", "spike", "limit", "vanish", "replica", "dead_expert", "custom"]
Direction = Literal["both", "forward", "backward"]
Microbatches = Literal["each", "summed"]
Metric = Literal["attention", "router", "stable_rank"]
Format = Literal["parquet", "tensorboard"]
Trigger = Literal["nonfinite", "alert", "signal"]

LEVELS: tuple[str, ...] = get_args(Level)
TASKS: tuple[str, ...] = get_args(Task)
APIS: tuple[str, ...] = get_args(Apis)
DATA_MODES: tuple[str, ...] = get_args(DataMode)
MODES: tuple[str, ...] = get_args(Mode)
HANDLERS: tuple[str, ...] = get_args(Handler)
STAGES: tuple[str, ...] = get_args(Stage)
PROFILES: tuple[str, ...] = get_args(Profile)
TWINS: tuple[str, ...] = get_args(Twin)
RULES: tuple[str, ...] = get_args(Rule)
DIRECTIONS: tuple[str, ...] = get_args(Direction)
MICROBATCHES: tuple[str, ...] = get_args(Microbatches)
METRICS: tuple[str, ...] = get_args(Metric)
FORMATS: tuple[str, ...] = get_args(Format)
TRIGGERS: tuple[str, ...] = get_args(Trigger)
SECTIONS = ("dump", "monitor", "perturb", "checks", "recorder")


@dataclass(frozen=True)
class Slice:
    """Elements ``begin`` to ``end`` (not included; None is the rest) of dimension ``dim``, if it has ``size``."""

    dim: int = 0
    size: int | None = None
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class DumpConfig:
    """The ``dump`` section: which numbers of modules and API calls are written.

    ``list`` holds parts of names, or regular expressions between slashes; empty is every name. An axis that
    ``data_mode`` leaves out (forward and backward, input and output) is recorded on both sides. ``scope`` is a window
    from one name to another. Tensors of the names in ``tensor_list`` are saved beside the statistics of all. ``slice``
    records a part of every tensor. ``functions`` names more functions, ``module:function``, to be seen as API calls.
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
    tensor_list: tuple[str, ...] = ()
    slice: tuple[Slice, ...] = ()
    functions: tuple[str, ...] = ()


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
class AlertAction:
    """What an alert does beside saying so.

    ``record`` steps are dumped at ``level`` from the next one on; ``recorder`` writes the flight recorder out;
    ``command`` is run in the background, never through a shell.
    """

    record: int = 0
    level: Level = "mix"
    recorder: bool = False
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class Alert:
    """A rule of the monitor.

    ``nonfinite``: a NaN or an Inf. ``spike``: a size (root mean square) more than (1 + threshold) times above or below
    the median of the last ``window`` steps, and more than ``deviations`` robust deviations from it (0.4 times as many
    for the gradient norm); where no threshold is given, it is 0.25 for losses, 1 for the gradient norm, 3 for
    activations (9 for those of a single expert), 6 for updates, 9 for clipped gradients, 29 for gradients of routers
    and experts, 2 for other gradients. ``limit``: an absolute value above the threshold. ``vanish``: a size below
    threshold times the median, or nothing but zeros where there were few. ``replica``: ranks that should hold the same
    do not (needs ``checks``). ``dead_expert``: an expert that no token reached. ``custom``: what ``expression`` says of
    a row. ``cooldown`` counts steps; ``names`` and ``kinds`` choose rows, empty is all.
    """

    rule: Rule
    threshold: float | None = None
    window: int = 32
    deviations: float = 10.0
    cooldown: int = 100
    names: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    expression: str = ""
    action: AlertAction | None = None


@dataclass(frozen=True)
class MonitorConfig:
    """The ``monitor`` section: what is watched all along the training; no targets means every module.

    ``activations``: inputs and outputs of modules and their gradients, in the chosen ``direction``. ``gradients``:
    those of weights before and after reduction; also after clipping, and of each microbatch, if asked. ``optimizer``:
    the moments. ``master_weights``, ``update`` (and its ratio to the weight) and ``agreement`` (of the signs of
    gradient and momentum) are of the optimizer too. ``parameters``: before and after the step. ``data``: digests of
    token ids. ``metrics``: entropy and largest logit of attention, load and entropy of routers, spectral norm and
    stable rank of weights. ``microbatches``: a row for each, or one for all of a step. Watched are the steps
    ``start_step``, ``start_step`` + ``every``, … that lie in ``window``, ``collect_times`` of them; ``steps`` of the
    probe file is the dump's.
    """

    activations: bool = True
    direction: Direction = "both"
    microbatches: Microbatches = "each"
    gradients: bool = True
    clipped: bool = False
    microbatch_gradients: bool = False
    optimizer: bool = True
    master_weights: bool = False
    update: bool = False
    agreement: bool = False
    parameters: bool = False
    data: bool = False
    comm: bool = False
    metrics: tuple[Metric, ...] = ()
    start_step: int = 0
    every: int = 1
    collect_times: int | None = None
    window: StepSelection | None = None
    targets: tuple[Target, ...] = ()
    alerts: tuple[Alert, ...] = ()
    format: tuple[Format, ...] = ("parquet",)


@dataclass(frozen=True)
class PerturbConfig:
    """The ``perturb`` section: operators run again on a changed input, to judge or to repair them.

    ``list`` holds parts of the names of API calls (``softmax``), ``modules`` those of modules (``linear_qkv``); with
    neither and no ``scope`` it is the whole network. ``budget`` is the share of a step that examining may cost, 1.0
    for everything at every step; None is 5 % for the whole network and everything else in full. ``rows`` are the
    rows of each result that are computed again in high precision, 0 for all of them.
    """

    mode: Mode = "improve_precision"
    handler: Handler = "check"
    stage: Stage = "forward"
    list: tuple[str, ...] = ()
    scope: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    layers: StepSelection | None = None
    microbatches: StepSelection | None = None
    profile: Profile = "ulp"
    budget: float | None = None
    device: Literal["cpu", "npu", "cuda"] | None = None
    ulps: int = 1
    rows: int = 16
    twin: Twin = "precision"
    preheat: bool = False
    preheat_steps: int = 15
    max_samples: int = 20

    @property
    def whole(self) -> bool:
        """Whether nothing is named, so that the whole network is meant."""
        return not (self.list or self.scope or self.modules)

    @property
    def share(self) -> float:
        """The share of a step that examining may cost; 1.0 is no limit.

        Example: ``PerturbConfig().share == 0.05``, ``PerturbConfig(list=("softmax",)).share == 1.0``.
        """
        if self.budget is not None:
            return self.budget
        sampled = self.whole and self.handler == "check" and self.profile == "ulp" and not self.preheat
        return 0.05 if sampled else 1.0


@dataclass(frozen=True)
class ChecksConfig:
    """The ``checks`` section: comparisons across ranks, the only part of the kit that communicates.

    ``replicas``: weights and gradients that ranks share; ``optimizer``: shards tile, learning rate and step agree;
    ``rng``: random generators agree or differ as they should; ``collectives``: results of communication.
    """

    replicas: bool = True
    optimizer: bool = True
    rng: bool = True
    collectives: bool = False
    every: int = 1


@dataclass(frozen=True)
class RecorderConfig:
    """The ``recorder`` section: the last steps kept in memory and written when something happens.

    An exception that escapes training always has them written.
    """

    keep_steps: int = 4
    on: tuple[Trigger, ...] = ("nonfinite", "alert", "signal")
    times: int = 8
    """How often it is written out, at most."""


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
    shards: tuple[ShardRule, ...] = ()
    reproduce: ReproduceConfig | None = None
    replay: ReplayConfig | None = None
    limits: Limits = field(default_factory=Limits)
    strict: bool = False
    source: str = ""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()
