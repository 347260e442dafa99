"""Legacy checkpoints: one file a model-parallel rank, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`.

Each file holds the state of its stage under local layer and expert numbers. Stages are put in order, numbers made
global, and the parts of tensor-parallel ranks joined as Megatron's layers cut them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from msprobe_megatron.analysis.checkpoints.canonical import EXPERT, LAYER, TIED, canonical, cut_of
from msprobe_megatron.analysis.checkpoints.distributed_state import states_in_buffers
from msprobe_megatron.analysis.checkpoints.held import (
    BUFFER,
    PARAMETER,
    Checkpoint,
    CheckpointError,
    CheckpointTensor,
    Key,
)
from msprobe_megatron.analysis.checkpoints.optimizer_state import State, states_of
from msprobe_megatron.analysis.checkpoints.safe_load import load_file

_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?$")
_FILES = ("model_optim_rng.pt", "model_rng.pt")


@dataclass
class _Stage:
    """One rank's file: its place, and the tensors of its chunks under local names."""

    tp: int
    pp: int
    ep: int
    chunks: list[dict[str, torch.Tensor]]
    states: list[State] = field(default_factory=list)


@dataclass
class _Settings:
    """What of the training arguments matters for joining."""

    gated: bool = False
    pipeline: bool | None = None
    tied: bool | None = None
    expert_tp: int | None = None
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, content: Any) -> _Settings:
        """From the arguments that the checkpoint holds."""
        known = vars(content["args"]) if hasattr(content.get("args"), "__dict__") else {}
        untied = known.get("untie_embeddings_and_output_weights")
        pipeline = known.get("pipeline_model_parallel_size")
        return cls(
            gated=bool(known.get("swiglu") or known.get("gated_linear_unit")),
            pipeline=None if pipeline is None else int(pipeline) > 1,
            tied=None if untied is None else not untied,
            expert_tp=known.get("expert_tensor_parallel_size"),
        )


def open_legacy(directory: Path, iteration: int | None, trust: bool) -> Checkpoint:
    """Read the files of all ranks; their tensors stay mapped."""
    found = Checkpoint(directory, "legacy", iteration)
    places = [(match, path) for path in sorted(directory.iterdir()) if (match := _RANK.match(path.name))]
    stages, settings = [], None
    for match, path in places:
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"{path}: no {_FILES[0]}")
        content = load_file(file, trust)
        if not isinstance(content, dict):
            raise CheckpointError(f"{file}: holds no dictionary")
        settings = settings or _Settings.of(content)
        stage = _stage(match, content, settings)
        _optimizer(stage, content.get("optimizer"), path, found, trust)
        stages.append(stage)
    if settings is None:
        raise CheckpointError(f"{directory}: no mp_rank_* directory")
    for key, parts in _collected(stages).items():
        found.tensors[key] = _joined(key[1], parts, settings)
    _untie(found, settings)
    return found


def _stage(match: re.Match[str], content: dict[str, Any], settings: _Settings) -> _Stage:
    numbers = [int(text) for text in match.groups() if text is not None]
    names = ["model", *sorted((k for k in content if re.fullmatch(r"model\d+", k)), key=lambda k: int(k[5:]))]
    chunks = [dict(_tensors(content[name], "")) for name in names if name in content]
    if not chunks:
        raise CheckpointError(f"{match.string}: holds no model; keys: {', '.join(map(str, content))[:200]}")
    pp = ep = 0
    if len(numbers) == 3:
        _, pp, ep = numbers
    elif len(numbers) == 2:
        experts = any(EXPERT.match(name) for chunk in chunks for name in chunk)
        in_pipeline = settings.pipeline if settings.pipeline is not None else not experts
        pp, ep = (numbers[1], 0) if in_pipeline else (0, numbers[1])
    return _Stage(numbers[0], pp, ep, chunks)


def _optimizer(stage: _Stage, optimizer: Any, path: Path, found: Checkpoint, trust: bool) -> None:
    """The state of the optimizer: in the rank's own file, or in the buffers of a distributed one beside it."""
    stage.states, problem = states_of(optimizer, stage.chunks)
    file = path / "distrib_optim.pt"
    if file.is_file():
        states, odd = states_in_buffers(load_file(file, trust), stage.chunks)
        stage.states += states
        some = ", ".join(buffer.name for buffer in odd)
        problem = f"{file.name}: the weights of this rank do not lie in its buffers {some}" if odd else ""
        for buffer in odd:
            for kind, value in buffer.tensors.items():
                found.tensors[BUFFER, f"{path.name}/{buffer.name}.{kind}"] = _whole(value)
    if problem:
        found.problems.append(f"{path.name}: optimizer: {problem}")


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All floating tensors of a nested state, under dotted names."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))


