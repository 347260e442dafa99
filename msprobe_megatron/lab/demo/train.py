"""The training loop: Megatron's own schedule and optimizer, in the order every Megatron job calls them.

Takes what `model` built and feeds it from `data`. The gradient is that of the mean loss over the global batch
for every layout: each rank returns the sum over its tokens and their number, and Megatron averages over
microbatches, data- and context-parallel ranks, which all hold equally many.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from msprobe_megatron.lab.demo.data import Batches
from msprobe_megatron.lab.demo.installed import known
from msprobe_megatron.lab.demo.log import Log

Microbatches = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Step:
    """One finished iteration; `loss` is None off the last pipeline stage, `grad_norm` without clipping."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    skipped: bool
    seconds: float


@dataclass(frozen=True)
class Callbacks:
    """Where a test can look in: once all is built, when the gradients are there, after the optimizer step."""

    ready: Callable[[list[nn.Module], Any], None] | None = None
    gradients: Callable[[int], None] | None = None
    step: Callable[[Step], None] | None = None


@dataclass
class Result:
    """What a run leaves behind on this rank."""

    chunks: list[nn.Module]
    optimizer: Any
    steps: list[Step] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Loss of each iteration; empty off the last pipeline stage."""
        return [step.loss for step in self.steps if step.loss is not None]

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each iteration, the same on every rank; empty without clipping."""
        return [step.grad_norm for step in self.steps if step.grad_norm is not None]


def train(
    args: Namespace,
    chunks: list[nn.Module],
    optimizer: Any,
    batches: Batches,
    callbacks: Callbacks | None = None,
) -> Result:
    """Run `args.train_iters` iterations and return what they gave."""
    watch = callbacks or Callbacks()
    result, log = Result(chunks, optimizer), Log(args)
    for iteration in range(1, args.train_iters + 1):
        started = time.perf_counter()
        totals = _forward_backward(args, chunks, optimizer, batches, iteration - 1)
        if watch.gradients:
            watch.gradients(iteration)
        success, norm, _zeros = optimizer.step()
        loss = _mean_loss(totals)
        grad_norm = None if norm is None else float(norm)
        step = Step(iteration, loss, grad_norm, not success, time.perf_counter() - started)
        result.steps.append(step)
        log.add(step, float(optimizer.get_loss_scale()))
        if watch.step:
            watch.step(step)
    _settle(args, chunks)
    log.close()
    return result


def _forward_backward(
    args: Namespace, chunks: list[nn.Module], optimizer: Any, batches: Batches, index: int
) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()  # type: ignore[operator]
    optimizer.zero_grad()
    schedule = get_forward_backward_func()
    # Each virtual stage reads the batch for itself, so that no stage depends on another's progress.
    readers = [batches.iteration(index) for _ in chunks]
    totals: list[Any] = schedule(
        forward_step_func=forward_step,
        data_iterator=readers if len(chunks) > 1 else readers[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
        **known(schedule, decoder_seq_length=args.seq_length),
    )
    return totals


def forward_step(reader: Microbatches, model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one microbatch through a stage for the schedule; also say how to make a loss of its output."""
    batch = next(reader)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, token_loss


def token_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over the tokens of this rank, their number, and both for the log."""
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device=losses.device)
    return total, count * _multiplied_by(), {"lm loss": torch.stack([total.detach(), count.float()])}


def _multiplied_by() -> int:
    """What the schedule multiplies the mean by: in 0.12 alone, the number of context-parallel ranks."""
    from megatron.core import package_info, parallel_state

    if (package_info.MAJOR, package_info.MINOR) == (0, 12):
        return int(parallel_state.get_context_parallel_world_size())
    return 1


def _mean_loss(totals: list[Any]) -> float | None:
    """Mean over the tokens of the global batch, on the last pipeline stage."""
    from megatron.core import parallel_state

    if not totals:
        return None
    summed = torch.stack([total["lm loss"] for total in totals]).sum(0)
    torch.distributed.all_reduce(summed, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(summed[0] / summed[1])


def _settle(args: Namespace, chunks: list[nn.Module]) -> None:
    """Finish the parameter gathers that were left to a next forward: the weights are then the last step's."""
    if args.overlap_param_gather:
        for chunk in chunks:
            chunk.disable_forward_pre_hook()  # type: ignore[operator]
