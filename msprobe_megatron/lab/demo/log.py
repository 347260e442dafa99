"""What the demo says while it trains: Megatron's log line on the last rank, and the losses as JSON lines."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

if TYPE_CHECKING:
    from msprobe_megatron.lab.demo.train import Step


class Log:
    """Collects steps and prints a line every ``--log-interval``; silent on all ranks but the last."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._last_rank = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        self._pending: list[Step] = []
        self._file: TextIO | None = None
        if self._last_rank and args.save_losses:
            path = Path(args.save_losses)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")

    def add(self, step: Step, loss_scale: float) -> None:
        """Take note of a finished iteration."""
        if not self._last_rank:
            return
        if self._file is not None:
            row = {"iteration": step.iteration, "loss": step.loss, "grad_norm": step.grad_norm}
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        self._pending.append(step)
        if step.iteration % self._args.log_interval == 0:
            print(log_line(self._args, self._pending, loss_scale), flush=True)
            self._pending = []

    def close(self) -> None:
        """Close the file of losses."""
        if self._file is not None:
            self._file.close()


def log_line(args: Namespace, steps: list[Step], loss_scale: float) -> str:
    """Megatron's line for the iterations since the last one; the loss is their mean."""
    last = steps[-1]
    losses = [step.loss for step in steps if step.loss is not None and not step.skipped]
    parts = [
        f" iteration {last.iteration:8d}/{args.train_iters:8d}",
        f"consumed samples: {last.iteration * args.global_batch_size:12d}",
        f"elapsed time per iteration (ms): {1000 * sum(s.seconds for s in steps) / len(steps):.1f}",
        f"learning rate: {args.lr:.6E}",
        f"global batch size: {args.global_batch_size:5d}",
    ]
    if losses:
        parts.append(f"lm loss: {sum(losses) / len(losses):.6E}")
    parts.append(f"loss scale: {loss_scale:.1f}")
    if last.grad_norm is not None:
        parts.append(f"grad norm: {last.grad_norm:.3f}")
    parts.append(f"number of skipped iterations: {sum(s.skipped for s in steps):3d}")
    nan = sum(s.loss is not None and s.loss != s.loss for s in steps)
    parts.append(f"number of nan iterations: {nan:3d} |")
    return " | ".join(parts)
