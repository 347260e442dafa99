"""Laws of single updates, from elements that were sampled around the optimizer's step (`checks: {update: true}`).

Each sampled element is computed again in double precision: clipped gradient from the reduced one, moments from
gradient and old moments, the new weight from moments, rate, decay and step, the model's weight from the master copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked
from msprobe_megatron.analysis.laws.scene import MOST_STEPS, Scene, check_rows

NEEDS = "elements around the optimizer's step: checks: {update: true}"
ADAM = ("Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
_SGD = ("SGD", "FusedSGD")
_BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
_OFF = 2e-3
"""Relative error of an update that rounding in single precision does not reach."""


class Sample(NamedTuple):
    """The elements of one parameter in one step."""

    step: int
    rank: int
    name: str
    op: str
    dtype: str
    facts: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """What the optimizer's group says: lr, betas, …"""
        found: dict[str, Any] = self.facts.get("settings", {})
        return found

    def values(self, name: str) -> list[float]:
        """Elements by what they are; empty where there are none."""
        found: list[float] = self.facts.get("values", {}).get(name, [])
        return found

    def number(self, name: str, default: float) -> float:
        """A setting as a number."""
        value = self.settings.get(name)
        return float(value) if isinstance(value, int | float) else default

    def where(self, **more: Any) -> dict[str, Any]:
        """The place, for `--json`."""
        return {"step": self.step, "ranks": [self.rank], "name": self.name, "kind": "update", **more}


@lru_cache(maxsize=4)
def _read(paths: tuple[str, ...]) -> tuple[Sample, ...]:
    return tuple(Sample(*row) for row in check_rows(paths, "update"))


def samples(scene: Scene) -> list[Sample]:
    """What was sampled on the steps that are looked at."""
    parts = scene.run.laws
    if scene.only is not None:
        parts = [part for part in parts if part.first == scene.only]
    steps = sorted({part.first for part in parts})
    chosen = {*steps[: MOST_STEPS - 1], *steps[-1:]}
    paths = tuple(str(part.path) for part in parts if part.first in chosen)
    found = [sample for sample in _read(paths) if sample.facts.get("success", True)] if paths else []
    if not found:
        raise NotChecked(NEEDS)
    return found


def told(found: list[tuple[Sample, str]], looked: int, needs: str, sure: str = "certain") -> list[Breach]:
    """The first of what was found, with the number of weights; raises `NotChecked` where nothing was looked at."""
    if not looked:
        raise NotChecked(needs)
    if not found:
        return []
    sample, text = found[0]
    names = list(dict.fromkeys(other.name for other, _ in found))
    many = f"; {len(names)} weights in all" if len(names) > 1 else ""
    return [Breach(f"{text} (step {sample.step}, rank {sample.rank}){many}", sample.where(tensors=len(names)), sure)]


def clip_factor(scene: Scene) -> list[Breach]:
    """All gradients reach the optimizer multiplied by one factor: clipping by loss scale."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    by_step: dict[int, list[tuple[Sample, float]]] = {}
    for sample in samples(scene):
        for raw, used in zip(sample.values("raw"), sample.values("grad"), strict=False):
            if abs(raw) > 1e-30 and math.isfinite(raw) and math.isfinite(used):
                by_step.setdefault(sample.step, []).append((sample, used / raw))
    for ratios in by_step.values():
        wanted = median(ratio for _, ratio in ratios)
        norm, limit = ratios[0][0].facts.get("norm"), scene.argument("clip_grad")
        for sample, ratio in ratios:
            looked += 1
            if abs(ratio - wanted) > 1e-2 * abs(wanted):
                text = f"the gradient of {sample.name} is multiplied by {ratio:.4g} before the step"
                found.append((sample, f"{text}, others by {wanted:.4g}"))
        scale = _scale(scene, ratios[0][0].step)
        if norm and limit and scale is not None:
            factor = min(1.0, float(limit) / (float(norm) + 1e-6)) / scale
            if abs(wanted - factor) > 1e-2 * factor:
                text = f"gradients are multiplied by {wanted:.4g}, a norm of {norm:.4g} clipped to {limit} gives"
                found.append((ratios[0][0], f"{text} {factor:.4g}"))
    return told(found, looked, NEEDS)


def _scale(scene: Scene, number: int) -> float | None:
    """The loss scale of a step: 1 where there is none, None where it is not known."""
    if scene.argument("fp16") is False:
        return 1.0
    step = next((step for step in scene.steps if step.number == number), None)
    rows = [*step.of("loss", "loss_scale"), *step.of("scalar", "loss_scale")] if step is not None else []
    return rows[0].max if rows else None


def sampled_moments(scene: Scene) -> list[Breach]:
    """Each moment is the decayed old one plus the share of the gradient."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    for sample in samples(scene):
        for name, share in _shares(scene, sample):
            for i, (new, gradient) in enumerate(
                zip(sample.values(f"{name}_after"), sample.values("grad"), strict=False)
            ):
                olds = sample.values(f"{name}_before")
                old = olds[i] if i < len(olds) else 0.0
                beta, weight, power = share
                wanted = beta * old + weight * gradient**power
                room = 1e-4 * (abs(beta * old) + abs(weight * gradient**power)) + 1e-38
                looked += 1
                if abs(new - wanted) > room:
                    found.append(
                        (sample, f"{name} of {sample.name} is {new:.6g}, gradient and old moment give {wanted:.6g}")
                    )
                    break
    return told(found, looked, f"Adam or SGD with momentum, and {NEEDS}")