def _whole(tensor: torch.Tensor) -> CheckpointTensor:
    return CheckpointTensor(tuple(tensor.shape), lambda: tensor)


Parts = dict[tuple[int, int, int], torch.Tensor]
"""(stage in order, expert-parallel rank, tensor-parallel rank) -> this rank's part."""


def _collected(stages: list[_Stage]) -> dict[Key, Parts]:
    """Parts of every tensor, under canonical names with global numbers."""
    depth = 1 + max(stage.pp for stage in stages)
    offsets = _layer_offsets(stages, depth)
    found: dict[Key, Parts] = defaultdict(dict)
    for stage in stages:
        experts = [_expert_count(chunk) for chunk in stage.chunks]
        weights = [(PARAMETER, i, name, value) for i, chunk in enumerate(stage.chunks) for name, value in chunk.items()]
        for kind, chunk, local, tensor in [*weights, *stage.states]:
            order = chunk * depth + stage.pp
            number = LAYER.match(local)
            name = f"{number[1]}.{int(number[2]) + offsets[order, number[1]]}.{number[3]}" if number else local
            expert = EXPERT.match(name)
            if expert:
                name = f"{expert[1]}.{int(expert[2]) + stage.ep * experts[chunk]}.{expert[3]}"
            found[kind, canonical(name)][order, 0 if expert else stage.ep, stage.tp] = tensor
    return found


def _layer_offsets(stages: list[_Stage], depth: int) -> dict[tuple[int, str], int]:
    """Number of layers before each stage, for each stack of layers."""
    counts: dict[tuple[int, str], int] = defaultdict(int)
    for stage in stages:
        for chunk, tensors in enumerate(stage.chunks):
            for name in tensors:
                if number := LAYER.match(name):
                    key = (chunk * depth + stage.pp, number[1])
                    counts[key] = max(counts[key], int(number[2]) + 1)
    offsets: dict[tuple[int, str], int] = {}
    before: dict[str, int] = defaultdict(int)
    for order, stack in sorted(counts):
        offsets[order, stack] = before[stack]
        before[stack] += counts[order, stack]
    return offsets


def _expert_count(chunk: dict[str, torch.Tensor]) -> int:
    return 1 + max((int(match[2]) for name in chunk if (match := EXPERT.match(name))), default=-1)


def _joined(name: str, parts: Parts, settings: _Settings) -> CheckpointTensor:
    """The whole of a tensor from the parts of its first stage and first expert-parallel rank."""
    first = min(parts)[:2]
    ordered = [tensor for place, tensor in sorted(parts.items()) if place[:2] == first]
    shapes = {tuple(part.shape) for part in ordered}
    shape = tuple(ordered[0].shape)
    if len(shapes) > 1:
        return CheckpointTensor(shape, lambda: ordered[0], f"parts of shapes {sorted(shapes)}")
    cut = cut_of(name, settings.gated)
    if EXPERT.match(name) and settings.expert_tp == 1:
        cut = None
    if len(ordered) == 1:
        return _whole(ordered[0])
    if cut is None or cut[0] >= len(shape):
        same = all(torch.equal(part, ordered[0]) for part in ordered[1:])
        return CheckpointTensor(
            shape, lambda: ordered[0], "" if same else "differs between tensor-parallel ranks; cut not known"
        )
    dim, order = cut
    whole = tuple(n * len(ordered) if i == dim else n for i, n in enumerate(shape))
    return CheckpointTensor(whole, lambda: _cat(ordered, dim, order))


def _cat(parts: list[torch.Tensor], dim: int, order: str) -> torch.Tensor:
    if order == "gated":
        # Every rank holds its piece of the gate, then its piece of the other half.
        halves = [part.chunk(2, dim) for part in parts]
        parts = [half[i] for i in (0, 1) for half in halves]
    return torch.cat(parts, dim)


def _untie(found: Checkpoint, settings: _Settings) -> None:
    """The last stage keeps a copy of a tied embedding under the name of the output layer."""
    for kind in {kind for kind, _ in found.tensors}:
        tied, copy = found.tensors.get((kind, TIED)), found.tensors.get((kind, "output_layer.weight"))
        if tied is None or copy is None or tied.reason or copy.reason or settings.tied is False:
            continue
        same = tied.shape == copy.shape and torch.equal(tied.load(), copy.load())
        if same or settings.tied:
            del found.tensors[kind, "output_layer.weight"]
        if not same and settings.tied:
            found.problems.append(f"{kind}: the last stage's copy of {TIED} differs from the first stage's")
