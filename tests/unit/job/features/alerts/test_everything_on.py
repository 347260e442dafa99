"""With alerts, checks, recorder and curves all on, training is bit for bit what it is without the kit."""

import pytest

from msprobe_megatron.run_directory.directory import read_events
from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked
from tests.unit.job.features.alerts.test_alert_jobs import ALL

PROBE = (
    f"monitor: {{parameters: true, data: true, format: [parquet, tensorboard], alerts: {ALL}}}\n"
    "checks: {collectives: true}\nrecorder: {}\n"
)


@pytest.mark.parametrize("layout", ["tp2_sp", "dp2_distopt", pytest.param("pp2_vpp2", marks=pytest.mark.slow)])
def test_no_bit_changes(jobs, tmp_path, layout):
    config, out = tmp_path / "probe.yaml", tmp_path / "out"
    config.write_text(PROBE)
    argv = [*flags_of(layout, dropout=True), "--msprobe-config", str(config), "--msprobe-output", str(out)]
    watched = run_forked(LAYOUTS[layout].world, train_and_keep, argv)
    assert not [event for event in read_events(out) if event["event"] in ("fault", "alert")]
    for rank, (left, right) in enumerate(zip(jobs.plain(layout), watched, strict=True)):
        for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
            assert same(left[what], right[what]), f"{layout}, rank {rank}: {what} differ"
