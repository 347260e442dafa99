"""State of a legacy optimizer: numbers in the file, names here.

Torch numbers parameters in the order of the groups, and Megatron groups them by weight decay and by expert. Which
number is which weight follows from the order of the weights and is believed only if all shapes fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from msprobe_megatron.analysis.checkpoints.canonical import KINDS

Named = tuple[int, str, torch.Tensor]
"""Chunk, local name, weight."""


State = tuple[str, int, str, torch.Tensor]
"""Kind, chunk, local name of the weight, value."""


def states_of(optimizer: Any, chunks: Sequence[dict[str, torch.Tensor]]) -> tuple[list[State], str]:
    """All state tensors with the weights they belong to, and why there are none."""
    weights = [(chunk, name, value) for chunk, tensors in enumerate(chunks) for name, value in tensors.items()]
    found: list[State] = []
    problems = []
    for one in _optimizers(optimizer):
        problem = _add(found, one, weights)
        if problem:
            problems.append(problem)
    return found, "; ".join(dict.fromkeys(problems))


def _optimizers(optimizer: Any) -> list[dict[Any, Any]]:
    """A chain of optimizers (dense weights, experts) is a list, or a dictionary by number."""
    if isinstance(optimizer, list | tuple):
        return [item for item in optimizer if isinstance(item, dict)]
    if isinstance(optimizer, dict) and optimizer and all(isinstance(key, int) for key in optimizer):
        return [item for item in optimizer.values() if isinstance(item, dict)]
    return [optimizer] if isinstance(optimizer, dict) else []


def _add(found: list[State], one: dict[Any, Any], weights: list[Named]) -> str:
    inner = one.get("optimizer", one)
    states, groups = inner.get("state"), inner.get("param_groups")
    if states is None or not groups:
        return "its state lies elsewhere (distributed optimizer)"
    numbers = {number: state for number, state in states.items() if isinstance(state, dict)}
    masters = one.get("fp32_from_fp16_params") or []
    for index, group in enumerate(groups):
        held = [numbers.get(number, {}) for number in group.get("params", ())]
        shapes = [_shape(state) for state in held]
        names = _weights_of(group, weights, shapes)
        if names is None:
            return f"group {index}: {len(shapes)} states that fit no sequence of weights"
        for (chunk, name, _), state in zip(names, held, strict=True):
            for kind, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    found.append((KINDS.get(str(kind), str(kind)), chunk, name, value))
        if index < len(masters) and len(masters[index]) == len(names):
            found += [("master", chunk, name, v) for (chunk, name, _), v in zip(names, masters[index], strict=True)]
    return ""


def _shape(state: dict[str, Any]) -> tuple[int, ...] | None:
    value = state.get("exp_avg", next((v for v in state.values() if isinstance(v, torch.Tensor) and v.dim()), None))
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _weights_of(
    group: dict[str, Any], weights: list[Named], shapes: list[tuple[int, ...] | None]
) -> list[Named] | None:
    """The weights of a group, in order; None if their shapes are not those of the states."""
    expert = bool(group.get("is_expert_parallel", False))
    decays = group.get("wd_mult", group.get("weight_decay", 1.0))
    # Without expert parallelism experts are weights like others, in the same groups.
    for rule, apart in itertools.product((_decayed, lambda name, value: True), (True, False)):
        chosen = [
            (chunk, name, value)
            for chunk, name, value in weights
            if (not apart or (".experts." in name) == expert) and rule(name, value) == bool(decays)
        ]
        if [tuple(value.shape) for _, _, value in chosen] == shapes:
            return chosen
    return None


def _decayed(name: str, value: torch.Tensor) -> bool:
    """Megatron's rule: biases and vectors have no weight decay."""
    return not name.endswith(".bias") and value.dim() > 1