def _shares(scene: Scene, sample: Sample) -> Iterator[tuple[str, tuple[float, float, int]]]:
    """Moments with their decay, the weight of the gradient, and its power. Arguments go before what the group says."""
    if sample.op in ADAM and sample.op != "Adam":
        first, second = _betas(scene, sample)
        yield "exp_avg", (first, 1 - first, 1)
        yield "exp_avg_sq", (second, 1 - second, 2)
    elif sample.op in _SGD and sample.number("weight_decay", 0.0) == 0 and sample.values("momentum_buffer_before"):
        yield "momentum_buffer", (sample.number("momentum", 0.0), 1.0, 1)


def _betas(scene: Scene, sample: Sample) -> tuple[float, float]:
    given = sample.settings.get("betas") or (0.9, 0.999)
    first, second = scene.argument("adam_beta1"), scene.argument("adam_beta2")
    return float(given[0] if first is None else first), float(given[1] if second is None else second)


def formula(scene: Scene) -> list[Breach]:
    """Each element moves as moments, rate, decay and the number of the step say."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    for sample in samples(scene):
        moved = _moved(scene, sample)
        if moved is None:
            continue
        for before, after, wanted in moved:
            looked += 1
            step, due = after - before, wanted - before
            room = _OFF * abs(due) + 3e-7 * max(abs(before), abs(after)) + 1e-30
            if abs(step - due) > room:
                factor = f", {step / due:.4g} times" if due and 1e-3 < abs(step / due) < 1e3 else ""
                text = f"{sample.name} moved by {step:.5g}, its moments, rate and decay give {due:.5g}{factor}"
                found.append((sample, text))
                break
    return told(found, looked, f"Adam or SGD with master weights in float32, and {NEEDS}")


def _moved(scene: Scene, sample: Sample) -> list[tuple[float, float, float]] | None:
    """Before, after, and what after should be."""
    rate, decay = sample.number("lr", math.nan), sample.number("weight_decay", 0.0)
    before, after, gradients = sample.values("before"), sample.values("after"), sample.values("grad")
    if sample.facts.get("main_dtype") != "float32" or math.isnan(rate) or len(before) != len(after):
        return None
    if sample.op in ADAM and sample.op != "Adam":
        m, v, number = sample.values("exp_avg_after"), sample.values("exp_avg_sq_after"), sample.number("step", 0.0)
        if len(m) != len(before) or len(v) != len(before) or number < 1:
            return None
        first, second = _betas(scene, sample)
        epsilon = scene.argument("adam_eps")
        epsilon = sample.number("eps", 1e-8) if epsilon is None else float(epsilon)
        a, b = 1 - first**number, 1 - second**number
        return [
            (p, q, p * (1 - rate * decay) - rate * (x / a) / (math.sqrt(max(y, 0.0) / b) + epsilon))
            for p, q, x, y in zip(before, after, m, v, strict=True)
        ]
    if sample.op in _SGD and not sample.settings.get("nesterov") and len(gradients) == len(before):
        momentum = sample.number("momentum", 0.0)
        used = (
            sample.values("momentum_buffer_after")
            if momentum
            else [g + decay * p for g, p in zip(gradients, before, strict=True)]
        )
        if len(used) != len(before):
            return None
        return [(p, q, p - rate * x) for p, q, x in zip(before, after, used, strict=True)]
    return None


def rounded_master(scene: Scene) -> list[Breach]:
    """The model's weight is its master copy, rounded, before the step and after it."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    for sample in samples(scene):
        bits = _BITS.get(sample.dtype)
        if bits is None:
            continue
        for when in ("before", "after"):
            for weight, main in zip(sample.values(f"weight_{when}"), sample.values(when), strict=False):
                looked += 1
                if abs(weight - main) > _half_unit(max(abs(main), abs(weight)), bits):
                    text = f"{sample.name} is {weight:.6g} {when} the step, its master copy {main:.6g}"
                    found.append((sample, text))
                    break
    return told(found, looked, NEEDS)


def _half_unit(value: float, bits: int) -> float:
    """Half a unit in the last place of a number of so many bits, and what is below the normal range of float16."""
    return 0.501 * 2.0 ** (math.frexp(value)[1] - bits) + (3e-8 if bits == _BITS["float16"] else 1e-38)


COST = "four elements of each weight; one concatenation and one copy to the host for each kind of number"
LAWS = (
    Law(
        "clip-factor",
        "all gradients reach the optimizer multiplied by one factor",
        "gradients that are not clipped or not unscaled, a wrong limit",
        "checks: {update: true}",
        COST,
        clip_factor,
        "look at which gradients are clipped, and by which norm",
    ),
    Law(
        "sampled-moments",
        "each moment is the decayed old one plus the share of the gradient",
        "other betas, a gradient of another step or shard, moments that are not kept",
        "checks: {update: true}",
        COST,
        sampled_moments,
        "look at the optimizer's step for the weight that is named",
    ),
    Law(
        "update-formula",
        "each element moves as moments, rate, decay and step number say",
        "bias correction left out, decay twice or never, another rate or epsilon, a shard that is skipped",
        "checks: {update: true}",
        COST,
        formula,
        "look at the optimizer's step for the weight that is named",
    ),
    Law(
        "rounded-master",
        "the model's weight is its master copy, rounded",
        "a master copy that is stale, or was not loaded with the model",
        "checks: {update: true}",
        COST,
        rounded_master,
        "look at what writes weights: loading a checkpoint, the copy after the step",
    ),
)
