"""The loop that the examples share: DDP over gloo or nccl, and the two lines that put the kit around it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import distributed, nn

Loss = Callable[[nn.Module, torch.Generator], torch.Tensor]


def run(model: nn.Module, loss_of: Loss) -> None:
    """Train `model` on random data; `loss_of(model, generator)` makes a batch and returns its loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--probe", metavar="FILE", help="probe file; without it the kit is not imported")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    distributed.init_process_group("nccl" if torch.cuda.device_count() else "gloo")
    rank = distributed.get_rank()
    device = (
        torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    )
    parallel = nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    generator = torch.Generator(device).manual_seed(rank)

    with attached(parallel, optimizer, arguments.probe):
        for step in range(arguments.steps):
            optimizer.zero_grad()
            loss = loss_of(parallel, generator)
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
    # The last to be ready decides when all leave: gloo takes a rank that left early for a failure.
    distributed.barrier()
    distributed.destroy_process_group()


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, probe: str | None):  # noqa: ANN201
    """The kit around the loop, if it is asked for: this is all that a plain torch job needs."""
    if probe is None:
        return nullcontext()
    from msprobe_megatron import attach

    return attach(model, optimizer, probe)
