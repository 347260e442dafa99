"""The launcher must report what went wrong on a rank and leave no process behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from .forked import RankFailed, run_forked


def _sum_of_ranks():
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sum": total.item(), "pid": os.getpid()}


def _first_raises():
    if dist.get_rank() == 0:
        raise KeyError("lost on purpose")
    dist.barrier()


def _second_dies():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _never_ends():
    time.sleep(1000)


def test_results_come_back_in_order_of_rank():
    results = run_forked(3, _sum_of_ranks)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [result["sum"] for result in results] == [6.0, 6.0, 6.0]
    for result in results:
        with pytest.raises(ProcessLookupError):
            os.kill(result["pid"], 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [(_first_raises, r"rank 0: (.|\n)*lost on purpose"), (_second_dies, r"rank 1: no answer")],
)
def test_failure_of_a_rank_is_told(function, message):
    with pytest.raises(RankFailed, match=message):
        run_forked(2, function, timeout=20)


def test_a_rank_that_hangs_is_stopped():
    with pytest.raises(RankFailed, match="rank 0: no answer"):
        run_forked(1, _never_ends, timeout=0.5)
