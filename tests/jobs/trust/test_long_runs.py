"""Recording step after step leaves nothing behind in the process, and takes the disk that a step takes.

`everything.yaml` has every part of the kit on; a new part is one more line there.
"""

import contextlib
import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.trust.jobs import EVERYTHING, flags, on_disk, probe_file
from tests.support.forked import run_forked

pytestmark = pytest.mark.trust

SOAK = "MSPROBE_SOAK_STEPS" in os.environ
STEPS = int(os.environ.get("MSPROBE_SOAK_STEPS", "60"))
PROBES = {"dump": "dump: {level: L0}\n", "everything": EVERYTHING}
# A short run still grows towards its plateau: caches, buffers of the allocator.
_SLOPE = 256 * 1024
_SOAK_SLOPE = 1024
# Statistics compress a little better or worse from step to step.
_MARGIN = 0.1


def resident():
    """Resident bytes, without what the allocators hold in reserve."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_and_count(argv, out):
    """Open files, live objects, and bytes on disk at the middle, three quarters and the end; memory on the way."""
    from msprobe_megatron.job.session.patch_scopes import ROUTER
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    seen, memory = [], []

    def after(step):
        if step.iteration > STEPS // 2 and step.iteration % max(1, STEPS // 100) == 0:
            for session in set(ROUTER.sessions()):
                session.writer.flush(60)
            memory.append((step.iteration, resident()))
        if step.iteration in (STEPS // 2, 3 * STEPS // 4, STEPS):
            for session in set(ROUTER.sessions()):
                for part in session.features.all:  # what waits until a file is full is not what a step leaves behind
                    getattr(part, "_submit", getattr(part, "_hand_over", lambda: None))()
                session.writer.flush(60)  # rows that wait for the disk are not what a step leaves behind
            gc.collect()
            disk = sum(path.stat().st_size for path in Path(out).glob("step_*/*/*"))
            seen.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects()), disk))

    run(argv, Callbacks(step=after))
    return seen, memory


def as_announced(out):
    """What was said after the first step, and after the monitor's first file, against what is there in the end."""
    ledger = open_run(out).ranks[0]["ledger"]
    parts = {"dump": (ledger["announced"], on_disk(out.glob("step_*/*/*")))}
    if "monitor" in ledger:
        parts["monitor"] = (ledger["monitor"]["announced"], on_disk(out.glob("monitor/*/*")))
    for part, (announced, found) in parts.items():
        assert announced["steps"] == STEPS, part
        print(f"{part}: announced {announced['bytes']:,} bytes, found {found:,}")
        assert abs(found - announced["bytes"]) <= _MARGIN * announced["bytes"], f"{part}: {found} against {announced}"


@pytest.mark.parametrize("name", PROBES)
def test_nothing_grows(tmp_path, name):
    out = tmp_path / "out"
    argv = flags(STEPS, probe_file(tmp_path, PROBES[name]), out)
    (((middle, later, last), memory),) = run_forked(1, train_and_count, argv, str(out), timeout=3600)
    steps = STEPS - STEPS // 2
    assert open_run(out).ranks[0]["ledger"]["faults"] == []
    assert last[0] <= middle[0] + 1, "file handles grow"
    # The script itself keeps a record of every step; each part of the kit keeps its number.
    objects = (last[1] - middle[1]) / steps
    assert objects <= 4, f"{objects:.1f} objects a step stay"
    # By least squares: the monitor's rows of many steps wait for their file, so that memory goes up and down.
    slope = float(np.polyfit(*np.array(memory, np.float64).T, 1)[0])
    print(f"{name}: {slope / 1024:.2f} KiB resident and {objects:.2f} objects a step over {steps} steps")
    assert slope <= (_SOAK_SLOPE if SOAK else _SLOPE), f"{slope / 1024:.2f} KiB a step stay"
    first, second = later[2] - middle[2], last[2] - later[2]
    assert abs(first - second) <= 0.1 * first, "size on disk is not linear in the number of steps"
    as_announced(out)
