"""Laws of the optimizer: moments and updates are what gradients, rates and constants give."""

from __future__ import annotations

import math

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at
from msprobe_megatron.analysis.laws.loss import loss_scale
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step


def _skipped(step: Step) -> bool:
    return any(row.max > 0 for row in step.of("scalar", "skipped"))


def _clip(scene: Scene, step: Step) -> float | None:
    """The factor between recorded and used gradients: loss scale and clipping; None where it is not known."""
    limit, norms = scene.argument("clip_grad"), [row.sum for row in step.of("loss", "grad_norm")]
    if limit is None:
        return None
    if float(limit) == 0:
        return 1.0 / loss_scale(step)
    if not norms:
        return None
    return min(1.0, float(limit) / (norms[0] + 1e-6)) / loss_scale(step)


def moments(scene: Scene) -> list[Breach]:
    """Adam's moments are the decayed old ones plus the share of the new gradient, by their sums."""
    first, second = scene.argument("adam_beta1"), scene.argument("adam_beta2")
    if scene.argument("optimizer") != "adam" or first is None or second is None:
        raise NotChecked("Adam, and the training arguments")
    found: list[tuple[Row, float, float]] = []
    looked = 0
    for before, step in zip([None, *scene.steps], scene.steps, strict=False):
        factor = _clip(scene, step)
        follows = before is not None and before.number == step.number - 1
        if factor is None or _skipped(step) or not (follows or step.number == 0):
            continue
        old = (
            {(r.rank, r.name, r.io): r for r in before.of("optimizer_state")} if before is not None and follows else {}
        )
        for row in step.of("optimizer_state"):
            if row.io not in ("exp_avg", "exp_avg_sq") or row.dtype != "float32":
                continue
            given = [r for r in step.of("grad_reduced", row.name) if r.rank == row.rank and r.numel == row.numel]
            last = old.get((row.rank, row.name, row.io))
            if len(given) != 1 or (follows and last is None) or (last is not None and last.numel != row.numel):
                continue
            looked += 1
            beta = float(first if row.io == "exp_avg" else second)
            gradient = given[0]
            share = factor * gradient.sum if row.io == "exp_avg" else factor**2 * gradient.sumsq
            wanted = beta * (last.sum if last is not None else 0.0) + (1 - beta) * share
            if row.io == "exp_avg":
                size = (1 - beta) * factor * gradient.spread + (beta * last.spread if last is not None else 0.0)
                room = (1e-5 + 2 * gradient.epsilon) * size
            else:
                room = (1e-3 + 2 * gradient.epsilon) * abs(wanted)
            if abs(row.sum - wanted) > room + 1e-30:
                found.append((row, row.sum, wanted))
    if not looked:
        raise NotChecked(
            "moments, gradients and grad_norm of the first or of successive steps: monitor: {optimizer: true}"
        )
    if not found:
        return []
    row, value, wanted = found[0]
    text = (
        f"{row.io} of {row.name} sums to {value:.6g}, the gradient and the old moment give {wanted:.6g} (step"
        f" {row.step}, rank {row.rank}); {len(found)} of {looked} moments in all"
    )
    return [Breach(text, at(row, value=value, expected=wanted, tensors=len(found)))]


def moves(scene: Scene) -> list[Breach]:
    """A weight that has a gradient moves, and in Adam's first step by no more than the learning rate."""
    found: list[tuple[Row, str]] = []
    looked = 0
    adam, decay = scene.argument("optimizer") == "adam", scene.argument("weight_decay")
    for step in scene.steps:
        rates = [row.max for row in step.of("scalar", "learning_rate")]
        if _skipped(step) or not rates or rates[0] <= 0:
            continue
        weights = {(row.rank, row.name): row for row in step.of("update", io="weight")}
        for row in step.of("update", io="change"):
            given = [r for r in step.of("grad_reduced", row.name) if r.rank == row.rank]
            if not given or given[0].norm == 0 or row.dtype != "float32":
                continue
            looked += 1
            if row.zeros == row.numel:
                found.append((row, f"{row.name} did not move, though it has a gradient"))
                continue
            weight = weights.get((row.rank, row.name))
            if step.number == 0 and adam and decay is not None and weight is not None and _fresh(scene, step, row):
                bound = max(rates) * (1 + float(decay) * weight.absmax)
                if row.absmax > bound * (1 + 1e-4) + weight.absmax * 1.2e-7:
                    text = f"{row.name} moved by {row.absmax:.4g}, in Adam's first step {bound:.4g} is the most"
                    found.append((row, text))
    if not looked:
        raise NotChecked("changes of weights, gradients and the learning rate: monitor: {update: true}")
    if not found:
        return []
    row, text = found[0]
    where = at(row, tensors=len(found))
    return [Breach(f"{text} (step {row.step}, rank {row.rank}); {len(found)} of {looked} weights in all", where)]


def _fresh(scene: Scene, step: Step, row: Row) -> bool:
    """Whether the optimizer began with this step: its moment is nothing but the first share of the gradient."""
    factor, beta = _clip(scene, step), scene.argument("adam_beta1")
    state = [r for r in step.of("optimizer_state", row.name, "exp_avg") if r.rank == row.rank]
    given = [r for r in step.of("grad_reduced", row.name) if r.rank == row.rank]
    if factor is None or beta is None or not state or not given:
        return False
    wanted = (1 - float(beta)) * factor * given[0].norm
    return math.isclose(state[0].norm, wanted, rel_tol=1e-2)


LAWS = (
    Law(
        "moments",
        "moments are the decayed old ones plus the share of the new gradient",
        "other betas, a gradient that was not clipped or unscaled, a shard that was skipped, a stale moment",
        "monitor: {gradients: true, optimizer: true}",
        "nothing beyond the monitor",
        moments,
        "record both steps: --msprobe-steps",
    ),
    Law(
        "weights-move",
        "a weight with a gradient moves, in Adam's first step by no more than the learning rate",
        "a shard that is not updated, bias correction left out, another learning rate",
        "monitor: {gradients: true, optimizer: true, update: true}",
        "one more copy of the weights, in parts",
        moves,
        "check single elements: checks: {update: true}",
    ),
)
