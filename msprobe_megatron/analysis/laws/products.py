"""Laws of products (`checks: {products: true}`): a weight gradient is what its module took in times what it got back.

Sampled elements of the reduced gradient are held against the sums over all tokens, microbatches and ranks that the job
computed beside its own backward. The same sums over input and output tell whether tokens come home where they left.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked
from msprobe_megatron.analysis.laws.scene import MOST_STEPS, Scene, check_rows

_NEEDS = "products beside the backward: checks: {products: true}"
_EPSILON = {"bfloat16": 7.9e-3, "float16": 9.8e-4}
_SINGLE = 2e-3
"""Relative error of a product of matrices whose factors are rounded to ten bits, as devices do in single precision."""
_OWN_REDUCTION = re.compile(r"\b(?:q|k|kv|q_a|kv_a)_layernorm\.")
"""Norms inside attention: which ranks sum their gradients depends on the version."""
_SUBNORMAL = 6e-8
"""Numbers of float16 are not spaced more closely."""
_SMALL = 1e-3
"""The weight of a norm that is too small to divide by."""


class Sums(NamedTuple):
    """The products of one weight, or expert layer, on one rank in one step."""

    step: int
    rank: int
    name: str
    op: str
    dtype: str
    facts: dict[str, Any]

    def numbers(self, name: str) -> list[float]:
        """Numbers of all elements."""
        found: list[float] = self.facts.get(name, [])
        return found

    @property
    def epsilon(self) -> float:
        """Spacing of the coarser of weight and gradient; 0 in single precision."""
        return max(_EPSILON.get(self.dtype, 0.0), _EPSILON.get(str(self.facts.get("gradient_dtype")), 0.0))

    @property
    def kind(self) -> str:
        """``linear``, ``norm`` or ``tokens``."""
        return str(self.facts.get("kind"))


@lru_cache(maxsize=4)
def _read(paths: tuple[str, ...]) -> tuple[Sums, ...]:
    return tuple(Sums(*row) for row in check_rows(paths, "products"))


def _sums(scene: Scene, kind: tuple[str, ...]) -> list[Sums]:
    parts = scene.run.products
    if scene.only is not None:
        parts = [part for part in parts if part.first == scene.only]
    steps = sorted({part.first for part in parts})
    chosen = {*steps[: MOST_STEPS - 1], *steps[-1:]}
    paths = tuple(str(part.path) for part in parts if part.first in chosen)
    found = [sums for sums in _read(paths) if sums.kind in kind] if paths else []
    if not found:
        raise NotChecked(_NEEDS)
    return found


def multiplied(scene: Scene) -> list[Breach]:
    """Sampled elements of every reduced gradient are the mean over ranks of the products of all microbatches."""
    scale = scene.run.facts.get("gradient_scale")
    if not scale:
        raise NotChecked("a job whose loss is averaged in each microbatch (not calculate_per_token_loss)")
    groups: dict[tuple[Any, ...], list[Sums]] = defaultdict(list)
    for sums in _sums(scene, ("linear", "norm")):
        place = (sums.step, sums.name, *_beside(scene, sums))
        groups[place].append(sums)
    found: list[tuple[Sums, float, float]] = []
    looked = 0
    for rows in groups.values():
        if len(rows) != _members(scene, rows[0]) or any(row.facts.get("skipped") for row in rows):
            continue
        checked = _element(rows, float(scale))
        looked += checked is not None
        if checked is not None and checked[0]:
            found.append((rows[0], *checked[1:]))
    if not looked:
        raise NotChecked(f"all ranks, linear layers that do not gather their input, and {_NEEDS}")
    if not found:
        return []
    sums, value, wanted = found[0]
    factor = f", {value / wanted:.3g} times" if wanted and 0.01 < abs(value / wanted) < 100 else ""
    text = (
        f"the gradient of {sums.name} is {value:.6g} where its module's {'output' if sums.kind == 'norm' else 'input'}"
        f" and gradient give {wanted:.6g}{factor} (step {sums.step}); {len(found)} of {looked} weights in all"
    )
    where = {"step": sums.step, "name": sums.name, "kind": "grad_reduced", "ranks": [row.rank for row in rows]}
    return [Breach(text, {**where, "value": value, "expected": wanted, "tensors": len(found)})]


def _beside(scene: Scene, sums: Sums) -> tuple[int, ...]:
    """Coordinates of ranks that hold other parts of the weight, or the same part without adding to it."""
    if "experts" in sums.name:
        return (scene.at(sums.rank, "etp"), scene.at(sums.rank, "pp"))
    if sums.kind == "norm" and scene.run.facts.get("sequence_parallel"):
        return (scene.at(sums.rank, "pp"),)
    return (scene.at(sums.rank, "tp"), scene.at(sums.rank, "pp"))


def _members(scene: Scene, sums: Sums) -> int:
    """How many ranks add to a gradient; 0 where it is not known."""
    if "experts" in sums.name:
        world = int(scene.run.facts.get("world", 1))
        return world // (scene.size("ep") * scene.size("etp") * scene.size("pp"))
    if _OWN_REDUCTION.search(sums.name) and scene.size("tp") > 1:
        return 0
    parts = scene.size("tp") if sums.kind == "norm" and scene.run.facts.get("sequence_parallel") else 1
    return scene.size("dp") * scene.size("cp") * parts


def _element(rows: list[Sums], scale: float) -> tuple[bool, float, float] | None:
    """Whether an element is wrong, with its value and what it should be; None where none can be checked."""
    result = None
    for k in range(len(rows[0].numbers("products"))):
        value = next((g for row in rows if (g := _at(row.facts.get("gradient"), k)) is not None), None)
        divisor = scale
        if rows[0].kind == "norm":
            weight = _at(rows[0].facts.get("weight"), k)
            if weight is None or abs(weight + float(rows[0].facts.get("shift", 0.0))) < _SMALL:
                continue
            divisor *= weight + float(rows[0].facts.get("shift", 0.0))
        if value is None or not math.isfinite(value):
            continue
        wanted = sum(row.numbers("products")[k] for row in rows) / divisor
        size = math.sqrt(sum(row.numbers("squares")[k] for row in rows)) / abs(divisor)
        total = sum(row.numbers("absolute")[k] for row in rows) / abs(divisor)
        # Factors are rounded, and the product once for each microbatch; what norms put out is rounded before.
        epsilon = max(row.epsilon for row in rows)
        room = epsilon * (4 * size + 2 * total) + _SINGLE * (size + total) + 1e-30
        if "float16" in (rows[0].dtype, rows[0].facts.get("gradient_dtype")):
            room += _SUBNORMAL * sum(int(row.facts.get("calls", 0)) for row in rows)
        if math.isfinite(wanted) and abs(value - wanted) > room:
            return True, value, wanted
        result = False, value, wanted
    return result


def _at(values: Any, k: int) -> float | None:
    return values[k] if isinstance(values, list) and k < len(values) else None


def home(scene: Scene) -> list[Breach]:
    """What experts put out, times what they took in, is the same when it has come home to the tokens it belongs to."""
    if scene.argument("moe_expert_capacity_factor") is not None or scene.size("etp") > 1:
        raise NotChecked("experts that drop no token and are not cut over tensor-parallel ranks")
    if scene.size("tp") > 1 and not scene.run.facts.get("sequence_parallel"):
        raise NotChecked("sequence parallelism, where experts are beside tensor parallelism")
    groups: dict[tuple[Any, ...], dict[str, list[Sums]]] = defaultdict(lambda: defaultdict(list))
    for sums in _sums(scene, ("tokens",)):
        base, part = (sums.name, "layer") if sums.op == "MoELayer" else (sums.name.removesuffix(".experts"), "experts")
        groups[sums.step, base, scene.at(sums.rank, "edp"), scene.at(sums.rank, "pp")][part].append(sums)
    found: list[tuple[Sums, float, float]] = []
    looked = 0
    for (_, base, *_), parts in groups.items():
        layer, experts = parts.get("layer", []), parts.get("experts", [])
        if not layer or len(layer) != len(experts) or any(s.facts.get("skipped") for s in (*layer, *experts)):
            continue
        looked += 1
        for k in range(len(layer[0].numbers("products"))):
            came = sum(s.numbers("products")[k] for s in layer)
            left = sum(s.numbers("products")[k] for s in experts)
            size = math.sqrt(sum(s.numbers("squares")[k] for s in (*layer, *experts)))
            epsilon = max(s.epsilon for s in (*layer, *experts))
            if abs(came - left) > (4 * epsilon + _SINGLE) * size + 1e-30:
                found.append((layer[0]._replace(name=base), came, left))
                break
    if not looked:
        raise NotChecked(f"a layer of experts without shared ones, all ranks, and {_NEEDS}")
    if not found:
        return []
    sums, came, left = found[0]
    text = f"inputs times outputs of the experts of {sums.name} sum to {left:.6g}, {came:.6g} after they came home"
    where = {"step": sums.step, "name": sums.name, "kind": "activation", "ranks": [], "tensors": len(found)}
    return [Breach(f"{text} (step {sums.step}); {len(found)} of {looked} layers in all", where)]


COST = "four columns of inputs and gradients, a few small operators a layer and microbatch, no wait"
LAWS = (
    Law(
        "weight-gradients",
        "the gradient of a matrix or a norm is what its module took in, times what it got back, over all tokens",
        "a microbatch, a rank or a reduction left out of one weight or made twice, a wrong factor for experts or norms",
        "checks: {products: true}",
        COST,
        multiplied,
        "look at what adds to the gradient that is named, from its backward to its reduction",
    ),
    Law(
        "tokens-come-home",
        "what experts put out comes home to the tokens it belongs to",
        "tokens in another order after they were combined",
        "checks: {products: true}",
        COST,
        home,
        "record the dispatcher: dump: {level: mix, list: [mlp]}",
    ),
)
