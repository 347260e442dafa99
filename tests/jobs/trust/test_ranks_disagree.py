"""Ranks that are not armed alike never wait for each other: no collective, no barrier, no handshake."""

import contextlib
import io
import os

import pytest

from msprobe_megatron.analysis.diagnose.summary import summarise
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.trust.jobs import flags, plain, probe_file, train
from tests.support.forked import run_forked

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
    assert any("their probe file differs" in text for text in summarise(run).warnings)


# A directory that holds a run, met by ranks that the earlier job did not have.


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(argv):
    """Exit code and last words of a rank whose job does not start."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            train(argv)
    except SystemExit as end:
        return {"code": end.code, "stderr": said.getvalue()}
    return {"code": None, "stderr": said.getvalue()}


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_restart_with_another_number_of_ranks_is_refused_by_every_rank(tmp_path, first, then):
    config = probe_file(tmp_path, "steps: [0]\ndump: {level: L0}\n")
    argv = flags(2, config, tmp_path / "out")
    run_forked(first, train_quietly, argv)
    before = files(tmp_path / "out")
    found = run_forked(then, refused, argv, timeout=60)
    assert [each["code"] for each in found] == [2] * then
    assert "already holds a run" in found[0]["stderr"]
    assert files(tmp_path / "out") == before, "nothing of the second job is mixed into the first"


def train_quietly(argv):
    return {"losses": train(argv)["losses"]}


def test_other_ranks_of_the_same_number_of_ranks_are_refused_too(tmp_path):
    """First rank 0 alone recorded, then both shall: rank 1 was never here, and is refused all the same."""
    first = probe_file(tmp_path, "ranks: [0]\nsteps: [0]\ndump: {level: L0}\n")
    run_forked(2, train_quietly, flags(2, first, tmp_path / "out"))
    before = files(tmp_path / "out")
    second = probe_file(tmp_path, "steps: [0]\ndump: {level: L0}\n")
    found = run_forked(2, refused, flags(2, second, tmp_path / "out"), timeout=60)
    assert [each["code"] for each in found] == [2, 2]
    assert files(tmp_path / "out") == before


def attach_after_a_restart(config, out, restarts, strict):
    """What `-m msprobe_megatron.run` does when the model is ready, in a job that torchrun has started again."""
    from torch import nn

    from msprobe_megatron.config.flags import Flags
    from msprobe_megatron.job.session.arming import Armed

    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    flags_ = Flags(config=config, output=out, strict=strict)
    said = io.StringIO()
    code = None
    with contextlib.redirect_stderr(said):
        try:
            Armed(flags_, flags_.load_config()).model_ready([nn.Linear(2, 2)], None)
        except SystemExit as end:
            code = end.code
    return {"code": code, "stderr": said.getvalue()}


def test_an_elastic_restart_does_not_die_of_its_first_record(tmp_path):
    config = probe_file(tmp_path)
    run_forked(1, train_quietly, flags(1, config, tmp_path / "out"))
    before = files(tmp_path / "out")
    # The last two with a world that has grown.
    cases = ((0, False, 2, 1), (1, False, None, 1), (1, True, 2, 1), (1, False, None, 2), (1, True, 2, 2))
    for restarts, strict, code, world in cases:
        found = run_forked(
            world, attach_after_a_restart, str(config), str(tmp_path / "out"), restarts, strict, timeout=60
        )
        assert [each["code"] for each in found] == [code] * world
        assert "already holds a run" in found[0]["stderr"]
        assert ("training continues without the probe" in found[0]["stderr"]) == (code is None)
    assert files(tmp_path / "out") == before


def train_on_another_clock(argv):
    """Rank 1 joins late, with a clock that is a day ahead, and with another version of the kit."""
    import time

    if os.environ["RANK"] == "1":
        from msprobe_megatron.topology.host import framework

        now, versions = time.time, framework.versions
        time.time = lambda: now() + 86400
        time.gmtime = lambda *args, gmtime=time.gmtime: gmtime(*(args or (now() + 86400,)))
        framework.versions = lambda: {**versions(), "msprobe_megatron": "0.0.1"}
        time.sleep(1)  # the lateness itself; nothing is judged by it
    return train_quietly(argv)


def test_a_late_joiner_with_another_clock_and_version(tmp_path):
    (expected, _) = plain(3, TP2, world=2)
    argv = flags(3, probe_file(tmp_path), tmp_path / "out", TP2)
    found = run_forked(2, train_on_another_clock, argv, timeout=60)
    assert [each["losses"] for each in found] == [expected["losses"]] * 2
    run = open_run(tmp_path / "out")
    assert sorted((step, rank) for step, rank, _ in run.files) == [(s, r) for s in range(3) for r in range(2)]
    warnings = summarise(run).warnings
    assert any("msprobe_megatron 0.0.1" in text and "ranks [1]" in text for text in warnings)
    assert any("clocks" in text and "86" in text and "ranks [1]" in text for text in warnings)
