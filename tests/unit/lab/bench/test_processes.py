"""A bench over several processes: one table, sums over ranks, the slowest rank's training time."""

import json
import os
import subprocess
import sys

import pytest

from msprobe_megatron.lab.bench.clockwork import processes
from msprobe_megatron.lab.bench.clockwork.memory import PeakMemory
from msprobe_megatron.lab.bench.clockwork.paired import spread
from msprobe_megatron.lab.bench.clockwork.processes import run_ranks, together
from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed, Turns, Workload, size_of
from msprobe_megatron.report.terminal.bench import bars, markdown


def line(name, seconds, training, rows, ratio=1.0):
    return {
        **{"name": name, "ratio": ratio, "training_ratio": training, "median_s": seconds, "spread": 0.1},
        **{"peak_bytes": 10, "memory_ratio": 1.0, "bytes": 5, "files": 2, "rows": rows, "microseconds": None},
        **{"extra_bytes": 0, "least_ratio": 1.0, "uncertainty": 0.01},
    }


def test_ranks_are_added_up():
    first = [line("plain", 1.0, 1.0, 0), line("L0", 2.0, 1.5, 10, 2.0)]
    second = [line("plain", 3.0, 1.0, 0), line("L0", 4.5, 1.9, 11, 1.4)]
    plain, recorded = together([first, second])
    assert (plain["median_s"], plain["ratio"]) == (4.0, 1.0)
    # One second of the first rank and three of the other become two and 4.2.
    assert (recorded["median_s"], recorded["training_ratio"]) == (6.5, 1.9)
    assert recorded["ratio"] == pytest.approx((2.0 + 4.2) / 4)
    assert (recorded["rows"], recorded["ranks"], recorded["bytes"]) == (21, 2, 5)


def test_two_processes_through_the_command(tmp_path):
    command = [sys.executable, "-m", "msprobe_megatron.cli", "bench", "dump", "--json", "--only", "h64", "--turns", "1"]
    done = subprocess.run(
        [*command, "--ranks", "2", "--out", str(tmp_path)], capture_output=True, text=True, check=True, timeout=600
    )
    report = json.loads(done.stdout)
    results = {found["name"]: found for found in report["results"]}
    assert results["h64:L0"]["ranks"] == 2
    one, two = (json.loads((tmp_path / f"runs/dump_h64/h64_task_rank_{rank}.json").read_text()) for rank in (0, 1))
    assert results["h64:L0"]["rows"] == one[2]["rows"] + two[2]["rows"] > 0
    assert report["machine"]["cores"] >= 1
    assert (tmp_path / "dump_h64.svg").read_text().count("<rect") == 1 + len(results)
    assert (tmp_path / "dump_h64.md").read_text().startswith("| ")


def test_peak_memory_sees_what_is_gone():
    memory = PeakMemory()
    memory.reset()
    before = memory.peak()
    if not before:
        pytest.skip("this kernel does not tell the peak")
    block = bytearray(64 << 20)
    for at in range(0, len(block), 4096):
        block[at] = 1
    del block
    assert 48 << 20 < memory.peak() - before < 90 << 20


def test_spread_and_size(tmp_path):
    assert spread([1.0]) == 0.0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(1.0)
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"4567")
    assert size_of(tmp_path) == (7, 2)


def test_size_beside_a_rank_that_still_writes(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"123")
    (tmp_path / "renamed.tmp").write_bytes(b"45")
    look = os.lstat

    def too_late(path, **more):
        (tmp_path / "renamed.tmp").unlink(missing_ok=True)
        return look(path, **more)

    monkeypatch.setattr(os, "lstat", too_late)
    assert size_of(tmp_path) == (3, 1)


def test_ranks_that_fail_are_named_with_their_last_words(monkeypatch):
    """The first to end first; one that says more than a pipe holds and one that never ends hold nobody up."""
    program = (
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "sys.stderr.write('x' * 200_000 + f' words of rank {rank}')\n"
        "sys.stderr.flush()\n"
        "time.sleep((600, 1, 0, 0)[rank])\n"
        "sys.exit((0, 5, 7, 0)[rank])\n"
    )
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 3)
    with pytest.raises(BenchFailed) as raised:
        run_ranks([sys.executable, "-c", program], 4, "bench")
    text = str(raised.value)
    ends = ("rank 2 ended with 7", "rank 1 ended with 5", "rank 0 did not end")
    assert [text.index(end) for end in ends] == sorted(text.index(end) for end in ends)
    assert "words of rank 1" in text
    assert "words of rank 3" not in text


def test_what_ranks_do_in_turn_depends_on_no_clock(monkeypatch, tmp_path):
    """Ranks whose clocks run at different speeds attach the same variants before the same steps."""

    def script(second):
        turns, attached, clock = Turns(Workload("w", "", 3, 2, 1), {"a": {}, "b": {}}, tmp_path), [], [0.0]

        def now():
            clock[0] += second
            return clock[0]

        for name in ("process_time", "thread_time"):
            monkeypatch.setattr(f"msprobe_megatron.lab.bench.clockwork.turns.time.{name}", now)
        monkeypatch.setattr(turns, "_attach", lambda name, turn: attached.append((step, name, turn)))
        step = -1
        turns.ready(None, None)
        for step in range(turns.iterations):
            turns.after_step()
        return attached

    slow = script(1000.0)
    assert slow == script(1e-9)
    assert len(slow) == 2 * (3 + 3)  # three turns for memory and three; no tool at all attaches nothing


def test_picture_and_table_show_target_and_peer():
    lines = [{"name": "h64:<L0>", "ratio": 1.8, "target": 1.5, "peer_ratio": 5.6}, {"name": "ok", "ratio": 1.0}]
    picture = bars(lines, "a & b")
    assert "&lt;L0&gt;" in picture
    assert "a &amp; b" in picture
    assert "#c2571a" in picture  # over its target
    assert "msprobe 5.6" in picture
    machine = {"processor": "p", "cores": 2, "memory_bytes": 1 << 30, "device": "cpu", "load": 0.5, "system": "s"}
    text = markdown({"results": lines, "about": "why", "machine": machine})
    assert "| h64:<L0> | 1.800 | 1.5 | 5.60 |" in text
