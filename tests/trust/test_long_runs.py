"""Recording step after step leaves nothing behind in the process."""

import gc
import os

import pytest

from tests.forked import run_forked
from tests.trust.jobs import flags, probe_file

pytestmark = pytest.mark.trust

STEPS = int(os.environ.get("MSPROBE_SOAK_STEPS", "120"))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train_and_count(argv, warm_up):
    """Open files, live objects and resident memory after the warm-up and at the end."""
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks
    from msprobe_megatron.dispatch import DISPATCHER

    seen = []

    def after(step):
        if step.iteration in (warm_up, STEPS):
            for session in set(DISPATCHER.sessions()):
                session.writer.flush(60)  # rows that wait for the disk are not what a step leaves behind
            gc.collect()
            seen.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects()), resident()))

    run(argv, Callbacks(step=after))
    return seen


def test_files_and_objects_stay_flat(tmp_path):
    warm_up = STEPS // 2
    ((first, last),) = run_forked(
        1, train_and_count, flags(STEPS, probe_file(tmp_path), tmp_path / "out"), warm_up, timeout=1200
    )
    steps = STEPS - warm_up
    assert last[0] <= first[0] + 1, "file handles grow"
    # The script itself keeps a record of every step; the kit keeps its number.
    assert (last[1] - first[1]) / steps <= 2, f"{(last[1] - first[1]) / steps:.1f} objects a step stay"
    print(f"resident memory: {(last[2] - first[2]) / steps / 1024:.2f} KiB a step over {steps} steps")
