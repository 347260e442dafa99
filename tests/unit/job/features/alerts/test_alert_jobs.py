"""Alerts of real jobs: every seeded fault is named at the first step it acts, clean jobs of all layouts are silent."""

import sys

import pytest

from msprobe_megatron.run_directory.directory import read_events
from tests.unit.job.features.checks.jobs import job

ALL = "[nonfinite, {rule: spike, cooldown: 0}, vanish, dead_expert, replica, {rule: limit, threshold: 1.0e+6}]"
PROBE = f"monitor: {{parameters: true, data: true, alerts: {ALL}}}\nchecks: {{every: 1}}\nrecorder: {{}}\n"
# Without a loss that balances them, experts of so small a model do starve, and that is an alert.
CALM = "--lr 3e-4 --moe-aux-loss-coeff 0.1"
LAYOUTS = (
    *("single", "tp2_sp", "pp2_vpp2", "dp2_distopt", "ep2"),
    *("tp2", "pp2", "tp2_pp2", "cp2", "moe", "recompute", "pp2_uneven"),
)


def alerts(out, rule=None):
    found = [event for event in read_events(out) if event["event"] == "alert"]
    return [event for event in found if rule is None or event["rule"] == rule]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] if i > 1 else []) for i, name in enumerate(LAYOUTS)]
)
def test_clean_jobs_raise_no_alert(layout, tmp_path):
    out = job(tmp_path, layout, probe=PROBE, more=CALM, steps=14)
    assert [event for event in read_events(out) if event["event"] != "unseen"] == []
    assert not list(out.glob("step_*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clean_jobs_that_learn_faster_raise_no_alert(layout, tmp_path):
    """With everything watched that a rule looks at."""
    more = "monitor: {update: true, clipped: true, microbatch_gradients: true, "
    fast = CALM.replace("3e-4", "1e-3")
    out = job(tmp_path, layout, probe=PROBE.replace("monitor: {", more), more=fast, steps=24)
    assert alerts(out) == []


def test_loss_spike_names_the_microbatch_and_the_samples(tmp_path):
    probe = "monitor: {data: true, alerts: [{rule: spike, kinds: [loss]}]}\n"
    out = job(tmp_path, "dp2", "bad_batch", at=14, probe=probe, more="--lr 3e-3", steps=16)
    event = alerts(out)[0]
    assert (event["step"], event["name"], event["microbatch"], event["rank"]) == (14, "lm loss", 1, 1)
    # Two samples of 16 tokens: both are named, by digests that are found again in the rows of that step.
    assert set(event["data"]) == {"input_ids.0", "input_ids.1", "labels.0", "labels.1"}
    assert len(set(event["data"].values())) == 4
    import pyarrow.parquet as pq

    [path] = (out / "monitor" / "rank_00001").glob("steps_*.parquet")
    rows = [row for row in pq.read_table(path).to_pylist() if row["kind"] == "data" and row["step"] == 14]
    digests = {f"{row['name']}.{row['path']}": f"{row['digest']:016x}" for row in rows if row["microbatch"] == 1}
    assert event["data"].items() <= digests.items()


def test_expert_that_gets_nothing(tmp_path):
    out = job(tmp_path, "ep2", "starved_expert", at=3, probe="monitor: {alerts: [dead_expert]}\n", more=CALM, steps=5)
    [event] = alerts(out)
    assert (event["step"], event["rule"]) == (3, "dead_expert")
    assert event["name"].startswith("decoder.layers.1.mlp.experts.local_experts.2")


def test_nan_in_one_layer_on_one_rank_at_step_7(tmp_path):
    probe = "monitor: {alerts: [nonfinite]}\nrecorder: {keep_steps: 4, on: [alert]}\n"
    out = job(tmp_path, "tp2", "nan_in_layer", at=7, probe=probe, more=CALM, steps=9)
    [event] = [event for event in alerts(out) if event["rank"] == 1]
    assert (event["step"], event["name"], event["kind"]) == (7, "decoder.layers.2.mlp", "activation")
    for rank in (0, 1):
        written = {path.parent.parent.name for path in out.glob(f"step_*/rank_{rank:05d}/records.parquet")}
        assert written == {"step_000004", "step_000005", "step_000006", "step_000007"}


def test_actions_record_the_next_steps_and_run_a_command(tmp_path):
    note = tmp_path / "note.txt"
    program = f"import os; open({str(note)!r}, 'a').write(os.environ['MSPROBE_ALERT'])"
    command = f'[{sys.executable}, "-c", "{program}", "{{rule}}; touch {tmp_path}/shell"]'
    action = f"{{record: 2, level: mix, command: {command}}}"
    probe = f"steps: [0]\ndump: {{level: L0}}\nmonitor: {{alerts: [{{rule: nonfinite, action: {action}}}]}}\n"
    out = job(tmp_path, "tp2", "nan_in_layer", at=3, probe=probe, more=CALM, steps=16)
    steps = sorted(int(path.name[5:]) for path in out.glob("step_*"))
    assert steps[0] == 0
    first = steps[1]
    assert first > 3
    # Both ranks may ask, one after the other; each time the same steps on both.
    assert set(steps[1:]) >= {first, first + 1}
    for step in steps[1:]:
        assert len(list(out.glob(f"step_{step:06d}/rank_*/records.parquet"))) == 2
    assert '"rule": "nonfinite"' in note.read_text()
    assert not (tmp_path / "shell").exists()
