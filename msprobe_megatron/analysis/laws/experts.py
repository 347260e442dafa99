"""Laws of mixture of experts: every token is routed as often as configured, arrives, and comes home."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step


def _routers(step: Step, path: str) -> list[Row]:
    return [
        row
        for row in step.of("activation")
        if row.op == "TopKRouter" and row.io == "output" and row.path == path and row.phase == "forward"
    ]


def _drops(scene: Scene) -> bool:
    return scene.argument("moe_expert_capacity_factor") is not None


def routed(scene: Scene) -> list[Breach]:
    """Each token goes to top-k experts, with probabilities that sum to what the configuration says."""
    top = scene.argument("moe_router_topk")
    if not scene.argument("num_experts") or not top:
        raise NotChecked("a model with experts, and the training arguments")
    normalised = not scene.argument("moe_router_pre_softmax") and scene.argument("moe_router_score_function") in (
        None,
        "softmax",
    )
    sigmoid = scene.argument("moe_router_score_function") == "sigmoid" and int(top) > 1
    factor = float(scene.argument("moe_router_topk_scaling_factor") or 1.0)
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps:
        for row in _routers(step, "1"):
            tokens = row.numel / row.shape[-1]
            looked += 1
            if row.sum > tokens * int(top) or (not _drops(scene) and row.sum != tokens * int(top)):
                found.append((row, f"{row.name} routes {row.sum / tokens:.4g} experts a token, not {top}"))
        for row in _routers(step, "0"):
            if len(row.shape) != 2 or _drops(scene):
                continue
            tokens = row.numel / row.shape[-1]
            looked += 1
            mean = row.sum / tokens
            close = abs(mean - factor) <= max(1e-4, row.epsilon) * factor
            if row.min < 0 or ((normalised or sigmoid) and not close):
                found.append((row, f"the probabilities of {row.name} sum to {mean:.5g} a token, not to {factor:g}"))
            elif not normalised and not sigmoid and mean > factor * (1 + max(1e-3, row.epsilon)):
                found.append((row, f"the probabilities of {row.name} sum to {mean:.5g} a token, over {factor:g}"))
    if not looked:
        raise NotChecked("what routers put out: dump: {level: L0}")
    if not found:
        return []
    row, text = min(found, key=lambda item: (item[0].step, item[0].microbatch or 0, item[0].seq))
    return [Breach(f"{text} ({moment(row)}, rank {row.rank}); {len(found)} in all", at(row))]


def arrived(scene: Scene) -> list[Breach]:
    """Experts get every token as often as it was routed, and what they put out comes home once."""
    top = scene.argument("moe_router_topk")
    if not scene.argument("num_experts") or not top:
        raise NotChecked("a model with experts, and the training arguments")
    if _drops(scene) or scene.size("etp") > 1:
        raise NotChecked("experts that drop no token and are not cut over tensor-parallel ranks")
    if scene.size("tp") > 1 and not scene.run.facts.get("sequence_parallel"):
        raise NotChecked("sequence parallelism, where experts are beside tensor parallelism")
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps:
        for group in _layers(scene, step).values():
            if group.get("hidden") and len(group["hidden"]) == len(group.get("inside", [])):
                looked += 1
                found += [*_taken_in(group, int(top)), *_weighed(group), *_came_home(group)]
    if not looked:
        raise NotChecked("what experts take in and put out, on all ranks: dump: {level: L0}")
    if not found:
        return []
    row, text = min(found, key=lambda item: (item[0].step, item[0].microbatch or 0, item[0].seq))
    return [Breach(f"{text} ({moment(row)}); {len(found)} in all", at(row))]


def _taken_in(group: dict[str, list[Row]], top: int) -> list[tuple[Row, str]]:
    """What experts take in is every token as often as it was routed: sums and squares say so."""
    hidden, inside = group["hidden"], group["inside"]
    wanted, squares = top * sum(r.sum for r in hidden), top * sum(r.sumsq for r in hidden)
    got, got_squares = sum(r.sum for r in inside), sum(r.sumsq for r in inside)
    size = math.sqrt(sum(r.numel for r in inside) * max(squares, 1e-300))
    if abs(got_squares - squares) <= 1e-6 * squares and abs(got - wanted) <= 1e-6 * size:
        return []
    name = hidden[0].name
    return [(inside[0], f"experts of {name} get squares that sum to {got_squares:.7g}, tokens left with {squares:.7g}")]


def _weighed(group: dict[str, list[Row]]) -> list[tuple[Row, str]]:
    """Experts are given the probabilities that the router gave."""
    probs, given = group.get("probs", []), group.get("given", [])
    if not probs or len(probs) != len(given):
        return []
    left, came = sum(r.sum for r in probs), sum(r.sum for r in given)
    if abs(left - came) <= max(1e-5, *(r.epsilon for r in (*probs, *given))) * left:
        return []
    name = group["hidden"][0].name
    return [(given[0], f"experts of {name} get probabilities of {came:.6g}, the router gave {left:.6g}")]


def _came_home(group: dict[str, list[Row]]) -> list[tuple[Row, str]]:
    """What the layer puts out sums to what its experts put out, which have weighed it already."""
    out, home = group.get("out", []), group.get("home", [])
    if not group.get("given") or not out or len(out) != len(home) or group.get("shared"):
        return []
    left, came = sum(r.sum for r in out), sum(r.sum for r in home)
    epsilon = max(r.epsilon for r in (*out, *home))
    norm = math.sqrt(sum(r.sumsq for r in (*out, *home)))
    if abs(left - came) <= epsilon * (24 * norm + 0.02 * sum(r.spread for r in out)) + 1e-12:
        return []
    return [(home[0], f"experts of {group['hidden'][0].name} put out {left:.6g} in all, {came:.6g} came home")]


def _layers(scene: Scene, step: Step) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Rows of an expert layer in one microbatch, of all ranks that exchange tokens."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in step.of("activation"):
        if row.phase != "forward" or row.microbatch is None or ".mlp" not in row.name:
            continue
        base = row.name.partition(".mlp")[0]
        rest = row.name[len(base) :]
        part = ""
        if rest == ".mlp" and row.op == "MoELayer":
            part = "hidden" if row.io == "input" and row.path == "hidden_states" else ""
            part = part or ("home" if row.io == "output" and row.path in ("", "0") else "")
        elif rest == ".mlp.router" and row.io == "output" and row.path == "0" and len(row.shape) == 2:
            part = "probs"
        elif rest == ".mlp.experts" and row.io == "input":
            part = {"permuted_local_hidden_states": "inside", "permuted_probs": "given"}.get(row.path, "")
        elif rest == ".mlp.experts" and row.io == "output" and row.path in ("", "0"):
            part = "out"
        elif rest.startswith(".mlp.shared_experts"):
            part = "shared"
        if part:
            # Ranks that differ in the data-parallel coordinate of experts exchange nothing.
            place = scene.at(row.rank, "edp"), scene.at(row.rank, "pp")
            found[base, row.microbatch, row.vpp, place][part].append(row)
    return found


LAWS = (
    Law(
        "routing",
        "each token goes to top-k experts, with probabilities that sum to what the configuration says",
        "a wrong normalisation, scaling factor or number of experts",
        "dump: {level: L0}",
        "nothing beyond the dump",
        routed,
        "look at the score function and the normalisation of the router",
    ),
    Law(
        "tokens-arrive",
        "experts get every token as often as it was routed, and what they put out comes home",
        "a dispatch that loses, repeats or mixes up tokens, probabilities of other tokens",
        "dump: {level: L0}",
        "nothing beyond the dump",
        arrived,
        "record the dispatcher: dump: {level: mix, list: [mlp]}",
    ),
)
