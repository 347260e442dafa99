"""A disk that is full, forbidden, gone or slow: training goes on with the same bits, and the loss is told."""

import os
import resource
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest
import torch

from msprobe_megatron.analyse.load import open_run
from msprobe_megatron.analyse.summary import summarise
from msprobe_megatron.record.directory import RunDirectoryError
from tests.forked import run_forked
from tests.trust.jobs import flags, plain, probe_file, train

pytestmark = pytest.mark.trust
STEPS = 12


def same(left, right):
    assert left["losses"] == right["losses"]
    assert all(torch.equal(a, b) for a, b in zip(left["parameters"], right["parameters"], strict=True))


@pytest.fixture(scope="module")
def expected():
    return plain(STEPS)[0]


def whole(out):
    for path in out.rglob("*.parquet"):
        assert pq.read_table(path).num_rows > 0


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"FULL DISK NOT TESTED: cannot mount a small file system: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk(tmp_path, small_disk, expected):
    out = small_disk / "out"
    (found,) = run_forked(1, train, flags(STEPS, probe_file(tmp_path), out))
    same(found, expected)
    whole(out)
    # The disk is full for events and ledgers too; what is there still opens and says that it is not all.
    assert summarise(open_run(out)).warnings


def limit_file_size():
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))


def train_with_quota(argv):
    return train(argv, limit_file_size)


def test_quota(tmp_path, expected):
    out = tmp_path / "out"
    (found,) = run_forked(1, train_and_forget_quota, flags(STEPS, probe_file(tmp_path), out))
    assert found["losses"] == expected["losses"]
    whole(out)
    assert any("fault" in text for text in summarise(open_run(out)).warnings)


def train_and_forget_quota(argv):
    # The result of the rank is a file as well: only small ones can leave it.
    return {"losses": train_with_quota(argv)["losses"]}


def train_and_remove(argv, out):
    """The output directory is deleted while the job runs."""
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks

    def after(step):
        while step.iteration == 4 and os.path.exists(out):
            shutil.rmtree(out, ignore_errors=True)  # the writer may be making a directory in it just now

    result = run(argv, Callbacks(step=after))
    return {"losses": result.losses, "parameters": [p.detach().clone() for c in result.chunks for p in c.parameters()]}


def test_directory_removed_under_way(tmp_path, expected):
    out = tmp_path / "out"
    (found,) = run_forked(1, train_and_remove, flags(STEPS, probe_file(tmp_path), out), str(out))
    same(found, expected)


def train_with_writer(argv, what):
    """A writer that is slow, or whose disk answers with an input/output error."""
    import errno
    import time

    from msprobe_megatron.record.directory import RunDirectory

    original = RunDirectory.write_table

    def slow(self, *args, **kwargs):
        time.sleep(0.2)
        return original(self, *args, **kwargs)

    def broken(self, *args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    RunDirectory.write_table = slow if what == "slow" else broken
    return train(argv)


def train_with_a_writer_that_is_too_slow(argv, longest):
    """Each write takes as long as 100 steps, `longest` seconds at most; the largest amounts that waited."""
    import time

    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks
    from msprobe_megatron.record.directory import RunDirectory
    from msprobe_megatron.record.writer import Writer

    write, submit, held, largest, took = RunDirectory.write_table, Writer.submit, [0], [0], [longest]

    def slow(self, *args, **kwargs):
        time.sleep(min(longest, 100 * took[0]))
        return write(self, *args, **kwargs)

    def watched(self, batch):
        largest[0] = max(largest[0], batch.nbytes)
        done = submit(self, batch)
        held[0] = max(held[0], self._held_bytes)
        return done

    def after(step):
        took[0] = min(took[0], step.seconds)  # a step that did not wait

    RunDirectory.write_table, Writer.submit = slow, watched
    losses = run(argv, Callbacks(step=after)).losses
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"losses": losses, "held": held[0], "largest": largest[0], "resident": resident}


def test_memory_stays_bounded_when_the_writer_is_100_times_too_slow(tmp_path, expected):
    """Training waits for room in the queue: it loses nothing and never holds more than the limit allows."""
    limit = 2 << 20
    longest = 60.0 if "MSPROBE_SOAK_STEPS" in os.environ else 0.4
    config = probe_file(tmp_path, f"limits: {{host_memory: {limit}}}\ndump: {{level: L0}}\n")
    ends = {}
    for name, seconds in (("slow", longest), ("fast", 0.0)):
        argv = flags(STEPS, config, tmp_path / name)
        (ends[name],) = run_forked(1, train_with_a_writer_that_is_too_slow, argv, seconds, timeout=60 + 20 * seconds)
    slow = ends["slow"]
    assert slow["losses"] == expected["losses"]
    assert slow["largest"] < slow["held"] <= limit // 2, ends
    assert slow["resident"] - ends["fast"]["resident"] < 4 * limit, "memory outside the queue grows"
    assert summarise(open_run(tmp_path / "slow")).steps == list(range(STEPS))


@pytest.mark.parametrize("what", ["slow", "EIO"])
def test_slow_and_failing_writer(tmp_path, expected, what):
    out = tmp_path / "out"
    (found,) = run_forked(1, train_with_writer, flags(STEPS, probe_file(tmp_path), out), what)
    same(found, expected)
    summary = summarise(open_run(out))
    if what == "slow":
        assert summary.steps == list(range(STEPS)), "a slow disk loses nothing while the queue has room"
    else:
        assert any("Input/output error" in text for text in summary.warnings)


def refused(argv):
    try:
        train(argv)
    except SystemExit as end:
        return {"code": end.code}
    return {"code": None}


def test_output_that_cannot_be_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "link"):
        (found,) = run_forked(1, refused, flags(1, probe_file(tmp_path), out))
        assert found["code"] == 2, out
    assert issubclass(RunDirectoryError, Exception)
