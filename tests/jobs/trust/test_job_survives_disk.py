"""A disk that is full, forbidden, gone or slow: training goes on with the same bits, and the loss is told."""

import os
import resource
import shutil
import subprocess

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.run_directory.directory import RunDirectoryError
from tests.jobs.trust.jobs import flags, on_disk, plain, probe_file, same, train, trained
from tests.support.forked import run_forked

pytestmark = pytest.mark.trust
STEPS = 12


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
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def train_with_quota(argv):
    return train(argv, limit_file_size)


def test_quota(tmp_path, expected):
    out = tmp_path / "out"
    (found,) = run_forked(1, train_and_forget_quota, flags(STEPS, probe_file(tmp_path), out))
    assert found["losses"] == expected["losses"]
    whole(out)
    # By the ledger of the rank, or by an event where that file was too large as well.
    said = ("internal error in writer", "fault: writer")
    assert any(part in text for text in summarise(open_run(out)).warnings for part in said)


def train_and_forget_quota(argv):
    # The result of the rank is a file as well: only small ones can leave it.
    return {"losses": train_with_quota(argv)["losses"]}


def train_and_remove(argv, out):
    """The output directory is deleted while the job runs."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    def after(step):
        while step.iteration == 4 and os.path.exists(out):
            shutil.rmtree(out, ignore_errors=True)  # the writer may be making a directory in it just now

    return trained(run(argv, Callbacks(step=after)))


def test_directory_removed_under_way(tmp_path, expected):
    out = tmp_path / "out"
    (found,) = run_forked(1, train_and_remove, flags(STEPS, probe_file(tmp_path), out), str(out))
    same(found, expected)


def train_on_a_disk_that_turns_read_only(argv, out):
    """From step 4 on nothing below the output can be made or opened for writing."""
    import errno

    from msprobe_megatron.job.session.patch_scopes import ROUTER
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def refusing(call, refuses):
        def wrapped(*args, **kwargs):
            if refuses(*args):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(args[0]))
            return call(*args, **kwargs)

        return wrapped

    def after(step):
        if step.iteration == 4:
            for session in ROUTER.sessions():
                session.writer.flush(60)
            os.open = refusing(os.open, lambda path, flags=0, *_: flags & changing)
            for name in ("mkdir", "rename", "replace", "link"):
                setattr(os, name, refusing(getattr(os, name), lambda *_: True))

    return {"losses": run(argv, Callbacks(step=after)).losses, "open": "refusing" in os.open.__qualname__}


def test_read_only_under_way(tmp_path, expected):
    out = tmp_path / "out"
    (found,) = run_forked(1, forget_read_only, flags(STEPS, probe_file(tmp_path), out), str(out))
    assert found["losses"] == expected["losses"] and found["open"]
    whole(out)
    summary = summarise(open_run(out))
    assert summary.steps == [0, 1, 2, 3]
    # Events and ledgers are on the same disk: what is left says that it is not all.
    assert any("without closing the run" in text or "fault" in text for text in summary.warnings), summary.warnings


def forget_read_only(argv, out):
    # The result of the rank is a file as well.
    kept = {name: getattr(os, name) for name in ("open", "mkdir", "rename", "replace", "link")}
    try:
        return train_on_a_disk_that_turns_read_only(argv, out)
    finally:
        for name, call in kept.items():
            setattr(os, name, call)


def train_with_a_writer_that_is_too_slow(argv, how):
    """A disk that takes a file only when training cannot go on without: no disk is slower. The amounts that waited.

    With ``MSPROBE_SOAK_STEPS`` each write takes as long as 100 steps instead.
    """
    import errno
    import threading
    import time

    from msprobe_megatron.job.record.writer import Writer
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks
    from msprobe_megatron.run_directory.directory import RunDirectory

    write, submit, make_room, close = RunDirectory.write_table, Writer.submit, Writer._make_room, Writer.close
    held, largest, took, written = [0], [0], [60.0], [0]
    soak, needed = "MSPROBE_SOAK_STEPS" in os.environ, threading.Event()

    def slow(self, *args, **kwargs):
        if soak:
            time.sleep(min(60.0, 100 * took[0]))
        else:
            needed.wait(60)
        written[0] += 1
        if how == "EIO" and written[0] > 3:
            raise OSError(errno.EIO, "Input/output error")
        return write(self, *args, **kwargs)

    def room(self, size):
        if self._held_bytes and self._held_bytes + size > self._limit:
            needed.set()
        found = make_room(self, size)
        if not self._closing:
            needed.clear()
        return found

    def watched(self, batch):
        largest[0] = max(largest[0], batch.nbytes)
        done = submit(self, batch)
        held[0] = max(held[0], self._held_bytes)
        return done

    def last(self, *args):
        self._closing = True
        needed.set()
        return close(self, *args)

    def after(step):
        took[0] = min(took[0], step.seconds)  # a step that did not wait

    if how != "fast":
        RunDirectory.write_table, Writer._make_room, Writer.close = slow, room, last
    Writer.submit = watched
    found = trained(run(argv, Callbacks(step=after)))
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "held": held[0], "largest": largest[0], "resident": resident}


def test_memory_stays_bounded_when_the_writer_is_100_times_too_slow(tmp_path, expected):
    """Training waits for room in the queue: it loses nothing and never holds more than the limit allows. The same with
    a slow disk that then fails: what waited is dropped and counted, and training waits no more."""
    limit = 2 << 20
    config = probe_file(tmp_path, f"limits: {{host_memory: {limit}}}\ndump: {{level: L0}}\n")
    ends = {}
    for how in ("fast", "slow", "EIO"):
        argv = flags(STEPS, config, tmp_path / how)
        (ends[how],) = run_forked(1, train_with_a_writer_that_is_too_slow, argv, how, timeout=1200)
        same(ends[how], expected)
        amounts = {key: ends[how][key] for key in ("held", "largest", "resident")}
        print(f"{how} writer: {amounts} of {limit // 2} bytes allowed to wait")
    for how in ("slow", "EIO"):
        assert ends[how]["largest"] < ends[how]["held"] <= limit // 2, ends
        assert ends[how]["resident"] - ends["fast"]["resident"] < 4 * limit, "memory outside the queue grows"
    assert ends["slow"]["held"] > limit // 2 - ends["slow"]["largest"], "the queue was never full"
    assert summarise(open_run(tmp_path / "slow")).steps == list(range(STEPS))
    failed = summarise(open_run(tmp_path / "EIO"))
    assert failed.steps == [0, 1, 2]
    assert any("Input/output error" in text for text in failed.warnings)
    counts = open_run(tmp_path / "EIO").ranks[0]["ledger"]["written"]
    assert counts["steps_written"] == 3 and counts["steps_dropped"] >= 1


def test_the_disk_limit_holds_to_within_one_step(tmp_path, expected):
    (found,) = run_forked(1, train, flags(STEPS, probe_file(tmp_path), tmp_path / "whole"))
    same(found, expected)
    whole_size = on_disk((tmp_path / "whole").glob("step_*/*/*"))
    step = max(path.stat().st_size for path in (tmp_path / "whole").glob("step_*/*/records.parquet"))
    limit = whole_size // 2
    text = f"limits: {{disk: {limit}}}\ndump: {{level: L0}}\n"
    (found,) = run_forked(1, train, flags(STEPS, probe_file(tmp_path, text), tmp_path / "limited"))
    same(found, expected)
    size = on_disk((tmp_path / "limited").glob("step_*/*/*"))
    assert limit - 2 * step <= size <= limit, (size, limit, step)
    counts = open_run(tmp_path / "limited").ranks[0]["ledger"]["written"]
    assert counts["steps_written"] + counts["steps_dropped"] == STEPS and counts["steps_dropped"] > 0
    assert any("limits.disk" in text for text in summarise(open_run(tmp_path / "limited")).warnings)


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
