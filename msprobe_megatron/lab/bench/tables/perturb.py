"""Cost of perturb: the combinations of seed 002 (handler, stage, operators, mode) and what a budget leaves of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msprobe_megatron.lab.bench.clockwork.turns import PLAIN, Workload
from msprobe_megatron.lab.bench.models.nets import NETS, measure_net
from msprobe_megatron.lab.bench.models.workloads import ARCHITECTURES, WORKLOADS, asked, known, workload_of
from msprobe_megatron.lab.bench.options import Options, measured
from msprobe_megatron.lab.bench.peer.columns import Pair, columns

ABOUT = (
    "CPU time and peak memory of a training step over those of steps without the kit beside it; medians, taking turns"
    " in one process. softmax, matmul: that operator at every step, full results; all: every operator at every step;"
    " budget: 5 %, turns of many steps timed as a whole, writing included; names that end in a mode are msprobe's own"
    " comparison. The steps in which kinds of calls are seen for the first time are not counted. Seed 002 measured"
    " 7B models on an NPU, where to_cpu copies: only ratios of one machine can be compared."
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
        for mode in ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu")
    },
    **{
        f"check_forward_matmul_{mode}": _check(mode=mode, **_MATMUL, **_THEIRS)
        for mode in ("improve_precision", "change_value", "to_cpu")
    },
    **{
        f"check_forward_all_{mode}": _check(mode=mode, **_THEIRS)
        for mode in ("improve_precision", "add_noise", "bit_noise", "no_change")
    },
    **{
        f"check_backward_softmax_{mode}": _check("backward", mode=mode, **_SOFTMAX, **_THEIRS)
        for mode in ("improve_precision", "change_value", "to_cpu")
    },
    "preheat_backward_all": _check("backward", preheat=True),
    "check_backward_all": _check("backward", budget="all"),
    "fix_forward_to_cpu": {"perturb": {"handler": "fix", "mode": "to_cpu", **_SOFTMAX}},
}
BUDGET: dict[str, dict[str, Any]] = {
    "check_forward_budget": _check(),
    "check_backward_budget": _check("backward"),
}
VARIANTS = {**EVERY_STEP, **SEED, **BUDGET}


def _of_operators(operators: list[str], modes: list[str], backward: list[str], fixes: list[str]) -> dict[str, Any]:
    """The lines of one of the seed's smaller tables; no operators are all of them."""
    which: dict[str, Any] = {"list": operators, **_THEIRS}
    # Of the whole network only our own comparison goes backward.
    every: dict[str, Any] = {} if operators else {"budget": "all"}
    back = {**_THEIRS, "list": operators[:1]} if operators else every
    name = "_".join(operators[:1]) or "all"
    return {
        **{f"check_forward_{name}_{mode}": _check(mode=mode, **which) for mode in modes},
        **{f"check_backward_{name}_{mode}": _check("backward", mode=mode, **back) for mode in backward},
        **{
            f"fix_forward_{name}_{mode}": {"perturb": {"handler": "fix", "mode": mode, "list": operators[:1]}}
            for mode in fixes
        },
        f"check_forward_{name}": _check(list=operators, **every),
    }


# For other models than the demo GPT: what the seed measured of each, and our own comparison of the same operators.
MODEL_VARIANTS = _of_operators([], ["improve_precision"], ["add_noise"], ["improve_precision"])
NET_VARIANTS = {
    "resnet": _of_operators(["conv2d"], ["improve_precision"], [], ["improve_precision", "to_cpu"]),
    "dit": _of_operators(
        ["linear", "scaled_dot_product_attention"],
        ["improve_precision", "add_noise"],
        ["improve_precision", "add_noise"],
        ["improve_precision", "to_cpu"],
    ),
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
MEMORY_TARGET = 1.1
_SIZES = {"h64": (8, 6, 60), "h512": (6, 2, 12)}
"""Turns, steps of a turn, and steps of a turn with a budget."""


def _peer(operators: list[str], mode: str = "add_noise", stage: str = "forward", **more: Any) -> dict[str, Any]:
    """The probe file of msprobe's own free benchmark, 8.3.3."""
    section: dict[str, Any] = {
        "scope": [],
        "list": operators,
        "fuzz_device": "npu",
        "pert_mode": mode,
        "handler_type": "check",
    }
    section |= {"fuzz_level": "L1", "fuzz_stage": stage, "if_preheat": False, "preheat_step": 15, "max_sample": 20}
    return {"task": "free_benchmark", "rank": [], "step": [], "level": "L1", "free_benchmark": {**section, **more}}


PAIRS = [
    Pair("check_forward_softmax", EVERY_STEP["check_forward_softmax"], _peer(["softmax"])),
    Pair("check_forward_all", EVERY_STEP["check_forward_all"], _peer([])),
    Pair("check_backward_softmax", EVERY_STEP["check_backward_softmax"], _peer(["softmax"], stage="backward")),
    Pair(
        "fix_forward_improve_precision",
        EVERY_STEP["fix_forward_improve_precision"],
        _peer(["softmax"], "improve_precision", handler_type="fix"),
    ),
    Pair("preheat_forward_all", EVERY_STEP["preheat_forward_all"], _peer([], "improve_precision", if_preheat=True)),
]


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each combination, at both sizes."""
    if options.model is not None:
        return _models(options)
    lines: list[dict[str, Any]] = []
    for name, (turns, steps, many) in _SIZES.items():
        for workload in options.chosen([replace(WORKLOADS[name], turns=turns, steps=steps, warm_up=2, fresh=True)]):
            lines += measured(workload, {**EVERY_STEP, **SEED}, options)
            whole = replace(workload, steps=many, whole=True)
            lines += [line for line in measured(whole, BUDGET, options) if not line["name"].endswith(f":{PLAIN}")]
            lines += columns(workload.name, PAIRS, options, steps=4, rounds=1)
    for line in lines:
        line["target"] = TARGETS.get(line["name"])
        if line["name"].startswith("h512:check_"):
            line["asked"] = {"memory_ratio": MEMORY_TARGET}
    return lines


def _models(options: Options) -> list[dict[str, Any]]:
    """The seed's language models, small, a ResNet and a DiT: `--model NAME`, or `--model all`."""
    model = str(options.model)
    if model.startswith("--"):
        (workload,) = asked(options, [])
        return measured(replace(workload, warm_up=2, fresh=True), {**EVERY_STEP, **SEED}, options)
    every = [*ARCHITECTURES, *NETS]
    lines: list[dict[str, Any]] = []
    for name in every if model == "all" else [known(model, every)]:
        turns = options.turns or 3
        if name in NETS:
            workload = Workload(name, "", turns, 4, warm_up=2, fresh=True)
            results = measure_net(workload, NET_VARIANTS[name], options.out, options.progress)
            lines += [result.as_dict() for result in results]
        else:
            lines += measured(replace(workload_of(name, turns, 3), warm_up=2, fresh=True), MODEL_VARIANTS, options)
    return lines
