"""Laws of the loss: cross entropy is not negative, its gradient sums to zero, and every token counts alike.

The gradient of the mean loss over the global batch is the same number for every token that counts. How large it must
be follows from the number of tokens, of microbatches and of ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step

_CLOSE = 1e-3
_LOSSES = ("lm loss",)


def losses(step: Step) -> list[Row]:
    """Losses of single tokens: what a model puts out that was given labels."""
    labelled = {(row.rank, row.vpp, row.microbatch) for row in step.of("activation", "model", "input", "labels")}
    return [
        row
        for row in step.of("activation", "model", "output")
        if row.phase == "forward"
        and row.path in ("", "0")
        and len(row.shape) == 2
        and row.microbatch is not None
        and (row.rank, row.vpp, row.microbatch) in labelled
        and row.dtype.startswith(("float", "bfloat"))
        and row.op == "GPTModel"
    ]


def not_negative(scene: Scene) -> list[Breach]:
    """No token has a cross entropy below zero."""
    rows = [row for step in scene.steps for row in losses(step)]
    if not rows:
        raise NotChecked("a model that puts out the losses of tokens: dump: {level: L0}")
    found = [row for row in rows if row.min < -_CLOSE - 4 * row.epsilon * row.absmax]
    if not found:
        return []
    text = f"cross entropy of {found[0].min:.4g}, below zero ({moment(found[0])}, rank {found[0].rank})"
    return [Breach(f"{text}; {len(found)} microbatches in all", at(found[0], value=found[0].min))]


def reported(scene: Scene) -> list[Breach]:
    """The reported loss is the sum over the tokens that count, and the reported number is theirs."""
    found: list[tuple[Row, str, float, float]] = []
    looked = 0
    for step in scene.steps:
        weights = _gradients(step)
        told: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
        for name in _LOSSES:
            for row in step.of("loss", name):
                told[row.rank, row.microbatch][row.path] = row
        for row in losses(step):
            parts, weight = told.get((row.rank, row.microbatch), {}), weights.get((row.rank, row.microbatch, row.vpp))
            if "0" not in parts or "1" not in parts or weight is None:
                continue
            looked += 1
            count, counted = parts["1"].sum, row.numel - weight.zeros
            if count not in (counted, counted * scene.size("cp")):
                text = f"the loss is reported for {count:g} tokens, its gradient counts {counted} of {row.numel}"
                found.append((row, text, count, counted))
            elif count == row.numel and abs(parts["0"].sum - row.sum) > _CLOSE * abs(row.sum) + 1e-6:
                text = f"the reported loss is {parts['0'].sum:.6g}, the losses of all tokens sum to {row.sum:.6g}"
                found.append((row, text, parts["0"].sum, row.sum))
    if not looked:
        raise NotChecked("losses of tokens, their gradient, and a reported sum and number: dump: {level: L0}")
    if not found:
        return []
    row, text, value, expected = found[0]
    where = at(row, value=value, expected=expected)
    return [Breach(f"{text} ({moment(row)}, rank {row.rank}); {len(found)} microbatches in all", where)]


def _gradients(step: Step) -> dict[tuple[Any, ...], Row]:
    return {
        (row.rank, row.microbatch, row.vpp): row
        for row in step.of("gradient", "model", "output")
        if row.path in ("", "0") and row.phase == "backward"
    }


def loss_scale(step: Step) -> float:
    """The factor that a job in half precision multiplies its loss by."""
    rows = [*step.of("loss", "loss_scale"), *step.of("scalar", "loss_scale")]
    return rows[0].max if rows and rows[0].max else 1.0


def token_weight(scene: Scene) -> list[Breach]:
    """The gradient of the loss is the loss scale by tokens and microbatches, the same for every token that counts."""
    if scene.run.facts.get("gradient_scale") is None:
        raise NotChecked("a job whose loss is averaged in each microbatch (not calculate_per_token_loss)")
    version = str(scene.run.facts.get("versions", {}).get("megatron-core", ""))
    found, looked, uneven = [], 0, 0
    for step in scene.steps:
        number, scale, weights = scene.microbatches(step), loss_scale(step), _gradients(step)
        for row in losses(step):
            weight = weights.get((row.rank, row.microbatch, row.vpp))
            counted = row.numel - weight.zeros if weight is not None else 0
            if weight is None or number is None or counted <= 0:
                continue
            # Weighted tokens (a schedule of its own, packed samples) have no one number.
            even = abs(abs(weight.sum) - counted * weight.absmax) <= 4e-3 * counted * weight.absmax
            uneven += not even
            if not even:
                continue
            looked += 1
            share = weight.sum / scale * number
            accepted = [1.0, *([float(scene.size("cp"))] if version.startswith("0.12.") else [])]
            if all(abs(share - wanted) > 2e-2 * wanted for wanted in accepted):
                found.append((row, weight, share))
    if not looked:
        needs = "tokens that weigh alike" if uneven else "the gradient of the losses of tokens: dump: {level: L0}"
        raise NotChecked(f"{needs}, and all microbatches")
    if not found:
        return []
    row, weight, share = found[0]
    text = (
        f"the gradient of the loss is {share:.4g} times that of the mean over {row.numel - weight.zeros} tokens and"
        f" all microbatches ({moment(row)}, rank {row.rank}); {len(found)} microbatches in all"
    )
    return [Breach(text, at(weight, value=share, expected=1.0))]


def masked(scene: Scene) -> list[Breach]:
    """Tokens that the loss mask leaves out have no gradient, and all others have one."""
    found, looked = [], 0
    for step in scene.steps:
        weights = _gradients(step)
        for row in step.of("activation", "model", "input", "loss_mask"):
            weight = weights.get((row.rank, row.microbatch, row.vpp))
            if weight is None or weight.numel != row.numel or row.phase != "forward":
                continue
            looked += 1
            if row.zeros != weight.zeros:
                found.append((row, weight))
    if not looked:
        raise NotChecked("a loss mask that the model is given, and the gradient of its losses: dump: {level: L0}")
    if not found:
        return []
    row, weight = found[0]
    text = f"the loss mask leaves out {row.zeros} tokens, the gradient of the loss {weight.zeros} ({moment(row)})"
    return [Breach(f"{text}; {len(found)} microbatches in all", at(weight, value=weight.zeros, expected=row.zeros))]


def logits_gradient(scene: Scene) -> list[Breach]:
    """The gradient of the logits of a token sums to zero: the probabilities less one at the label."""
    found, looked = [], 0
    for step in scene.steps:
        weights = _gradients(step)
        labelled = {(row.rank, row.microbatch) for row in losses(step)}
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in step.of("gradient", "output_layer", "output"):
            if row.path == "0" and row.microbatch is not None and (row.rank, row.microbatch) in labelled:
                place = tuple(scene.at(row.rank, axis) for axis in ("dp", "cp", "pp"))
                groups[row.microbatch, row.vpp, place].append(row)
        for rows in groups.values():
            cut = "f[tp]" in rows[0].shard
            weight = weights.get((rows[0].rank, rows[0].microbatch, rows[0].vpp))
            if weight is None or (cut and len(rows) != scene.size("tp")):
                continue
            looked += 1
            total = sum(row.sum for row in rows) if cut else rows[0].sum
            room = (1e-4 if rows[0].dtype == "float32" else 4 * rows[0].epsilon) * weight.absmax * weight.numel
            if abs(total) > room and abs(total) > 0.5 * weight.absmax:
                found.append((rows[0], total / max(weight.absmax, 1e-300), weight.numel))
    if not looked:
        raise NotChecked("the gradients of logits and losses: dump: {level: L0}")
    if not found:
        return []
    row, tokens, of = found[0]
    text = (
        f"the gradient of the logits does not sum to zero over the vocabulary: {tokens:.4g} tokens' worth of {of} is"
        f" over ({moment(row)}); {len(found)} microbatches in all"
    )
    return [Breach(text, at(row, ranks=sorted({r.rank for r in losses(scene.steps[0])}) or [row.rank], value=tokens))]


def _place(scene: Scene, row: Row) -> tuple[Any, ...]:
    """Which losses and logits belong together: those of one microbatch on the ranks of a tensor-parallel group."""
    return (row.microbatch, row.vpp, *(scene.at(row.rank, axis) for axis in ("dp", "cp", "pp")))


def label_gradient(scene: Scene) -> list[Breach]:
    """The steepest gradient of a logit belongs to the token of the largest loss: its probability less one."""
    found, looked = [], 0
    for step in scene.steps:
        weights = _gradients(step)
        by_place: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in step.of("gradient", "output_layer", "output"):
            if row.path == "0" and row.microbatch is not None:
                by_place[_place(scene, row)].append(row)
        for row in losses(step):
            weight = weights.get((row.rank, row.microbatch, row.vpp))
            logits = by_place.get(_place(scene, row), [])
            cut = bool(logits) and "f[tp]" in logits[0].shard
            if weight is None or weight.zeros or weight.min != weight.max or not logits:
                continue
            if cut and len(logits) != scene.size("tp"):
                continue
            looked += 1
            wanted = -weight.absmax * (1 - math.exp(-max(row.max, 0.0)))
            value = min(r.min for r in logits)
            if abs(value - wanted) > max(2e-3, 2 * logits[0].epsilon) * weight.absmax:
                found.append((logits[0], value / weight.absmax, wanted / weight.absmax))
    if not looked or scene.argument("label_smoothing"):
        raise NotChecked("gradients of logits and of losses whose tokens weigh alike: dump: {level: L0}")
    if not found:
        return []
    row, value, wanted = found[0]
    text = (
        f"the steepest gradient of a logit is {value:.5g} of a token's weight, its largest loss gives {wanted:.5g}"
        f" ({moment(row)}); {len(found)} microbatches in all"
    )
    return [Breach(text, at(row, value=value, expected=wanted))]


LAWS = (
    Law(
        "loss-not-negative",
        "no token has a cross entropy below zero",
        "a vocabulary-parallel loss that is not reduced, labels outside the shard",
        "dump: {level: L0}",
        "nothing beyond the dump",
        not_negative,
        "look at the vocabulary-parallel cross entropy: dump: {level: mix, list: [output_layer, outside]}",
    ),
    Law(
        "loss-reported",
        "the reported loss is the sum over the tokens that count, with their number",
        "a wrong count, a mask that only one of loss and gradient knows",
        "dump: {level: L0}",
        "nothing beyond the dump",
        reported,
        "look at the loss function of the training script",
    ),
    Law(
        "loss-scale",
        "every token that counts weighs one by tokens and microbatches",
        "a loss divided by the wrong count, once more or once less by microbatches or context-parallel ranks",
        "dump: {level: L0}",
        "nothing beyond the dump",
        token_weight,
        "look at what the loss function returns and the schedule divides by",
    ),
    Law(
        "loss-mask",
        "masked tokens have no gradient",
        "a loss mask that is ignored or shifted",
        "dump: {level: L0}, and a model that is given its loss mask",
        "nothing beyond the dump",
        masked,
        "look at where the mask is applied",
    ),
    Law(
        "label-gradient",
        "the gradient at a label is its probability less one, and the loss its logarithm",
        "a backward of the loss that does not fit its forward, labels of other tokens",
        "dump: {level: L0}",
        "nothing beyond the dump",
        label_gradient,
        "look at the cross entropy: what its forward saves for its backward",
    ),
    Law(
        "logits-gradient",
        "the gradient of a token's logits sums to zero over the vocabulary",
        "a maximum or a sum that is not taken over all shards of the vocabulary, a label counted twice or never",
        "dump: {level: L0}",
        "nothing beyond the dump",
        logits_gradient,
        "look at the vocabulary-parallel cross entropy: its reductions over the tensor-parallel group",
    ),
)
