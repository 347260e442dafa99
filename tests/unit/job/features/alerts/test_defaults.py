"""The defaults of `spike`: moderate faults are told at their first step, clean jobs of all kinds are silent."""

import numpy as np
import pytest

from msprobe_megatron.config import Alert
from msprobe_megatron.run_directory.directory import read_events
from tests.unit.job.features.alerts.evaluate import AT, CLEAN, FAULTS, PROBE, run_of
from tests.unit.job.features.alerts.steps import Told, row
from tests.unit.job.features.alerts.test_rules import projected

ALERTS = "alerts: [nonfinite, {rule: spike, cooldown: 0}, {rule: vanish, cooldown: 0}]"


def told(out):
    return [event for event in read_events(out) if event["event"] in ("alert", "fault")]


def test_five_times_the_gradients_in_a_real_job(tmp_path):
    """Every gradient of one step five times as large, and 40 steps before it of which nothing is said."""
    probe = f"monitor: {{activations: false, {ALERTS}}}\n"
    events = told(run_of(tmp_path, "all_x5", *FAULTS["all_x5"], probe=probe))
    assert events and events[0]["step"] == AT
    assert {event["rule"] for event in events if event["step"] == AT} == {"spike"}


@pytest.mark.parametrize(
    ("kind", "name", "factor", "deviations"),
    [
        ("loss", "lm loss", 1.6, 10),
        ("loss", "grad_norm", 5.0, 4),
        ("loss", "grad_norm", 0.4, 4),
        ("grad_reduced", "decoder.layers.0.mlp.linear_fc1.weight", 5.0, 10),
        ("activation", "decoder.layers.0", 5.0, 10),
        ("update", "decoder.layers.0.mlp.linear_fc1.weight", 10.0, 10),
        ("grad_clipped", "decoder.layers.0.mlp.linear_fc1.weight", 20.0, 10),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_moderate_jumps(kind, name, factor, deviations, seed):
    """Told at once over a calm window; over any other if the definition, worked out here, says so."""
    for noise in (0.02, 0.1, 0.2, 0.4):
        alert, random = Told(Alert("spike")), np.random.default_rng(seed)
        seen = np.float32(noise * random.standard_normal(32)).astype(np.float64)
        for number, log in enumerate(seen):
            alert(number, (row(name, kind=kind), [np.exp(log), -np.exp(log)]))
        ahead = np.array(projected(seen))
        robust = 1.4826 * np.median(np.abs(ahead - np.median(ahead)))
        far = bool(abs(np.log(factor) - np.median(ahead)) > deviations * (1 + 16 / 32) * robust)
        events = alert(32, (row(name, kind=kind), [factor, -factor]))
        assert [event["name"] for event in events if event["step"] == 32] == [name] * far
        assert far or noise > 0.02


@pytest.mark.parametrize(
    ("kind", "name", "factor"),
    [
        ("loss", "lm loss", 1.2),
        ("loss", "grad_norm", 1.9),
        ("grad_reduced", "decoder.layers.0.mlp.linear_fc1.weight", 2.8),
        ("activation", "decoder.layers.0", 3.8),
        ("update", "decoder.layers.0.mlp.linear_fc1.weight", 6.5),
        ("grad_clipped", "decoder.layers.0.mlp.linear_fc1.weight", 9.0),
        ("grad_reduced", "decoder.layers.0.mlp.router.weight", 25.0),
    ],
)
def test_what_clean_jobs_show_is_not_told(kind, name, factor):
    alert, random = Told(Alert("spike")), np.random.default_rng(1)
    for number in range(32):
        assert alert(number, (row(name, kind=kind), [np.exp(0.01 * random.standard_normal())])) == []
    assert alert(32, (row(name, kind=kind), [factor])) == []
    assert alert(33, (row(name, kind=kind), [1 / factor])) == []


@pytest.mark.parametrize(
    ("steps", "factor", "fires"), [(8, 4.0, False), (8, 1e6, True), (32, 2.5, False), (32, 6.0, True)]
)
def test_a_series_that_was_calm_by_chance(steps, factor, fires):
    """Of eight steps: the noise of others of its kind counts, and less so the longer a series is known."""
    random, names = np.random.default_rng(0), [f"decoder.layers.{i}.weight" for i in range(40)]
    alert = Told(Alert("spike"))

    def rows(first):
        noisy = np.exp(0.3 * random.standard_normal(len(names)))
        return [(row(n, kind="grad_reduced"), [first if i == 0 else noisy[i]]) for i, n in enumerate(names)]

    for number in range(steps):
        assert alert(number, *rows(1 + 1e-3 * random.standard_normal())) == []
    assert [event["name"] for event in alert(steps, *rows(factor))] == names[:1] * fires


@pytest.mark.slow
@pytest.mark.parametrize("job", CLEAN)
def test_clean_jobs_are_silent(tmp_path, job):
    assert told(run_of(tmp_path, job, *CLEAN[job], probe=PROBE.replace("{update", f"{{{ALERTS}, update"))) == []


@pytest.mark.slow
@pytest.mark.parametrize("job", ["bad_batch", "weight_bit", "layer_x100", "rate_x10"])
def test_faults_are_told_at_their_first_step(tmp_path, job):
    events = told(run_of(tmp_path, job, *FAULTS[job], probe=PROBE.replace("{update", f"{{{ALERTS}, update")))
    assert events and events[0]["step"] == AT
