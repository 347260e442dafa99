"""Causes: which of the tensors that differ do so by themselves, and which have only inherited it.

A module's result has `diverged` here when what went into it agrees: its inputs (for a gradient: the gradient of its
output, and what the forward left), its weights, and every module inside it. Anything else is `inherited`; so is what
differs less than something before it in the same samples, because a difference may pass below the tolerance for a while
and come up again.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analyse.judge import Judgement
from msprobe_megatron.analyse.match import Pairs
from msprobe_megatron.analyse.order import last_sample

AGREE, DIVERGED, INHERITED, ONLY_LEFT, ONLY_RIGHT, LAYOUT = (
    *("agree", "diverged", "inherited"),
    *("only_left", "only_right", "layout"),
)
_TIED = {"embedding.word_embeddings": ("output_layer",)}


def classify(pairs: Pairs, judgement: Judgement, order: npt.NDArray[np.int64]) -> list[str]:
    """State of every pair; `order` is the order of cause.

    Example::

        states = classify(pairs, judgement, causal_order(pairs, places))
    """
    diverged, layout = judgement.diverged, judgement.layout
    excess = judgement.error / judgement.tolerance
    states = np.full(len(pairs), AGREE, dtype=object)
    states[layout != ""] = LAYOUT
    states[~pairs["right_has"].astype(bool)] = ONLY_LEFT
    states[~pairs["left_has"].astype(bool)] = ONLY_RIGHT
    known = _Known()
    samples = last_sample(pairs)
    columns = (pairs["step"], samples, pairs["kind"], pairs["name"], pairs["io"])
    for i in order[diverged[order]]:
        step, sample, kind, name, io = (column[i] for column in columns)
        inherited = known.explains(step, sample, kind, name, io) or known.larger(step, sample, kind, excess[i])
        states[i] = INHERITED if inherited else DIVERGED
        known.add(step, sample, kind, name, io, excess[i])
    return [str(state) for state in states]


def culprit(kind: str, name: str, io: str) -> str:
    """The module to look at when this tensor is the first to differ.

    What a module returns is its own doing; what arrives at it was made by the module around it, between its children.

    Example::

        >>> culprit("activation", "decoder.layers.1.mlp.linear_fc2", "input")
        'decoder.layers.1.mlp'
    """
    if kind not in ("activation", "gradient"):
        return name.rpartition(".")[0] if io == "weight" else name
    if (kind == "activation") == (io == "output"):
        return name
    if name == "model":
        return "data" if kind == "activation" else "loss"
    around = name.rpartition(".")[0].removesuffix(".layers").removesuffix(".local_experts")
    return around or "model"


class _Known:
    """What is known to differ, while walking in the order of cause."""

    def __init__(self) -> None:
        self.first_step: int | None = None
        self.in_sample: dict[tuple[int, int], float] = defaultdict(float)
        self.modules: dict[tuple[int, int], set[tuple[str, str, str]]] = defaultdict(set)
        self.inside: dict[tuple[int, int], set[tuple[str, str]]] = defaultdict(set)
        self.weights: set[tuple[int, str]] = set()
        self.anywhere: set[tuple[int, str, str, str]] = set()
        self.in_step: set[int] = set()
        self.by_weights: dict[int, float] = defaultdict(float)

    def add(self, step: Any, sample: Any, kind: str, name: str, io: str, excess: float) -> None:
        """A tensor differs."""
        if self.first_step is None:
            self.first_step = int(step)
        self.in_step.add(step)
        if kind == "parameter":
            self.weights.update((step, holder) for holder in _holders(name))
            self.by_weights[step] = max(self.by_weights[step], excess)
            return
        self.anywhere.add((step, kind, name, io))
        self.in_sample[step, sample] = max(self.in_sample[step, sample], excess)
        self.modules[step, sample].add((kind, name, io))
        self.inside[step, sample].update((kind, holder) for holder in _holders(name))

    def larger(self, step: Any, sample: Any, kind: str, excess: float) -> bool:
        """Whether something before it in the same samples differs by more."""
        before = max(self.in_sample[step, sample], self.by_weights[step])
        return kind in ("activation", "gradient") and before >= excess

    def explains(self, step: Any, sample: Any, kind: str, name: str, io: str) -> bool:
        """Whether something that differs already can be the cause of this."""
        if self.first_step is not None and step > self.first_step:
            return True
        if kind in ("activation", "gradient"):
            result = (kind == "activation") == (io == "output")
            return self._result(step, sample, kind, name) if result else self.in_sample[step, sample] > 0
        if kind == "grad_reduced":
            return self._weight_gradient(step, name)
        return kind != "parameter" and step in self.in_step

    def _result(self, step: Any, sample: Any, kind: str, name: str) -> bool:
        here, inside = self.modules[step, sample], self.inside[step, sample]
        if (step, name) in self.weights or ("activation", name) in inside or ("activation", name, "input") in here:
            return True
        if kind == "activation":
            return False
        left_by_forward = ("activation", name, "output") in here
        return left_by_forward or ("gradient", name, "output") in here or ("gradient", name) in inside

    def _weight_gradient(self, step: Any, name: str) -> bool:
        owner = name.rpartition(".")[0]
        return any(
            (step, what, module, side) in self.anywhere
            for module in (owner, *_TIED.get(owner, ()))
            for what, side in (("activation", "input"), ("activation", "output"), ("gradient", "output"))
        )


def _holders(name: str) -> list[str]:
    """All modules around a module or weight, the model itself included."""
    parts = name.split(".")
    return ["model", *(".".join(parts[:n]) for n in range(1, len(parts)))] if name != "model" else []
