"""The first oath, for the monitor: with everything watched, training is bit for bit what it is without the kit."""

import pytest

from msprobe_megatron.run_directory.directory import read_events
from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked
from tests.unit.job.features.monitor.conftest import EVERYTHING, rows_of

QUICK = ("tp2_sp", "pp2_vpp2", "dp2_distopt", "cp2", "ep2")
SLOW = tuple(name for name in LAYOUTS if name not in QUICK)


def check(jobs, tmp_path, layout):
    config, out = tmp_path / "probe.yaml", tmp_path / "out"
    config.write_text(EVERYTHING)
    argv = [*flags_of(layout, dropout=True), "--msprobe-config", str(config), "--msprobe-output", str(out)]
    watched = run_forked(LAYOUTS[layout].world, train_and_keep, argv)
    assert [event["text"] for event in read_events(out) if event["event"] == "fault"] == [], "the probe was disabled"
    plain = jobs.plain(layout)
    for rank, (left, right) in enumerate(zip(plain, watched, strict=True)):
        assert {row["step"] for row in rows_of(out, rank)} == {0, 1, 2}, "nothing to compare with"
        for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
            assert same(left[what], right[what]), f"{layout}, rank {rank}: {what} differ"


@pytest.mark.parametrize("layout", QUICK)
def test_watching_changes_no_bit(jobs, tmp_path, layout):
    check(jobs, tmp_path, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_watching_changes_no_bit_in_other_layouts(jobs, tmp_path, layout):
    check(jobs, tmp_path, layout)
