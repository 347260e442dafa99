"""Faults to practise on: ``--practise NAME`` breaks the demo job the way real jobs break, to find it with the kit.

One for each symptom of docs/walkthroughs.md. They change the model or the data of this demo only, after the model is
built and before anything is armed, as a bug of the training code would.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_megatron.lab.demo.data import Batches
from msprobe_megatron.topology import coordinates, names

BAD_STEP = 7
"""The step (from 0) at which the faults of one step act."""
LATE_STEP = 20
"""The step of the bad data: by then the job has learnt something that garbage can contradict."""
BAD_MICROBATCH = 1
Chunks = list[nn.Module]


class PractisedBatches(Batches):
    """Batches that know which microbatch was read last, and may hand out garbage for one of them."""

    now = (-1, -1)
    garbage = False

    def microbatch(self, iteration: int, microbatch: int) -> dict[str, torch.Tensor]:
        """As in `Batches`, with one token over and over where garbage was asked for."""
        self.now = (iteration, microbatch)
        batch = super().microbatch(iteration, microbatch)
        if self.garbage and self.now == (LATE_STEP, BAD_MICROBATCH):
            batch["tokens"] = torch.zeros_like(batch["tokens"])
            batch["labels"] = torch.ones_like(batch["labels"])
        return batch


def prepare(fault: str, chunks: Chunks, batches: PractisedBatches) -> None:
    """Put a fault into the job."""
    FAULTS[fault](chunks, batches)


def _nan(chunks: Chunks, batches: PractisedBatches) -> None:
    """One value of one layer's result becomes NaN, on one tensor-parallel rank, in one microbatch."""
    where = coordinates.current()
    if where.of("tp") == where.size("tp") - 1:
        _around(chunks, "decoder.layers.2.self_attention.core_attention", functools.partial(_with_nan, batches))


def _with_nan(batches: PractisedBatches, result: Any) -> Any:
    if batches.now != (BAD_STEP, BAD_MICROBATCH):
        return result
    bad = result.clone()
    bad.view(-1)[5] = math.nan
    return bad


def _spike(chunks: Chunks, batches: PractisedBatches) -> None:
    """The samples of one microbatch are garbage: one token over and over, with labels that fit nothing."""
    batches.garbage = True


def _mismatch(chunks: Chunks, batches: PractisedBatches) -> None:
    """The last tensor-parallel rank scales its attention scores wrongly in layer 1; alone, there is none to err."""
    where = coordinates.current()
    attention: Any = _module(chunks, "decoder.layers.1.self_attention.core_attention")
    if attention is not None and where.size("tp") > 1 and where.of("tp") == where.size("tp") - 1:
        attention.softmax_scale *= math.sqrt(2)


def _drift(chunks: Chunks, batches: PractisedBatches) -> None:
    """Norm gradients are not added up over the tensor-parallel ranks, although each saw its part of the sequence."""
    import importlib

    module: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    for name in ("_allreduce_non_tensor_model_parallel_grads", "_allreduce_layernorm_grads"):
        if hasattr(module, name):
            setattr(module, name, lambda *args, **kwargs: None)


def _unstable(chunks: Chunks, batches: PractisedBatches) -> None:
    """Layer 1 rounds differently each time, as an operator with atomic additions does."""

    def noisy(result: Any) -> Any:
        output, *rest = result
        share = int.from_bytes(os.urandom(4), "little") / 2**32
        return (output * (1 + share * 1e-2), *rest)

    _around(chunks, "decoder.layers.1.mlp.linear_fc2", noisy)


def _module(chunks: Chunks, name: str) -> nn.Module | None:
    return next((entry.module for chunk in chunks for entry in names.modules(chunk) if entry.name == name), None)


def _around(chunks: Chunks, name: str, change: Callable[[Any], Any]) -> None:
    module: Any = _module(chunks, name)
    if module is None:  # another pipeline stage has it
        return
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    module.forward = forward


FAULTS: dict[str, Callable[[Chunks, PractisedBatches], None]] = {
    "nan": _nan,
    "spike": _spike,
    "mismatch": _mismatch,
    "drift": _drift,
    "unstable": _unstable,
}
