"""Cost of perturb: the combinations of seed 002 (handler, stage, operators, mode) and what a budget leaves of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msprobe_megatron.bench.nets import NETS, measure_net
from msprobe_megatron.bench.options import Options, measured
from msprobe_megatron.bench.turns import PLAIN, Workload
from msprobe_megatron.bench.workloads import ARCHITECTURES, WORKLOADS, workload_of

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
# For other models than the demo GPT.
MODEL_VARIANTS: dict[str, dict[str, Any]] = {
    name: EVERY_STEP[name]
    for name in (
        "check_forward_softmax",
        "check_forward_all",
        "check_backward_softmax",
        "fix_forward_improve_precision",
    )
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
    if options.model is not None:
        return _models(options)
    lines: list[dict[str, Any]] = []
    for name, (turns, steps, many) in _SIZES.items():
        for workload in options.chosen([replace(WORKLOADS[name], turns=turns, steps=steps, warm_up=2)]):
            lines += measured(workload, {**EVERY_STEP, **SEED}, options)
            whole = replace(workload, steps=many, whole=True)
            lines += [line for line in measured(whole, BUDGET, options) if not line["name"].endswith(f":{PLAIN}")]
    for line in lines:
        line["target"] = TARGETS.get(line["name"])
    return lines


def _models(options: Options) -> list[dict[str, Any]]:
    """The seed's language models, small, a ResNet and a DiT: `--model NAME`, or `--model all`."""
    known = [*ARCHITECTURES, *NETS]
    lines: list[dict[str, Any]] = []
    for name in known if options.model == "all" else [n for n in known if n == options.model]:
        turns = options.turns or 3
        if name in NETS:
            workload = Workload(name, "", turns, 4, warm_up=2)
            results = measure_net(workload, MODEL_VARIANTS, options.out, options.progress)
            lines += [result.as_dict() for result in results]
        else:
            lines += measured(replace(workload_of(name, turns, 3), warm_up=2), MODEL_VARIANTS, options)
    return lines
