"""Laws of the optimizer's groups: every weight is in one, with the settings that the arguments say and others have."""

from __future__ import annotations

import re
from collections import Counter

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked
from msprobe_megatron.analysis.laws.scene import Scene
from msprobe_megatron.analysis.laws.updates import ADAM, COST, NEEDS, Sample, samples, told

_LAYER, _EXPERT = re.compile(r"layers\.\d+"), re.compile(r"local_experts\.\d+")


def updated(scene: Scene) -> list[Breach]:
    """Every weight that has a gradient belongs to an optimizer."""
    known = {sample.name for sample in samples(scene)}
    sampled = {sample.step for sample in samples(scene)}
    found, looked = [], 0
    if len({part.rank for part in scene.run.laws}) < int(scene.run.facts.get("world", 1)):
        raise NotChecked(f"all ranks, and {NEEDS}")
    for step in scene.steps:
        for name in step.names("grad_reduced") if step.number in sampled else []:
            looked += 1
            if name not in known:
                found.append((step.number, name))
    if not looked:
        raise NotChecked(f"reduced gradients of a sampled step, and {NEEDS}")
    if not found:
        return []
    names = list(dict.fromkeys(name for _, name in found))
    text = f"{names[0]} has a gradient and no optimizer updates it (step {found[0][0]}); {len(names)} weights in all"
    return [Breach(text, {"step": found[0][0], "name": names[0], "kind": "update", "ranks": [], "tensors": len(names)})]


def constants(scene: Scene) -> list[Breach]:
    """Rates, betas, epsilon, decay and step number are those of the arguments, and alike where they must be."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    by_step: dict[int, list[Sample]] = {}
    for sample in samples(scene):
        by_step.setdefault(sample.step, []).append(sample)
    for some in by_step.values():
        looked += len(some)
        for name, what in (("weight_decay", "decayed by"), ("lr", "updated at the rate"), ("step", "at its step")):
            groups: dict[str, list[Sample]] = {}
            for sample in some:
                like = "" if name == "step" else _LAYER.sub("layers.*", _EXPERT.sub("local_experts.*", sample.name))
                groups.setdefault(like, []).append(sample)
            for group in groups.values():
                found += _unlike(group, name, what)
        found += _decayed(scene, some)
        found += [entry for sample in some for entry in _other_constants(scene, sample)]
    return told(found, looked, NEEDS)


def _unlike(group: list[Sample], name: str, what: str) -> list[tuple[Sample, str]]:
    """Weights of the same place in other layers, or all weights, that have another setting than most."""
    counts = Counter(sample.settings.get(name) for sample in group)
    usual, times = counts.most_common(1)[0]
    if len(counts) == 1 or usual is None or times == 1:
        return []
    odd = [sample for sample in group if sample.settings.get(name) != usual]
    return [(sample, f"{sample.name} is {what} {sample.settings.get(name)}, others {usual}") for sample in odd]


def _decayed(scene: Scene, some: list[Sample]) -> list[tuple[Sample, str]]:
    """Norms and biases are decayed all or none; matrices by what the arguments say."""
    decay = scene.argument("weight_decay")
    found: list[tuple[Sample, str]] = []
    flat = [s for s in some if int(s.facts.get("dims", 2)) == 1 and not re.search(r"[qk]_layernorm", s.name)]
    bare = [sample for sample in flat if sample.number("weight_decay", 0.0) == 0]
    if bare and len(bare) < len(flat):
        found += [
            (sample, f"{sample.name} is decayed by {sample.number('weight_decay', 0):g}, {bare[0].name} is not")
            for sample in flat
            if sample.number("weight_decay", 0.0) > 0
        ]
    if decay is None or scene.argument("weight_decay_incr_style") not in (None, "constant"):
        return found
    for sample in some:
        own = sample.number("weight_decay", 0.0)
        if int(sample.facts.get("dims", 2)) > 1 and abs(own - float(decay)) > 1e-6 * float(decay):
            found.append((sample, f"{sample.name} is decayed by {own:g}, weight_decay is {decay:g}"))
    return found


def _other_constants(scene: Scene, sample: Sample) -> list[tuple[Sample, str]]:
    if sample.op not in ADAM:
        return []
    found = []
    betas = sample.settings.get("betas") or (None, None)
    pairs = (("adam_beta1", betas[0]), ("adam_beta2", betas[1]), ("adam_eps", sample.settings.get("eps")))
    for name, own in pairs:
        given = scene.argument(name)
        if given is not None and own is not None and abs(float(own) - float(given)) > 1e-6 * abs(float(given)):
            found.append((sample, f"{sample.name} is updated with {name} {own:g}, the arguments say {given:g}"))
    return found


def counted_steps(scene: Scene) -> list[Breach]:
    """The optimizer counts every step once."""
    found: list[tuple[Sample, str]] = []
    looked = 0
    last: dict[tuple[int, str], Sample] = {}
    for sample in samples(scene):
        before = last.get((sample.rank, sample.name))
        if before is not None and sample.number("step", 0) and before.number("step", 0):
            looked += 1
            passed, counted = sample.step - before.step, sample.number("step", 0) - before.number("step", 0)
            # Steps that were skipped are not counted; one more than there were is never right.
            if counted > passed or counted <= 0:
                text = f"the optimizer counts {counted:g} steps for {sample.name} where {passed} were made"
                found.append((sample, text))
        last[sample.rank, sample.name] = sample
    return told(found, looked, f"two sampled steps, and {NEEDS}")


LAWS = (
    Law(
        "every-weight-updated",
        "every weight that has a gradient belongs to an optimizer",
        "weights that are in no parameter group",
        "checks: {update: true}, and dump or monitor: {gradients: true}",
        COST,
        updated,
        "look at the parameter groups of the optimizer",
    ),
    Law(
        "optimizer-constants",
        "betas, epsilon, decay and step number are those of the arguments",
        "decay on norms and biases, or missing on matrices, a step number that differs",
        "checks: {update: true}, and the training arguments",
        COST,
        constants,
        "look at the parameter groups of the optimizer",
    ),
    Law(
        "counted-steps",
        "the optimizer counts every step once",
        "a step number that stands still or runs ahead",
        "checks: {update: true}, two sampled steps",
        COST,
        counted_steps,
        "look at who calls the optimizer's step",
    ),
)
