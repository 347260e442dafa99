"""The ``monitor`` section: statistics that are recorded throughout the training."""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import (
    BOOLEAN,
    ValueType,
    as_written,
    integer,
    key,
    one_of,
    other_settings,
    read_section,
    refuse_all_off,
    section,
    section_schema,
    some_of,
    switches,
)
from msprobe_megatron.config.sections.alerts import ALERTS, Alert
from msprobe_megatron.config.selection import NUMBERS, StepSelection

Direction = Literal["both", "forward", "backward"]
Microbatches = Literal["each", "summed"]
Metric = Literal["attention", "router", "stable_rank"]
Format = Literal["parquet", "tensorboard"]

_TENSOR = re.compile(r"tensor|tuple\[([0-9]{1,4})\](?::([0-9]{1,4}))?")
_ACCEPTED_TENSOR = "tensor, tuple[N] or tuple[N]:i with i below N"


@dataclass(frozen=True)
class TensorChoice:
    """One tensor of a module's arguments or results: the only one, or ``index`` of ``count``."""

    count: int | None = None
    index: int | None = None

    def describe(self) -> str:
        """The choice as written in a probe file."""
        if self.count is None:
            return "tensor"
        return f"tuple[{self.count}]" + (f":{self.index}" if self.index is not None else "")


def _read_tensor(node: Node) -> TensorChoice:
    match = _TENSOR.fullmatch(node.text(_ACCEPTED_TENSOR))
    if match is None:
        raise node.error("does not say which tensor", _ACCEPTED_TENSOR)
    count, index = (None if group is None else int(group) for group in match.groups())
    if count is not None and (count == 0 or (index is not None and index >= count)):
        raise node.error("names a tensor that is not there", _ACCEPTED_TENSOR)
    return TensorChoice(count, index)


_CHOICE = ValueType(_read_tensor, {"type": "string", "pattern": f"^(?:{_TENSOR.pattern})$"}, TensorChoice.describe)


@dataclass(frozen=True)
class Target:
    """A module or parameter that is monitored. With none of its sides named, every tensor is."""

    name: str
    input: TensorChoice | None = key(None, _CHOICE, "which of the inputs", "tensor")
    output: TensorChoice | None = key(None, _CHOICE, "which of the outputs", "tensor")
    input_grad: TensorChoice | None = key(None, _CHOICE, "which of the gradients of inputs", '"tuple[2]:0"')
    output_grad: TensorChoice | None = key(None, _CHOICE, "which of the gradients of outputs", '"tuple[1]"')


def _read_targets(node: Node) -> tuple[Target, ...]:
    targets = node.mapping("a mapping from module names to {} or {input: tensor, …}")
    for name, child in targets.items():
        if not name.strip():
            raise child.error("stands under an empty name", "the name of a module or parameter")
    return tuple(read_section(Target, child, name=name) for name, child in targets.items())


def _write_targets(targets: tuple[Target, ...]) -> dict[str, Any]:
    return {target.name: as_written(target) for target in targets}


_TARGETS = ValueType(
    _read_targets,
    {"type": "object", "additionalProperties": section_schema(Target)},
    _write_targets,
    section=Target,
    below=".NAME",
)


@dataclass(frozen=True)
class MonitorConfig:
    """The ``monitor`` section: statistics recorded throughout the training. Without targets, of every module.

    ``activations``: inputs and outputs of modules and their gradients, in the chosen ``direction``. ``gradients``:
    those of weights before and after reduction. ``optimizer``: the moments. ``metrics``: entropy and largest logit of
    attention, load and entropy of routers, spectral norm and stable rank of weights. Monitored are the steps
    ``start_step``, ``start_step`` + ``every``, … that lie in ``window``, ``collect_times`` of them; the top-level
    ``steps`` does not apply to the monitor.
    """

    activations: bool = key(True, BOOLEAN, "inputs and outputs of modules", "false")
    direction: Direction = key("both", one_of(get_args(Direction)), "activations, their gradients, or both", "forward")
    microbatches: Microbatches = key(
        "each", one_of(get_args(Microbatches)), "one row per microbatch, or one for all of a step", "summed"
    )
    gradients: bool = key(True, BOOLEAN, "gradients of weights, before and after reduction", "false")
    clipped: bool = key(False, BOOLEAN, "gradients after clipping", "true")
    microbatch_gradients: bool = key(False, BOOLEAN, "contribution of each microbatch to a gradient", "true")
    optimizer: bool = key(True, BOOLEAN, "moments of the optimizer", "false")
    master_weights: bool = key(False, BOOLEAN, "the optimizer's own copy of the weights", "true")
    update: bool = key(False, BOOLEAN, "change of a weight in a step, and its ratio to the weight", "true")
    agreement: bool = key(False, BOOLEAN, "share of elements whose gradient and momentum have the same sign", "true")
    parameters: bool = key(False, BOOLEAN, "weights before and after the step", "true")
    data: bool = key(False, BOOLEAN, "digests of token ids, per sample", "true")
    comm: bool = key(False, BOOLEAN, "collectives: size, inputs and results", "true")
    metrics: tuple[Metric, ...] = key(
        (),
        some_of(get_args(Metric), empty=True),
        "metrics of attention, routers and weight matrices",
        "[attention, router]",
    )
    start_step: int = key(0, integer(0), "first step that is monitored", "100")
    every: int = key(1, integer(1), "interval between two monitored steps", "10")
    collect_times: int | None = key(None, integer(1), "number of steps that are monitored, at most", "1000")
    window: StepSelection | None = key(None, NUMBERS, "monitor steps in these ranges only", '["0-99", "5000-5100"]')
    targets: tuple[Target, ...] = key(
        (), _TARGETS, "modules to monitor, and which of their tensors", "{linear_qkv: {}}"
    )
    alerts: tuple[Alert, ...] = key(
        (), ALERTS, "rules that raise an alert", "[nonfinite, {rule: spike, kinds: [loss]}]"
    )
    format: tuple[Format, ...] = key(
        ("parquet",), some_of(get_args(Format)), "formats that are written", "[parquet, tensorboard]"
    )

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        kinds = [name for name in switches(MonitorConfig) if getattr(self, name)]
        kinds += [f"{metric} metrics" for metric in self.metrics]
        when = "".join(
            (
                "every step" if self.every == 1 else f"every {self.every} steps",
                f" from {self.start_step}" if self.start_step else "",
                f" of {self.window.describe()}" if self.window else "",
                f", {self.collect_times} times" if self.collect_times else "",
            )
        )
        parts = [
            f"{', '.join(kinds)} of {f'{len(self.targets)} target(s)' if self.targets else 'all modules'}",
            when,
            f"as {', '.join(self.format)}",
            *other_settings(self, *_DESCRIBED, *switches(MonitorConfig)),
        ]
        alerts = f"; alerts: {', '.join(alert.describe() for alert in self.alerts)}" if self.alerts else ""
        return ", ".join(parts) + alerts


def _check(config: MonitorConfig, node: Node) -> None:
    refuse_all_off(config, (*switches(MonitorConfig), "metrics"), node)


_DESCRIBED = ("metrics", "start_step", "every", "collect_times", "window", "targets", "alerts", "format")
MONITOR = section(MonitorConfig, _check)
