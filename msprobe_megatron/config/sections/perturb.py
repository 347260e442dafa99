"""The ``perturb`` section: operators are run again with a changed input or precision."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import (
    BOOLEAN,
    Contradiction,
    ValueType,
    any_schema,
    integer,
    key,
    list_schema,
    one_of,
    other_settings,
    refuse_contradictions,
    section,
)
from msprobe_megatron.config.name_patterns import NAME_PATTERNS
from msprobe_megatron.config.selection import NUMBERS, StepSelection

Mode = Literal["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]
Handler = Literal["check", "fix"]
Stage = Literal["forward", "backward"]
Profile = Literal["ulp", "msprobe"]
Device = Literal["cpu", "npu", "cuda"]
Twin = Literal["precision", "sibling"]
MODES: tuple[str, ...] = get_args(Mode)

# The modes whose second result is better than the first; only such a result may replace it.
_FIXING_MODES = ("improve_precision", "to_cpu")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")
_MOST_ROWS = 10**6


def _read_budget(node: Node) -> float:
    if node.value == "all":
        return 1.0
    match = _PERCENT.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None or not 0 < float(match[1]) <= 100:
        raise node.error("is not a share", "a share of the step such as 5%, or all")
    return float(match[1]) / 100


def _read_rows(node: Node) -> int:
    if node.value == "all":
        return 0
    accepted = f"a whole number from 1 to {_MOST_ROWS}, or all"
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        raise node.error("is not a whole number", accepted)
    if not 1 <= node.value <= _MOST_ROWS:
        raise node.error("is out of range", accepted)
    return node.value


def _read_calls(node: Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items("a list of names of calls"))


_CALLS = ValueType(_read_calls, list_schema({"type": "string", "minLength": 1}))
_BUDGET = ValueType(
    _read_budget,
    any_schema([{"const": "all"}, {"type": "string", "pattern": f"^{_PERCENT.pattern}$"}]),
    lambda share: "all" if share == 1 else f"{share * 100:.6g}%",
)
_ROWS = ValueType(
    _read_rows,
    any_schema([{"const": "all"}, {"type": "integer", "minimum": 1, "maximum": _MOST_ROWS}]),
    lambda rows: rows or "all",
)


@dataclass(frozen=True)
class PerturbConfig:
    """The ``perturb`` section: operators are run again on a changed input, to check or to repair them.

    ``list`` holds parts of the names of API calls (``softmax``), ``modules`` those of modules (``linear_qkv``); with
    neither and no ``scope`` the whole network is examined. ``budget`` limits the cost of the examination; without it,
    the whole network is sampled within 5% of a step, and named operators are examined in full. ``rows`` of each result
    are computed again in high precision.
    """

    mode: Mode = key(
        "improve_precision", one_of(MODES), "what is changed: precision, input, order, device, or nothing", "no_change"
    )
    handler: Handler = key(
        "check", one_of(get_args(Handler)), "check the operator, or replace its result with the better one", "fix"
    )
    stage: Stage = key("forward", one_of(get_args(Stage)), "examine the forward or the backward pass", "backward")
    list: tuple[str, ...] = key((), NAME_PATTERNS, "API calls by parts of their names", "[softmax]")
    scope: tuple[str, ...] = key((), _CALLS, "single calls by their full names", "[softmax.0]")
    modules: tuple[str, ...] = key((), NAME_PATTERNS, "modules by parts of their names", "[linear_qkv]")
    layers: StepSelection | None = key(None, NUMBERS, "global layer numbers that are examined", "[0, 1]")
    microbatches: StepSelection | None = key(None, NUMBERS, "microbatches that are examined", "[0]")
    profile: Profile = key(
        "ulp", one_of(get_args(Profile)), "limits from the rounding of the dtype, or msprobe's thresholds", "msprobe"
    )
    budget: float | None = key(None, _BUDGET, "share of a step that the examination may cost", "10%")
    device: Device | None = key(None, one_of(get_args(Device)), "device of the second computation", "cpu")
    ulps: int = key(1, integer(1, 1000), "size of the noise in units in the last place", "4")
    rows: int = key(16, _ROWS, "rows of a result that are computed again in high precision", "all")
    twin: Twin = key(
        "precision",
        one_of(get_args(Twin)),
        "compare with higher precision, or with the same module of another layer",
        "sibling",
    )
    preheat: bool = key(False, BOOLEAN, "learn limits in the first steps, as msprobe does", "true")
    preheat_steps: int = key(15, integer(1), "number of steps that limits are learned from", "30")
    max_samples: int = key(20, integer(1), "calls of an operator that limits are learned from, at most", "40")

    @property
    def whole(self) -> bool:
        """Whether no operator is named, so that the whole network is examined."""
        return not (self.list or self.scope or self.modules)

    @property
    def share(self) -> float:
        """The share of a step that the examination may cost; 1.0 is no limit."""
        if self.budget is not None:
            return self.budget
        sampled = self.whole and self.handler == "check" and self.profile == "ulp" and not self.preheat
        return 0.05 if sampled else 1.0

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        names = ", ".join((*self.list, *self.scope, *self.modules)) or "all operators"
        parts = [
            f"{self.handler} with {self.mode} (profile {self.profile}), {self.stage} of {names}",
            f"layers {self.layers.describe()}" if self.layers else "",
            f"microbatches {self.microbatches.describe()}" if self.microbatches else "",
            f"at most {self.share * 100:.3g}% of a step" if self.share < 1 else "",
            f"limits learned over {self.preheat_steps} steps" if self.preheat else "",
            *other_settings(self, *_DESCRIBED),
        ]
        return ", ".join(filter(None, parts))


_DESCRIBED = (
    "mode",
    "handler",
    "stage",
    "list",
    "scope",
    "modules",
    "layers",
    "microbatches",
    "profile",
    "budget",
    "preheat",
    "preheat_steps",
)
_CONTRADICTIONS: tuple[Contradiction[PerturbConfig], ...] = (
    Contradiction(
        "scope", lambda perturb: perturb.list and perturb.scope, "stands beside a list", "either list or scope"
    ),
    Contradiction(
        "device",
        lambda perturb: perturb.mode == "to_cpu" and perturb.device not in (None, "cpu"),
        "is not where mode to_cpu runs",
        "device: cpu, or another mode",
    ),
    Contradiction(
        "device",
        lambda perturb: perturb.mode != "to_cpu" and perturb.device == "cpu",
        "is not where mode {mode} runs",
        "mode: to_cpu, or leave device out",
    ),
    Contradiction(
        "stage",
        lambda perturb: perturb.profile == "msprobe" and perturb.stage == "backward" and perturb.whole,
        "of the whole network is not affordable with profile msprobe",
        "backward with a list, or profile: ulp",
    ),
    Contradiction(
        "handler",
        lambda perturb: perturb.handler == "fix" and perturb.mode not in _FIXING_MODES,
        "cannot repair with mode {mode}",
        f"mode: {' or '.join(_FIXING_MODES)}",
    ),
    Contradiction(
        "handler",
        lambda perturb: perturb.handler == "fix" and perturb.preheat,
        "has no thresholds to preheat",
        "check, or preheat: false",
    ),
    Contradiction(
        "budget",
        lambda perturb: perturb.handler == "fix" and perturb.budget is not None and perturb.budget < 1,
        "would repair an operator at some steps only",
        "budget: all, or handler: check",
    ),
    Contradiction(
        "twin",
        lambda perturb: perturb.twin == "sibling" and not (perturb.handler == "fix" and perturb.modules),
        "is the code of the same module in another layer",
        "handler: fix with names in modules",
    ),
    Contradiction(
        "preheat",
        lambda perturb: perturb.preheat and perturb.budget is not None and perturb.budget < 1,
        "counts every call",
        "budget: all, or preheat: false",
    ),
)
PERTURB = section(PerturbConfig, lambda config, node: refuse_contradictions(config, _CONTRADICTIONS, node))
