"""A checkpoint of Hugging Face under Megatron's names: every tensor is put together when it is looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.align.forms import Sizes
from msprobe_megatron.analysis.align.name_map import NameMap, Rule, load_map, map_of
from msprobe_megatron.analysis.align.tensors import Whole, numbers
from msprobe_megatron.analysis.align.translate import formed, sizes_of
from msprobe_megatron.analysis.checkpoints.held import PARAMETER, Checkpoint, CheckpointError, CheckpointTensor
from msprobe_megatron.analysis.compare.pairs.elements import View

_ITEM = re.compile(r"^(.*)\[(\d+)\]$")


def map_for(checkpoint: Checkpoint, name: str | None) -> NameMap:
    """The map of a checkpoint: the one asked for, or that of the architecture in its config.json."""
    if name is not None:
        return load_map(name)
    kinds = checkpoint.settings.get("architectures") or []
    found = next((m for kind in kinds if (m := map_of(str(kind))) is not None), None)
    if found is None:
        raise CheckpointError(f"{checkpoint.path}: no map for {kinds or 'an unnamed architecture'}; accepted: --map")
    return found


def mapped(checkpoint: Checkpoint, names: NameMap) -> Checkpoint:
    """The checkpoint under Megatron's names; what the map does not name is listed as a problem."""
    sizes = sizes_of(checkpoint.settings)
    held = {name for kind, name in checkpoint.tensors if kind == PARAMETER}
    layer_names = re.compile(rf"{re.escape(names.their_layers)}\.(\d+)\.")
    layers = sorted({int(m[1]) for name in held if (m := layer_names.match(name))})
    found = replace(checkpoint, tensors={}, problems=list(checkpoint.problems), form=f"{checkpoint.form}, {names.name}")
    used: set[str] = set()
    for target, rules in names.weights.items():
        for layer in layers if "{l}" in target else [None]:
            for expert in range(sizes.experts) if "{e}" in target else [None]:
                fill = partial(_filled, layer=layer, expert=expert)
                sources = _first(rules, fill, held)
                if sources is None:
                    continue
                form, texts = sources
                used.update(_ITEM.sub(r"\1", text) for text in texts)
                found.tensors[PARAMETER, fill(target)] = _tensor(checkpoint, form, texts, sizes, fill(target))
    unused = sorted(name for name in held - used if not name.endswith("inv_freq"))
    if unused:
        found.problems.append(f"{len(unused)} weights are not in the map {names.name}: {', '.join(unused[:3])}")
    return found


def _filled(text: str, layer: int | None, expert: int | None) -> str:
    return text.replace("{l}", str(layer)).replace("{e}", str(expert))


def _first(rules: Sequence[Rule], fill: Callable[[str], str], held: set[str]) -> tuple[str, list[str]] | None:
    for rule in rules:
        texts = [fill(source) for source in rule.sources]
        if all(_ITEM.sub(r"\1", text) in held for text in texts):
            return rule.form, texts
    return None


def _tensor(checkpoint: Checkpoint, form: str, texts: list[str], sizes: Sizes, target: str) -> CheckpointTensor:
    sources = []
    for text in texts:
        match = _ITEM.match(text)
        entry = checkpoint.tensors[PARAMETER, match[1] if match else text]
        sources.append((entry, int(match[2]) if match else None))

    def load() -> View:
        parts = []
        for entry, item in sources:
            view = entry.load()
            words = view.words if item is None else view.words[item]
            parts.append(Whole(view.dtype, words, 0))
        made = formed(form, parts, sizes, True, target)
        return View(made.dtype, made.words)

    reason = next((entry.reason for entry, _ in sources if entry.reason), "")
    # Shapes of fused tensors are sums of their parts; zero-size views tell them without reading a file.
    shapes = [entry.shape if item is None else entry.shape[1:] for entry, item in sources]
    ghosts = [Whole("F32", np.broadcast_to(np.zeros((), "<f4"), shape), 0) for shape in shapes]
    shape = formed(form, ghosts, sizes, True, target).words.shape if not reason else shapes[0]
    return CheckpointTensor(tuple(int(n) for n in shape), load, reason)


class CheckpointWeights:
    """Weights of two checkpoints, as `causes_of_weights` reads them."""

    def __init__(self, left: Checkpoint, right: Checkpoint, view: Callable[[Any], View]) -> None:
        self._sides, self._view = (left, right), view
        self._known: dict[tuple[int, str], npt.NDArray[np.float64] | None] = {}

    def get(self, side: int, name: str) -> npt.NDArray[np.float64] | None:
        """A weight as numbers."""
        if (side, name) not in self._known:
            entry = self._sides[side].tensors.get((PARAMETER, name))
            found = None if entry is None or entry.reason else self._view(entry.load())
            self._known[side, name] = None if found is None else numbers(found.dtype, found.words)
        return self._known[side, name]

    def both(self, name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]] | None:
        """A weight of both sides, of one shape."""
        a, b = self.get(0, name), self.get(1, name)
        return (a, b) if a is not None and b is not None and a.shape == b.shape else None
