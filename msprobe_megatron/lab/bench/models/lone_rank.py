"""One rank of a layout in a process of its own, without the others: what it holds is as large as in the whole job.

Its process groups have all ranks, and communication returns at once: sizes are those of a real job, numbers are not.
For what is a matter of shapes alone, such as the volume of a dump.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed


@contextlib.contextmanager
def lone_rank(rank: int, world: int) -> Iterator[None]:
    """A context in which a job that starts believes to be one of many."""
    if world == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    from msprobe_megatron.job import devices

    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise BenchFailed(f"the sizes of a layout need torch with a fake process group: {error}") from error
    if devices.select().name == "cpu":
        devices.megatron_on_cpu.install()  # before the functions below take the place of its own
    start, group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        start("fake", rank=rank, world_size=world, store=FakeStore())

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return group(ranks, timeout, "fake", *args, **kwargs)

    # Their handle has a `wait` of its own, which nobody who watches communication would hear of.
    work = getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dist.Work.wait(self, *args, **kwargs)

    heard = mock.patch.object(work, "wait", wait) if work is not dist.Work else contextlib.nullcontext()
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    with (
        heard,
        mock.patch.dict(os.environ, place),
        mock.patch.multiple(dist, init_process_group=init_process_group, new_group=new_group),
        mock.patch.multiple(dist.distributed_c10d, init_process_group=init_process_group, new_group=new_group),
    ):
        yield
