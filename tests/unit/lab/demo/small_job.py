"""The small job of these tests: a model of four layers, three iterations, no dropout."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.lab.demo.pretrain_gpt import run
from tests.support.forked import run_forked

BASE = """
--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 128
--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2
--attention-dropout 0 --hidden-dropout 0 --log-interval 1
""".split()  # noqa: SIM905


def train_once(flags: list[str]) -> dict[str, Any]:
    result = run(flags)
    return {"losses": result.losses, "grad_norms": result.grad_norms}


def train_in(world_size: int, flags: str) -> dict[str, Any]:
    """Losses of the last pipeline stage and gradient norms, which every rank must report alike."""
    ranks = run_forked(world_size, train_once, [*BASE, *flags.split()])
    losses = [rank["losses"] for rank in ranks if rank["losses"]]
    assert losses, "no rank reported a loss"
    assert all(seen == losses[0] for seen in losses)
    assert all(rank["grad_norms"] == ranks[0]["grad_norms"] for rank in ranks)
    return {"losses": losses[0], "grad_norms": ranks[0]["grad_norms"]}
