"""Whatever ends the job: every file is whole or absent, and readers open what is there."""

import contextlib
import gc
import json
import os
import random
import resource
import signal
import time

import pyarrow.parquet as pq
import pytest

from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import RunError, open_run
from tests.jobs.trust.jobs import flags, killed_at_operation, killed_at_random, plain, probe_file, started_quietly
from tests.support.forked import RankFailed, run_forked

pytestmark = pytest.mark.trust

KILLS = int(os.environ.get("MSPROBE_KILLS", "20"))
BY_CLOCK = KILLS // 4
TERMS = max(3, KILLS // 5)
PROBE = "dump: {level: L0, task: tensor}\nmonitor: {every: 2, alerts: [{rule: limit, threshold: 1.0e-9}]}\n"


def readable(out, *, told=True):
    """Every file that has its final name is whole; returns the steps that were found."""
    for path in out.rglob("*"):
        if path.suffix == ".json" and path.stat().st_size:
            json.loads(path.read_text())
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            assert table.num_rows > 0
            sites = path.name != "records.parquet" or (path.parent / "sites.json").is_file()
            assert sites, "rows without the stacks that they point to"
    try:
        run = open_run(out)
    except RunError as reason:
        assert "run.json" in str(reason) or "not a directory" in str(reason)
        return []
    summary = summarise(run)
    assert summary.warnings or not told, "a killed job is told"
    return summary.steps


@pytest.fixture(scope="module")
def longest(tmp_path_factory):
    """Twice the seconds until three steps are on disk here: kills then fall before, into and between the writing."""
    folder = tmp_path_factory.mktemp("measured")
    _, seconds = killed_late(flags(400, probe_file(folder), folder / "out"), folder / "out", signal.SIGKILL)
    return 2 * seconds


def test_kill_at_random_file_operations_leaves_whole_files(tmp_path):
    """Where it can hurt most: between any two steps of making a file."""

    def argv(folder):
        folder.mkdir()
        return flags(4, probe_file(folder, PROBE), folder / "out")

    assert killed_at_operation(argv(tmp_path / "all"), None, tmp_path / "count") == 0
    operations = int((tmp_path / "count").read_text())
    ends, found = [], []
    for number in range(KILLS - BY_CLOCK):
        folder = tmp_path / str(number)
        chosen = random.Random(number).randint(1, operations)
        ends.append(killed_at_operation(argv(folder), chosen, tmp_path / "count"))
        found.append(len(readable(folder / "out", told=ends[-1] != 0)))
    killed = ends.count(-signal.SIGKILL)
    print(f"{killed} kills at file operations survived, of {operations}; steps found: {sorted(found)}")
    assert killed >= 0.8 * len(ends) and set(ends) <= {0, -signal.SIGKILL}  # the last few may never come
    assert len(set(found)) > 2, found


def test_kill_at_random_moments_leaves_whole_files(tmp_path, longest):
    found = []
    for number in range(BY_CLOCK):
        folder = tmp_path / str(number)
        folder.mkdir()
        argv = flags(4000, probe_file(folder), folder / "out")
        assert killed_at_random(argv, seed=number, longest=longest) == -signal.SIGKILL
        found.append(len(readable(folder / "out")))
    print(f"{BY_CLOCK} kills at random moments survived; steps found: {sorted(found)}")


def test_sigterm_leaves_whole_files(tmp_path, longest):
    for number in range(TERMS):
        folder = tmp_path / str(number)
        folder.mkdir()
        argv = flags(4000, probe_file(folder), folder / "out")
        assert killed_at_random(argv, 1000 + number, longest, signal.SIGTERM) == -signal.SIGTERM
        readable(folder / "out")


def test_a_handler_that_exits_on_sigterm_closes_the_run(tmp_path):
    """What Megatron's --exit-signal-handler and most schedulers' scripts do: the steps that wait are written."""
    out = tmp_path / "out"
    before = signal.signal(signal.SIGTERM, lambda *_: exit(7))
    try:
        code, _ = killed_late(flags(40000, probe_file(tmp_path), out), out, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert code == 7
    steps = readable(out, told=False)
    assert steps == list(range(len(steps))) and len(steps) > 2
    assert open_run(out).ranks[0]["closed"]


def killed_late(argv, out, how):
    """A signal when three steps are on disk; how the process ended, and the seconds it took until then."""
    started = time.monotonic()
    pid = started_quietly(argv)
    while not list(out.glob("step_000002/rank_00000/records.parquet")):
        time.sleep(0.01)
    seconds = time.monotonic() - started
    os.kill(pid, how)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seconds


def train_with_little_memory(argv, spare, what):
    """After the first step, `spare` bytes of address space (or data) are left: it ends, or fails as they run out."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    limit, hard = getattr(resource, what), resource.RLIM_INFINITY
    held = []

    def after(step):
        if step.iteration == 1:
            gc.collect()
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0 if what == "RLIMIT_AS" else 5]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(limit, (used + spare, hard))
        if spare < 100 << 20:  # memory that the allocator has kept for later runs out too
            for size in (1 << 20, 1 << 16, 1 << 13):
                with contextlib.suppress(MemoryError):
                    while True:
                        held.append(bytearray(size))
            del held[-step.iteration * 8 :]

    losses = []
    try:
        losses = run(argv, Callbacks(step=after)).losses
    except (MemoryError, RuntimeError, OSError) as error:
        return {"losses": losses, "error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        resource.setrlimit(limit, (resource.RLIM_INFINITY, hard))
    return {"losses": losses, "error": ""}


def closed(out):
    """Whether the run itself was over: what ran out of memory after it is no loss."""
    try:
        return open_run(out).ranks[0]["closed"]
    except (RunError, KeyError):
        return False


@pytest.mark.parametrize("what", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_out_of_memory(tmp_path, what):
    """From nothing to plenty: whether host, kit or process gives up first, files are whole and no loss changes."""
    (expected,) = plain(12)
    ends = {}
    for spare in (0, 2, 400):
        folder = tmp_path / str(spare)
        folder.mkdir()
        argv = flags(12, probe_file(folder, "dump: {level: mix, task: tensor}\n"), folder / "out")
        with contextlib.suppress(RankFailed):  # killed by the allocator: only the files are left to look at
            (found,) = run_forked(1, train_with_little_memory, argv, spare << 20, what, timeout=60)
            ends[spare] = found["error"] or "trained"
            if not found["error"]:
                assert found["losses"] == expected["losses"]
        readable(folder / "out", told=spare not in ends and not closed(folder / "out"))
    print(f"{what}: {ends}")
    assert ends[400] == "trained"
    assert any(end != "trained" for end in ends.values()) or len(ends) < 3, "no limit was ever reached"


def train_until_a_rank_dies(argv):
    """Rank 1 is gone, without a word, after the forward of step 2; rank 0 finds out when it waits for it."""
    from msprobe_megatron.job.session.patch_scopes import ROUTER
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    def during(iteration):
        if iteration == 3 and os.environ["RANK"] == "1":
            for session in ROUTER.sessions():
                session.writer.flush(60)  # steps that are finished
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        run(argv, Callbacks(gradients=during))
    finally:
        if os.environ["RANK"] == "0":
            (argv_out(argv) / "rank_0_ended").write_text("")


def argv_out(argv):
    from pathlib import Path

    return Path(argv[argv.index("--msprobe-output") + 1]).parent


@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--use-distributed-optimizer"]
)
def test_a_rank_that_dies_while_others_record(tmp_path, layout):
    argv = flags(6, probe_file(tmp_path), tmp_path / "out", layout)
    with pytest.raises(RankFailed):
        run_until_all_ended(argv, tmp_path)
    steps = readable(tmp_path / "out")
    assert {0, 1} <= set(steps)
    run = open_run(tmp_path / "out")
    assert run.ranks[0]["closed"] and not run.ranks[1]["closed"]
    warnings = summarise(run).warnings
    assert any("rank 1: the job ended without closing the run" in text for text in warnings)
    for step in (0, 1):
        assert sorted(rank for number, rank, _ in run.files if number == step) == [0, 1]
    if 2 in steps:
        assert any("step 2: no rows from ranks [1]" in text for text in warnings)


def run_until_all_ended(argv, folder):
    """`run_forked` kills the others as soon as one fails; here rank 0 is given the time to find out by itself."""
    from tests.support import forked

    original = forked._Job._failure

    def patient(self, rank):
        for _ in range(600):
            if (folder / "rank_0_ended").exists():
                break
            time.sleep(0.05)
        return original(self, rank)

    forked._Job._failure = patient
    try:
        run_forked(2, train_until_a_rank_dies, argv, timeout=60)
    finally:
        forked._Job._failure = original
