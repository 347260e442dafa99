"""Cost of perturb: the combinations of seed 002 (handler, stage, operators, mode) and what a budget leaves of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msprobe_megatron.bench.options import Options, measured
from msprobe_megatron.bench.turns import PLAIN
from msprobe_megatron.bench.workloads import WORKLOADS

ABOUT = (
    "CPU time and peak memory of a training step over those of the same step without the kit, taking turns in one"
    " process. softmax, matmul: that operator at every step, full results; all: every operator at every step; budget:"
    " 5 %, turns of many steps timed as a whole, writing included. The steps in which kinds of calls are seen for the"
    " first time are not counted."
)


def _check(stage: str = "forward", **section: Any) -> dict[str, Any]:
    return {"perturb": {"handler": "check", "stage": stage, **section}}


_SOFTMAX: dict[str, Any] = {"list": ["softmax"]}
_MATMUL: dict[str, Any] = {"list": ["matmul"]}
_THEIRS: dict[str, Any] = {"profile": "msprobe"}
EVERY_STEP: dict[str, dict[str, Any]] = {
    "check_forward_softmax": _check(**_SOFTMAX),
    "check_forward_all": _check(budget="all"),
    "check_backward_softmax": _check("backward", **_SOFTMAX),
    "fix_forward_improve_precision": {"perturb": {"handler": "fix", **_SOFTMAX}},
    "preheat_forward_all": _check(preheat=True),
}
# The rest of seed 002's table: msprobe's own modes and comparison.
SEED: dict[str, dict[str, Any]] = {
    **{
        f"check_forward_softmax_{mode}": _check(mode=mode, **_SOFTMAX, **_THEIRS)
        for mode in ("add_noise", "bit_noise", "change_value", "no_change", "to_cpu")
    },
    **{
        f"check_forward_matmul_{mode}": _check(mode=mode, **_MATMUL, **_THEIRS)
        for mode in ("improve_precision", "change_value")
    },
    **{
        f"check_forward_all_{mode}": _check(mode=mode, **_THEIRS)
        for mode in ("improve_precision", "add_noise", "bit_noise", "no_change")
    },
    **{
        f"check_backward_softmax_{mode}": _check("backward", mode=mode, **_SOFTMAX, **_THEIRS)
        for mode in ("improve_precision", "change_value")
    },
    "check_backward_all": _check("backward", budget="all"),
    "fix_forward_to_cpu": {"perturb": {"handler": "fix", "mode": "to_cpu", **_SOFTMAX}},
}
BUDGET: dict[str, dict[str, Any]] = {
    "check_forward_budget": _check(),
    "check_backward_budget": _check("backward"),
}
TARGETS = {
    **{"h512:check_forward_softmax": 1.1, "h64:check_forward_softmax": 1.5},
    **{"h512:check_forward_budget": 1.06, "h64:check_forward_budget": 1.1},
    **{"h512:check_forward_all": 1.8, "h64:check_forward_all": 8.0},
    **{"h512:check_backward_softmax": 1.2, "h64:check_backward_softmax": 2.0},
    **{"h512:check_backward_budget": 1.08, "h64:check_backward_budget": 1.15},
    **{"h512:fix_forward_improve_precision": 1.1, "h64:fix_forward_improve_precision": 1.5},
    "h512:preheat_forward_all": 1.8,
}
_SIZES = {"h64": (5, 8, 60), "h512": (4, 2, 12)}
"""Turns, steps of a turn, and steps of a turn with a budget."""


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each combination, at both sizes.

    Example::

        bench(Options(Path("bench_out"), only="h64"))
    """
    lines: list[dict[str, Any]] = []
    for name, (turns, steps, many) in _SIZES.items():
        for workload in options.chosen([replace(WORKLOADS[name], turns=turns, steps=steps, warm_up=2)]):
            lines += measured(workload, {**EVERY_STEP, **SEED}, options)
            whole = replace(workload, steps=many, whole=True)
            lines += [line for line in measured(whole, BUDGET, options) if not line["name"].endswith(f":{PLAIN}")]
    for line in lines:
        line["target"] = TARGETS.get(line["name"])
    return lines
