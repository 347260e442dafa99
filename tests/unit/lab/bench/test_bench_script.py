"""scripts/bench_peer.sh: a document out of one command, parts that are there are not measured again, sentences."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]


def script(*words):
    env = {**os.environ, "MSPROBE_PYTHON": sys.executable}
    command = ["bash", str(ROOT / "scripts/bench_peer.sh"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)


def test_a_part_is_measured_once_and_the_document_is_written_beside_it(tmp_path):
    committed = (ROOT / "BENCHMARKS.md").read_text()
    first = script("--quick", tmp_path / "out", "counts")
    assert first.returncode == 0, first.stderr
    assert "== counts (1 of 1, about 1 minutes left)" in first.stderr
    text = (tmp_path / "out/BENCHMARKS.md").read_text()
    assert "| counts dump L0 host synchronisations | 0 | ≤ 1 | met |" in text
    assert "## What can be counted" in text
    again = script("--quick", tmp_path / "out", "counts")
    assert again.returncode == 0
    assert "== counts: is in" in again.stderr and "took" not in again.stderr
    # A table of one turn does not stand in for a whole one.
    whole = script(tmp_path / "out", "counts")
    assert whole.returncode == 0
    assert "== counts took" in whole.stderr
    # Neither few turns nor a choice of parts may stand in the place of the whole.
    assert (ROOT / "BENCHMARKS.md").read_text() == committed


def test_a_part_that_fails_is_named_and_the_rest_is_written(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/runs").write_text("in the way")
    done = script(tmp_path / "out", "counts")
    assert done.returncode == 1
    assert "failed: counts; the same command tries them again" in done.stderr
    assert "out/runs/counts: Not a directory" in done.stderr


def test_words_that_make_no_sense_are_refused_with_the_usage(tmp_path):
    for words in (["--turns"], ["--turns", "0"], ["--turns", "x"], ["--fast"], [tmp_path / "out", "dumps"]):
        done = script(*words)
        assert done.returncode == 2
        assert "bash scripts/bench_peer.sh [--quick | --turns N]" in done.stderr
    assert not (tmp_path / "out").exists()
