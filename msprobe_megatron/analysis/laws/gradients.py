"""Laws of weight gradients: nothing is lost or counted twice between the backward and the optimizer.

The sum of a tensor's elements is linear. The gradient of a bias sums to what the gradient of its module's output does,
over all microbatches and ranks; so does that of an embedding. A reduced gradient sums to the mean of what went in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at
from msprobe_megatron.analysis.laws.loss import loss_scale
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step, spec_of
from msprobe_megatron.analysis.laws.updates import samples

_BIASED = ("ColumnParallelLinear", "RowParallelLinear", "LayerNorm", "FusedLayerNorm", "Linear", "WrappedTorchNorm")
_LOW = 1e-4
"""Spacing of dtypes of 16 bits is above this."""
_EMBEDDINGS = ("VocabParallelEmbedding", "Embedding")


def accumulated(scene: Scene) -> list[Breach]:
    """The gradient of a bias or an embedding sums to what all microbatches of all ranks put into it."""
    scale = scene.run.facts.get("gradient_scale")
    if not scale:
        raise NotChecked("a job whose loss is averaged in each microbatch (not calculate_per_token_loss)")
    if not scene.every_microbatch:
        raise NotChecked("all microbatches of a step (dump.microbatches selects some)")
    found: list[tuple[Row, float, float]] = []
    looked = 0
    for step in scene.steps:
        number = scene.microbatches(step)
        for name in step.names("grad_reduced"):
            rows = scene.weight_parts(step.of("grad_reduced", name))
            given = _arriving(scene, step, name, rows)
            if not given or number is None or not _whole(scene, rows):
                continue
            ranks = {row.rank for row in given}
            if {row.microbatch for row in given} != set(range(number)) or len(given) != number * len(ranks):
                continue
            looked += 1
            total, wanted = sum(row.sum for row in rows), sum(row.sum for row in given) / float(scale)
            if abs(total - wanted) > _room(rows, given, float(scale), number):
                found.append((rows[0], total, wanted))
    if not looked:
        raise NotChecked("gradients of module outputs and of biases or embeddings: dump: {level: L0}")
    if not found:
        return []
    row, total, wanted = found[0]
    factor = f", {total / wanted:.3g} times" if wanted and 0.01 < abs(total / wanted) < 100 else ""
    text = (
        f"the gradient of {row.name} sums to {total:.6g}, all microbatches and ranks put in {wanted:.6g}{factor}"
        f" (step {row.step}); {len(found)} of {looked} gradients in all"
    )
    return [Breach(text, at(row, value=total, expected=wanted, tensors=len(found)))]


def _room(rows: list[Row], given: list[Row], scale: float, number: int) -> float:
    """What rounding may do to the sum of a gradient: each microbatch is rounded, and once more when it is added."""
    epsilon = max(row.epsilon for row in (*rows, *given))
    norm = math.sqrt(max(sum(row.sumsq for row in given) / scale**2, sum(row.sumsq for row in rows)))
    spread = norm * math.sqrt(sum(row.numel for row in rows))
    worst = 4 * (1 + number) * spread
    if epsilon < _LOW or rows[0].op in _EMBEDDINGS:
        # Adding up thousands of tokens in the same precision takes more than the last rounding.
        return epsilon * worst
    # Sums in 16 bits are kept in 32 and rounded once, up or down.
    return epsilon * (8 * math.sqrt(1 + number) * norm + 0.02 * spread) + 1.2e-7 * worst


def _arriving(scene: Scene, step: Step, name: str, rows: list[Row]) -> list[Row]:
    """Gradients of the output of the module that a bias or an embedding belongs to, each part once."""
    module, _, leaf = name.rpartition(".")
    op = rows[0].op if rows else ""
    if "experts" in name or not rows:
        return []
    if leaf == "bias" and op in _BIASED:
        pass
    elif leaf == "weight" and op in _EMBEDDINGS:
        tied = op == "VocabParallelEmbedding" and not _untied(scene)
        # The share of the output layer sums to zero only as far as the gradients of logits do.
        if tied and any(row.dtype != "float32" for row in step.of("gradient", "output_layer")):
            return []
        if tied and not step.of("gradient", "output_layer"):
            return []
    else:
        return []
    given = [
        row
        for row in step.of("gradient", module, "output")
        if row.path in ("", "0") and row.phase == "backward" and row.microbatch is not None
    ]
    known = all(spec_of(row.shard).unknown is None and not spec_of(row.shard).partial for row in given)
    return scene.parts(given) if known else []


def _untied(scene: Scene) -> bool:
    return bool(scene.argument("untie_embeddings_and_output_weights"))


def _whole(scene: Scene, rows: list[Row]) -> bool:
    """Whether the parts cover the gradient: shards of the distributed optimizer lie side by side."""
    if not rows or any(spec_of(row.shard).unknown is not None for row in rows):
        return False
    by_part: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        flat = spec_of(row.shard).flat
        if flat is not None:
            by_part[scene.coordinates(row)].append(flat)
    for pieces in by_part.values():
        pieces.sort()
        ends = [stop for _, stop in pieces]
        starts = [start for start, _ in pieces]
        if starts[0] != 0 or any(a != b for a, b in zip(ends, starts[1:], strict=False)):
            return False
    return True


def reduced(scene: Scene) -> list[Breach]:
    """A reduced gradient is the mean over its group of what went into the reduction, by its sum."""
    scale = scene.run.facts.get("gradient_scale")
    found: list[tuple[Row, float, float]] = []
    looked = 0
    for step in scene.steps:
        for name in step.names("grad_unreduced"):
            rows = step.of("grad_reduced", name)
            given = [row for row in step.of("grad_unreduced", name, path="") if row.microbatch is None]
            stages = {scene.at(row.rank, "pp") for row in (*rows, *given)}
            # Shared by two stages, or summed over another group besides: more than one reduction lies between.
            if not rows or not given or len(stages) > 1 or _summed_elsewhere(scene, given[0], name):
                continue
            parts = scene.weight_parts(rows)
            if not _whole(scene, parts) or not scale or "experts" in name:
                continue
            members = scene.parts(given)
            expected = scene.size("dp") * scene.size("cp") * _cuts(scene, given[0], "tp")
            if len(members) != expected:
                continue
            looked += 1
            total = sum(row.sum for row in parts)
            wanted = sum(row.sum for row in members) / float(scale)
            size = math.sqrt(sum(row.sumsq for row in members) * sum(row.numel for row in members)) / float(scale)
            epsilon = max(row.epsilon for row in (*parts, *members))
            if abs(total - wanted) > 4 * epsilon * (1 + len(members)) * size:
                found.append((parts[0], total, wanted))
    if not looked:
        raise NotChecked("gradients before and after their reduction: monitor: {gradients: true}, two ranks or more")
    return _told_reduced(found, looked)


def _summed_elsewhere(scene: Scene, row: Row, name: str) -> bool:
    """Weights that tensor-parallel ranks share get a second sum under sequence parallelism, routers too."""
    uncut = "tp" not in spec_of(row.shard).cut_axes()
    return scene.size("tp") > 1 and uncut and bool(scene.run.facts.get("sequence_parallel"))


def _cuts(scene: Scene, row: Row, axis: str) -> int:
    return scene.size(axis) if axis in spec_of(row.shard).cut_axes() else 1


def _told_reduced(found: list[tuple[Row, float, float]], looked: int) -> list[Breach]:
    if not found:
        return []
    row, total, wanted = found[0]
    factor = f", {total / wanted:.3g} times" if wanted and 0.01 < abs(total / wanted) < 100 else ""
    text = (
        f"the reduced gradient of {row.name} sums to {total:.6g}, the mean of what its group put in to"
        f" {wanted:.6g}{factor} (step {row.step}); {len(found)} of {looked} gradients in all:"
        f" {_names(item[0].name for item in found)}"
    )
    return [Breach(text, at(row, value=total, expected=wanted, tensors=len(found)))]


def _names(names: Iterable[str], most: int = 4) -> str:
    several = list(dict.fromkeys(names))
    return ", ".join(several[:most]) + (", …" if len(several) > most else "")


def norm_of(scene: Scene, step: Step) -> float | None:
    """Root of the sum of squares of all reduced gradients, each part once; None where some are missing."""
    names = step.names("grad_reduced")
    weights = set(step.names("parameter")) - {row.name for row in step.of("parameter") if "expert_bias" in row.name}
    if not names or (weights and weights - set(names)):
        return None
    total = 0.0
    for name in names:
        rows = scene.weight_parts(step.of("grad_reduced", name))
        if not _whole(scene, rows):
            return None
        total += sum(row.sumsq for row in rows)
    return math.sqrt(total) / loss_scale(step)


def gradient_norm(scene: Scene) -> list[Breach]:
    """The norm that clipping uses is that of all reduced gradients, every part counted once."""
    found, looked = [], 0
    for step in scene.steps:
        told = {row.rank: row.sum for row in step.of("loss", "grad_norm")} or _sampled_norm(scene, step.number)
        norm = norm_of(scene, step) if told else None
        if norm is None or _all_ranks(scene, step) is False:
            continue
        looked += 1
        for rank, value in sorted(told.items()):
            if abs(value - norm) > 2e-3 * max(norm, 1e-12):
                found.append((step.number, rank, value, norm))
    if not looked:
        raise NotChecked("grad_norm and the reduced gradients of all weights and ranks: monitor: {gradients: true}")
    if not found:
        return []
    number, rank, value, norm = found[0]
    text = f"grad_norm is {value:.6g}, the reduced gradients have the norm {norm:.6g}"
    factor = f" ({value / norm:.4g} times)" if norm else ""
    where = {"step": number, "ranks": [rank], "kind": "loss", "name": "grad_norm", "value": value, "expected": norm}
    return [Breach(f"{text}{factor} (step {number}, rank {rank})", where)]


def _sampled_norm(scene: Scene, number: int) -> dict[int, float]:
    """The norm that the optimizer returned, as the samples of updates have it."""
    if not scene.run.laws:
        return {}
    try:
        found = samples(scene)
    except NotChecked:
        return {}
    return {s.rank: float(s.facts["norm"]) for s in found if s.step == number and s.facts.get("norm") is not None}


def _all_ranks(scene: Scene, step: Step) -> bool:
    world = int(scene.run.facts.get("world", 1))
    return len({row.rank for row in step.of("grad_reduced")}) == world or len(scene.run.ranks) == world


def clipped(scene: Scene) -> list[Breach]:
    """Clipping multiplies every gradient by the same factor, the limit by the norm."""
    limit = scene.argument("clip_grad")
    found, looked = [], 0
    for step in scene.steps:
        scale = loss_scale(step)
        norms = [row.sum for row in step.of("loss", "grad_norm")]
        factor = 1.0
        if limit and norms and norms[0] > 0:
            factor = min(1.0, float(limit) / (norms[0] + 1e-6))
        elif limit:
            continue
        for row in step.of("grad_clipped"):
            before = [r for r in step.of("grad_reduced", row.name) if r.rank == row.rank and r.numel == row.numel]
            if not before or before[0].norm == 0:
                continue
            looked += 1
            wanted = before[0].norm * factor / scale
            if abs(row.norm - wanted) > (1e-3 + 2 * row.epsilon) * wanted:
                found.append((row, row.norm / before[0].norm * scale, factor))
    if not looked:
        raise NotChecked("gradients before and after clipping: monitor: {clipped: true}, and clip_grad")
    if not found:
        return []
    row, value, factor = found[0]
    text = (
        f"clipping multiplied the gradient of {row.name} by {value:.4g}, all by {factor:.4g} is right (step"
        f" {row.step}, rank {row.rank}); {len(found)} of {looked} gradients in all"
    )
    return [Breach(text, at(row, value=value, expected=factor, tensors=len(found)))]


def every_weight(scene: Scene) -> list[Breach]:
    """Every weight that is used gets a gradient; no gradient is nothing but zeros."""
    found, looked = [], 0
    for step in scene.steps:
        if not any(row.absmax > 0 for row in step.of("grad_reduced")):
            continue
        for name in step.names("grad_reduced"):
            # An expert may get no token.
            rows = scene.weight_parts(step.of("grad_reduced", name))
            if "experts" in name or "expert_bias" in name or not rows or not _whole(scene, rows):
                continue
            looked += 1
            if all(row.zeros == row.numel for row in rows):
                found.append(rows[0])
    if not looked:
        raise NotChecked("reduced gradients: dump, or monitor: {gradients: true}")
    if not found:
        return []
    row = found[0]
    text = (
        f"the gradient of {row.name} is nothing but zeros (step {row.step}); {len(found)} in all:"
        f" {_names(r.name for r in found)}"
    )
    return [Breach(text, at(row, tensors=len(found)), "likely")]


LAWS = (
    Law(
        "gradient-accumulation",
        "the gradient of a bias or an embedding sums to what all microbatches of all ranks put into it",
        "a microbatch left out, a reduction left out or made twice, a wrong factor by ranks",
        "dump: {level: L0}",
        "nothing beyond the dump",
        accumulated,
        "watch the buckets: monitor: {gradients: true, microbatch_gradients: true}",
    ),
    Law(
        "gradient-reduction",
        "a reduced gradient is the mean of what its group put in",
        "a bucket reduced twice, never, or before its last microbatch",
        "monitor: {gradients: true}",
        "nothing beyond the monitor",
        reduced,
        "look at the bucket of the first weight that is named",
    ),
    Law(
        "gradient-norm",
        "grad_norm is the norm of all reduced gradients, each part once",
        "a norm of one rank only, shared weights counted twice, experts left out",
        "monitor: {gradients: true}, or dump and checks: {update: true}",
        "nothing beyond the monitor",
        gradient_norm,
        "look at which weights the norm is taken over, and in which group it is summed",
    ),
    Law(
        "clipping",
        "clipping multiplies every gradient by the limit by the norm",
        "gradients that are not clipped, or clipped twice",
        "monitor: {clipped: true}",
        "one more reading of each gradient",
        clipped,
        "look at the weights that are named: are they in the list that is clipped?",
    ),
    Law(
        "every-weight-learns",
        "no gradient of a weight that is used is nothing but zeros",
        "a weight cut off the graph, a hook that drops its gradient",
        "dump, or monitor: {gradients: true}",
        "nothing beyond the dump",
        every_weight,
        "look at where the weight leaves the graph: detach, no_grad, requires_grad",
    ),
)
