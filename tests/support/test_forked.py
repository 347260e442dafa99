"""The launcher of forked ranks: answers in order, failures with their traceback, hangs with their stacks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.forked import RankFailed, run_forked


def add_up(offset: int) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"rank": rank, "total": total, "names": ["a", None]}


def test_results_come_in_order_of_rank() -> None:
    results = run_forked(3, add_up, 10)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert [float(result["total"]) for result in results] == [33.0] * 3
    assert results[0]["names"] == ["a", None]


def fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        print("said before")
        raise ValueError("the reason")
    time.sleep(60)


def die_on_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def children() -> set[int]:
    """Processes whose parent is this one; other tests may have left some (a browser, a server)."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold anything; the parent is the second word after it.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def test_a_failing_rank_is_quoted_and_the_others_are_ended() -> None:
    before = children()
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed.*said before.*ValueError: the reason"):
        run_forked(2, fail_on_one)
    assert children() <= before


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1 of 2 failed"):
        run_forked(2, die_on_one)


def test_a_hang_is_ended_with_stacks() -> None:
    for seconds in (1, 5, 25, 125):  # on a busy machine the rank needs longer to get where it hangs
        with pytest.raises(RankFailed, match=r"(?s)not all ranks were done.*rank 0\n") as ended:
            run_forked(1, fail_on_one, timeout=seconds)
        if "in fail_on_one" in str(ended.value):
            return
    raise AssertionError(f"the stack does not show where the rank hangs:\n{ended.value}")


def sum_of_squares_gradient() -> list[float]:
    x = torch.ones(3, requires_grad=True)
    torch.autograd.backward((x * x).sum())
    assert x.grad is not None
    return [float(value) for value in x.grad]


def test_ranks_can_differentiate_after_the_parent_has() -> None:
    assert sum_of_squares_gradient() == [2.0] * 3
    assert run_forked(2, sum_of_squares_gradient) == [[2.0] * 3] * 2


def test_answers_are_data_only() -> None:
    with pytest.raises(Exception, match="weights_only|Weights only|Unsupported"):
        run_forked(1, RankFailed)
