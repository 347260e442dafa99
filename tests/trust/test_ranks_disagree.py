"""Ranks that are not armed alike never wait for each other: no collective, no barrier, no handshake."""

import os

import pytest

from msprobe_megatron.analyse.load import open_run
from tests.forked import run_forked
from tests.trust.jobs import flags, plain, probe_file, train

pytestmark = pytest.mark.trust
TP2 = "--tensor-model-parallel-size 2"


def train_differently(with_kit, other):
    """Rank 0 trains with one command line, rank 1 with another."""
    argv = with_kit if os.environ["RANK"] == "0" else other
    return {"losses": train(argv)["losses"]}


def test_one_rank_without_the_kit(tmp_path):
    (expected, _) = plain(4, TP2, world=2)
    armed = flags(4, probe_file(tmp_path), tmp_path / "out", TP2)
    found = run_forked(2, train_differently, armed, flags(4, extra=TP2), timeout=60)
    assert [each["losses"] for each in found] == [expected["losses"]] * 2
    run = open_run(tmp_path / "out")
    assert sorted({rank for _, rank, _ in run.files}) == [0]


def test_ranks_with_different_probe_files(tmp_path):
    (expected, _) = plain(4, TP2, world=2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = flags(4, probe_file(tmp_path / "a", "steps: [1]\ndump: {level: L0}\n"), tmp_path / "out", TP2)
    second = flags(4, probe_file(tmp_path / "b", "steps: [2, 3]\ndump: {level: L0}\n"), tmp_path / "out", TP2)
    found = run_forked(2, train_differently, first, second, timeout=60)
    assert [each["losses"] for each in found] == [expected["losses"]] * 2
    run = open_run(tmp_path / "out")
    assert sorted((step, rank) for step, rank, _ in run.files) == [(1, 0), (2, 1), (3, 1)]
    assert run.problems, "steps that only some ranks have are told"
