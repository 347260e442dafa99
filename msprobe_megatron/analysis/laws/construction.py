"""Laws of how the model is built: constants and dtypes are alike in all layers and on all ranks."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from typing import Any

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, label, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene

_LAYER = re.compile(r"layers\.(\d+)")
_FEW = 0.34
"""The share of layers that may be odd; more of them are another kind of layer."""
_LEAST = 3


_Everywhere = dict[tuple[str, str], dict[str, list[int]]]
"""By place and layer: each value and the ranks that have it."""


def constants(scene: Scene) -> list[Breach]:
    """Scales, epsilons, dropout rates and activations are alike on all ranks and layers, and as the arguments say."""
    everywhere = _constants(scene)
    if not everywhere:
        raise NotChecked("constants of modules, which newer runs write of themselves")
    usual: dict[str, Counter[str]] = defaultdict(Counter)
    for (place, _), values in everywhere.items():
        usual[place][max(values, key=lambda value: len(values[value]))] += 1
    found = [*_between_ranks(everywhere), *_between_layers(everywhere, usual), *_as_told(scene, usual)]
    if not found:
        return []
    name, text, who = found[0]
    where = {"name": name, "kind": "constant", "ranks": who, "tensors": len(found)}
    return [Breach(f"{text}; {len(found)} in all", where, "likely")]


def _constants(scene: Scene) -> _Everywhere:
    found: _Everywhere = defaultdict(lambda: defaultdict(list))
    for rank, facts in sorted(scene.run.ranks.items()):
        table = facts.get("constants")
        for place, values in table.items() if isinstance(table, dict) else ():
            for value, layers in values.items() if isinstance(values, dict) else ():
                for layer in layers if isinstance(layers, list) and _known(str(place), value) else ():
                    found[str(place), str(layer)][value].append(rank)
    return found


def _known(place: str, text: str) -> bool:
    """A finite number, or the name of an activation function."""
    if place.endswith(".activation_func"):
        return text.isidentifier()
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _name(place: str, layer: str) -> str:
    return place.replace("layers.*", f"layers.{layer.partition('.')[0]}", 1)


def _between_ranks(everywhere: _Everywhere) -> list[tuple[str, str, list[int]]]:
    found = []
    for (place, layer), values in everywhere.items():
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: len(item[1]))
            (few, who), (most, _) = ordered[0], ordered[-1]
            name = _name(place, layer)
            found.append((name, f"{name} is {few} on ranks {who}, {most} on others", who))
    return found


def _between_layers(everywhere: _Everywhere, usual: dict[str, Counter[str]]) -> list[tuple[str, str, list[int]]]:
    found = []
    for (place, layer), values in everywhere.items():
        (most, times), total = usual[place].most_common(1)[0], sum(usual[place].values())
        odd = [value for value in values if value != most]
        if odd and len(values) == 1 and total - times <= _FEW * total and times >= _LEAST:
            name = _name(place, layer)
            found.append((name, f"{name} is {odd[0]}, {most} in the other layers", values[odd[0]]))
    return found


def _as_told(scene: Scene, layers_of: dict[str, Counter[str]]) -> list[tuple[str, str, list[int]]]:
    """Constants that the arguments give: epsilon of norms, rates of dropout, scale of attention."""
    width, scaled = scene.argument("kv_channels"), scene.argument("apply_query_key_layer_scaling")
    plain = width and not scaled and not scene.argument("multi_latent_attention")
    own = scene.argument("softmax_scale")
    wanted = {
        "eps": scene.argument("norm_epsilon"),
        "softmax_scale": (1 / math.sqrt(float(width)) if plain and own is None else None),
    }
    found = []
    for place, counts in layers_of.items():
        leaf, attribute = place.split(".")[-2:]
        given = wanted.get(attribute)
        if given is None or (attribute == "eps" and "norm" not in leaf):
            continue
        for value in counts:
            if abs(float(value) - float(given)) > 1e-6 * abs(float(given)):
                found.append((place, f"{place} is {value}, the arguments give {given:.6g}", sorted(scene.run.ranks)))
    return found


def dtypes(scene: Scene) -> list[Breach]:
    """A tensor has the same dtype in every layer."""
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps[:1]:
        groups: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
        for kind in ("activation", "parameter", "grad_reduced"):
            for row in step.of(kind):
                match = _LAYER.search(row.name)
                if match and row.phase != "recompute" and "experts" not in row.name:
                    place = (kind, _LAYER.sub("layers.*", row.name), row.io, row.path, row.op)
                    groups[place].setdefault(match[1], row)
        for rows in groups.values():
            counts = Counter(row.dtype for row in rows.values())
            looked += len(rows) > 1
            usual, times = counts.most_common(1)[0]
            if len(counts) > 1 and len(rows) - times <= _FEW * len(rows) and times >= _LEAST:
                odd = next(row for row in rows.values() if row.dtype != usual)
                found.append((odd, usual))
    if not looked:
        raise NotChecked("several layers: dump: {level: L0}")
    if not found:
        return []
    row, usual = min(found, key=lambda pair: pair[0].seq)
    text = f"{label(row)} is in {row.dtype}, in the other layers in {usual} ({moment(row)}); {len(found)} in all"
    return [Breach(text, at(row, value=row.dtype, expected=usual, tensors=len(found)), "likely")]


LAWS = (
    Law(
        "constants",
        "scales, epsilons, dropout rates and activations are alike in all layers and ranks, and as the arguments say",
        "another softmax scale, epsilon, dropout or activation in one layer, on one rank or everywhere",
        "nothing: every run writes them",
        "a few kB in each rank's own file, read once when the job attaches",
        constants,
        "look at how the module that is named is built",
    ),
    Law(
        "dtypes",
        "a tensor has the same dtype in every layer",
        "one layer that computes in another precision",
        "dump: {level: L0}",
        "nothing beyond the dump",
        dtypes,
        "look at the casts in the module that is named",
    ),
)
