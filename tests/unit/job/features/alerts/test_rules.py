"""Every rule: fires on its fault, names it, is silent on health, and keeps what it remembers within bounds."""

import numpy as np
import pytest

from msprobe_megatron.config import Alert
from msprobe_megatron.job.features.alerts.rules import make_rule
from msprobe_megatron.job.features.alerts.series import Columns, SeriesNumbers, Steps
from tests.unit.job.features.alerts.steps import Told, row, step

RANDOM = np.random.default_rng(3)


def noisy(scale=1.0):
    return scale * (1 + 0.05 * RANDOM.standard_normal(8))


def test_columns_against_numpy():
    values = np.array([3.0, -4.0, 0.0, np.nan, np.inf, -np.inf, 0.0, 2.0])
    columns = Columns(step(7, (row("decoder.layers.3.mlp", microbatch=2), values), (row("a", slot=-1), [])))
    finite = values[np.isfinite(values)]
    expected = {"norm": np.linalg.norm(finite), "mean": finite.mean(), "std": finite.std(), "zeros": 2 / 8}
    expected |= {"min": -4.0, "max": 3.0, "absmax": 4.0, "n_nan": 1, "n_inf": 2, "numel": 8, "n_zero": 2}
    expected |= {"step": 7, "microbatch": 2, "layer": 3, "seq": 0}
    for name, value in expected.items():
        assert columns[name][0] == pytest.approx(value), name
    assert np.isnan(columns["layer"][1])


def projected(values):
    """Each value taken to the step that comes, along the median slope over half of them."""
    half = max(len(values) // 2, 1)
    changes = [(values[i + half] - values[i]) / half for i in range(len(values) - half)]
    slope = np.median(changes) if changes else 0.0
    return [value + slope * (len(values) - i) for i, value in enumerate(values)]


def test_spike_sees_through_a_trend():
    told = Told(Alert("spike", kinds=("loss",)))
    for number in range(20):
        assert told(number, (row("loss", kind="loss"), [10 * 0.95**number])) == []
    # The second value of all: far from unusual but for the trend.
    [event] = told(20, (row("loss", kind="loss"), [10 * 0.95**20]), (row("loss", kind="loss", microbatch=1), [9.5]))
    assert event["microbatch"] == 1


def test_usual_is_median_and_deviation_of_the_last_steps():
    steps, levels, spreads = Steps(5), {0: [], 1: []}, {0: [], 1: []}
    for _ in range(12):
        series, values = RANDOM.integers(0, 2, 7), RANDOM.standard_normal(7)
        values[RANDOM.random(7) < 0.2] = np.nan
        steps.add(np.append(series, -1), np.append(values, 9.0))
        for number in (0, 1):
            mine = values[(series == number) & np.isfinite(values)]
            if len(mine):
                levels[number] = [*levels[number], np.median(mine)][-5:]
                spreads[number] = [*spreads[number], np.median(np.abs(mine - np.median(mine)))][-5:]
        usual = steps.usual(np.array([0, 1, -1, 7]))
        for number in (0, 1):
            if levels[number]:
                ahead, spread = projected(levels[number]), projected(spreads[number])
                between = np.median([abs(x - np.median(ahead)) for x in ahead])
                assert usual.median[number] == pytest.approx(np.median(ahead), abs=1e-5)
                deviation = 1.4826 * max(between, np.median(spread))
                assert usual.deviation[number] == pytest.approx(deviation, abs=1e-5)
            assert usual.steps[number] == len(levels[number])
        assert usual.steps[2] == usual.steps[3] == 0
        low, high = steps.bounds(np.array([0, 1, -1, 7]))
        known = usual.steps > 0
        assert (low[known] <= usual.median[known] + 1e-5).all() and (usual.median[known] - 1e-5 <= high[known]).all()
        assert not np.isfinite(low[~known]).any()


def test_nonfinite_names_the_first_and_counts_the_rest():
    told = Told(Alert("nonfinite"))
    assert told(0, (row("a"), [1.0, 2.0]), (row("b"), [0.0])) == []
    [event] = told(1, (row("a"), [1.0, 2.0]), (row("b", microbatch=3), [np.nan, np.inf]), (row("c"), [np.nan]))
    assert (event["rule"], event["name"], event["microbatch"], event["step"]) == ("nonfinite", "b", 3, 1)
    assert (event["value"], event["others"]) == (2, 1)
    assert "1 NaN, 1 +Inf of 2 elements" in event["text"]


@pytest.mark.parametrize("factor", [4.0, 0.2])
def test_spike_is_two_sided_and_not_blinded_by_a_nan(factor):
    told = Told(Alert("spike", 0.5, cooldown=0))
    for number in range(12):
        bad = [np.nan] if number in (3, 9) else []
        assert told(number, (row("a"), np.append(noisy(), bad)), (row("b"), noisy(100.0))) == []
    [event] = told(12, (row("a", microbatch=1), noisy(factor)), (row("b"), noisy(100.0)))
    assert (event["name"], event["microbatch"], event["step"]) == ("a", 1, 12)
    assert event["value"] == pytest.approx(factor, rel=0.2)
    # One spike does not raise the bar for the next.
    assert told(13, (row("a"), noisy(factor)))[0]["name"] == "a"


@pytest.mark.parametrize(
    ("kind", "path", "factor", "fires"),
    [
        ("gradient", "", 1 / 30, False),  # targets of one microbatch in another rank's part of the vocabulary
        ("gradient", "", 1 / 3000, True),
        ("gradient", "", 30.0, True),
        ("grad_unreduced", "microbatch", 1 / 30, False),
        ("grad_unreduced", "", 1 / 30, True),
        ("grad_reduced", "", 1 / 30, True),
        ("activation", "", 1 / 30, True),
        ("update", "", 5.0, False),
        ("update", "", 15.0, True),
    ],
)
def test_gradients_of_a_single_microbatch_may_be_small(kind, path, factor, fires):
    told, noise = Told(Alert("spike")), np.random.default_rng(0)
    for number in range(30):
        assert not told(number, (row(kind=kind, path=path), 1 + 0.05 * noise.standard_normal(4)))
    assert bool(told(30, (row(kind=kind, path=path), np.full(4, factor)))) == fires


@pytest.mark.parametrize("name", ["layers.0.mlp.router.weight", "mlp.experts.local_experts.1.linear_fc1.weight"])
def test_what_learns_from_routed_tokens_may_change_more(name):
    for factor, fires in ((15.0, False), (1 / 15, False), (60.0, True)):
        told = Told(Alert("spike"))
        for number in range(30):
            told(number, (row(name, kind="grad_reduced"), np.ones(4)))
        assert bool(told(30, (row(name, kind="grad_reduced"), np.full(4, factor)))) == fires


def test_an_expert_shows_what_its_few_tokens_give():
    for name, factor, fires in (
        ("mlp.experts.local_experts.1.linear_fc2", 1 / 5, False),
        ("mlp.experts.local_experts.1.linear_fc2", 5.0, False),
        ("mlp.experts.local_experts.1.linear_fc2", 15.0, True),
        ("mlp.experts", 1 / 5, True),
        ("mlp.linear_fc2", 1 / 5, True),
    ):
        told = Told(Alert("spike"))
        for number in range(30):
            told(number, (row(name), np.ones(4)))
        assert bool(told(30, (row(name), np.full(4, factor)))) == fires, (name, factor)


def test_spike_waits_for_enough_values_and_follows_a_new_level():
    told = Told(Alert("spike", 0.5, window=8, cooldown=0))
    assert not any(told(number, (row("a"), noisy(10.0**number))) for number in range(8))
    told = Told(Alert("spike", 0.5, window=8, cooldown=0))
    levels = [1.0] * 10 + [9.0] * 12
    fired = [number for number, level in enumerate(levels) if told(number, (row("a"), noisy(level)))]
    assert fired and fired[0] == 10 and fired[-1] < 16


def test_spike_needs_more_than_the_usual_noise():
    told, wild = Told(Alert("spike", 0.5)), np.random.default_rng(0)
    for number in range(60):
        assert told(number, (row("a"), np.exp(wild.standard_normal()) * np.ones(4))) == []


def test_spike_leaves_settings_and_token_ids_alone():
    told = Told(Alert("spike", 0.5))
    for number in range(12):
        size = 1.0 if number < 11 else 100.0
        rows = [(row("lr", kind="loss"), [size]), (row("tokens", kind="data"), [size])]
        assert told(number, *rows) == []


def test_names_and_kinds_choose_rows():
    told = Told(Alert("limit", 10.0, names=("/^b/",), kinds=("gradient",)))
    rows = [(row("a", kind="gradient"), [99.0]), (row("b.x"), [99.0]), (row("b.y", kind="gradient"), [-99.0])]
    [event] = told(0, *rows)
    assert (event["name"], event["others"]) == ("b.y", 0)
    assert "99 is above 10" in event["text"]


@pytest.mark.parametrize("value", [np.zeros(8), np.full(8, 1e-6)])
def test_vanish(value):
    told = Told(Alert("vanish"))
    for number in range(9):
        assert told(number, (row("a", kind="gradient"), noisy()), (row("zero", kind="gradient"), np.zeros(8))) == []
    [event] = told(9, (row("a", kind="gradient"), value), (row("zero", kind="gradient"), np.zeros(8)))
    assert event["name"] == "a"


def test_vanish_sees_zeros_with_one_number_left():
    told, mostly = Told(Alert("vanish")), np.zeros(1000)
    mostly[0] = 30.0
    for number in range(9):
        assert told(number, (row("a"), np.ones(1000))) == []
    [event] = told(9, (row("a"), mostly))
    assert "99.9% of the elements are zero, usually 0.0%" in event["text"]


@pytest.mark.parametrize("name", ["experts.local_experts.3.linear_fc1.weight", "experts.linear_fc2.weight3"])
def test_an_expert_without_tokens_has_not_vanished(name):
    """Of some microbatches it gets none; a gradient that is tiny and not zero is another matter."""
    told = Told(Alert("vanish"))
    expert = row(f"decoder.layers.1.mlp.{name}", kind="grad_unreduced", path="microbatch")
    for number in range(9):
        assert told(number, (expert, noisy())) == []
    assert told(9, (expert, np.zeros(8))) == []
    [event] = told(10, (expert, np.full(8, 1e-6)))
    assert event["name"] == expert.name
    others = Told(Alert("vanish"))
    plain = row("decoder.layers.1.mlp.linear_fc1.weight", kind="grad_unreduced", path="microbatch")
    for number in range(9):
        assert others(number, (plain, noisy())) == []
    assert len(others(9, (plain, np.zeros(8)))) == 1


def test_dead_expert_of_a_grouped_layer():
    prefix = "decoder.layers.1.mlp.experts"
    told = Told(Alert("dead_expert"))
    rows = [
        (row(f"{prefix}.linear_fc{part}.weight{number}", kind="grad_reduced"), [0.0, float(number != 1)])
        for part in (1, 2)
        for number in range(3)
    ]
    [event] = told(0, *rows)
    assert (f"no token reached {prefix}.1 in this step" in event["text"], event["others"]) == (True, 0)
    assert told(9, (row(f"{prefix}.weight1", kind="grad_reduced"), [0.0]), (rows[0][0], [1.0])) == []


def test_dead_expert_by_reduced_gradients_or_activations():
    prefix = "decoder.layers.1.mlp.experts.local_experts"
    alive = [(row(f"{prefix}.0.linear_fc1.weight", kind="grad_reduced"), [0.0, 1.0])]
    # No token on this rank, but on another that holds the same expert.
    alive += [(row(f"{prefix}.0.linear_fc1"), []), (row(f"{prefix}.2.linear_fc2", microbatch=1), [0.5])]
    told = Told(Alert("dead_expert"))
    assert told(0, *alive, (row(f"{prefix}.2.linear_fc2"), [])) == []
    [event] = told(1, *alive, (row(f"{prefix}.3.linear_fc1.weight", kind="grad_reduced"), [0.0, 0.0]))
    assert f"no token reached {prefix}.3 " in event["text"]
    [event] = told(2, *alive, (row(f"{prefix}.12.linear_fc1"), []), (row(f"{prefix}.12.linear_fc2"), [0.0]))
    assert f"{prefix}.12 " in event["text"]


def test_custom():
    told = Told(Alert("custom", expression="norm > 3 * absmax and layer >= 2 and io == 'output'"))
    rows = [(row(f"decoder.layers.{layer}"), np.ones(16)) for layer in range(4)]
    [event] = told(0, *rows, (row("decoder.layers.9"), [5.0]))
    assert (event["name"], event["others"], event["value"]) == ("decoder.layers.2", 1, 4.0)
    assert "norm 4, absmax 1, layer 2" in event["text"]


_NOT_TENSORS = [
    (row("host_bytes", kind="throughput"), [4e9]),
    (row("tokens", kind="data", dtype="int64"), [4e9]),
    (row("model", io="input", dtype="int64"), [4e9]),
    (row("loss_scale", kind="loss"), [4e9]),
]


@pytest.mark.parametrize(
    ("alert", "found"),
    [
        (Alert("limit", 1e9), None),
        (Alert("limit", 1e9, names=("loss_scale",)), "loss_scale"),
        (Alert("custom", expression="absmax > 1e9"), None),
        (Alert("custom", expression="absmax > 1e9 and phase == 'forward'"), None),
        (Alert("custom", expression="absmax > 1e9 and kind == 'throughput'"), "host_bytes"),
        (Alert("custom", expression="absmax > 1e9", kinds=("throughput",)), "host_bytes"),
        (Alert("custom", expression="absmax > 1e9", names=("loss_scale",)), "loss_scale"),
        (Alert("custom", expression="absmax > 1e9 and dtype == 'int64'"), "model"),
    ],
    ids=str,
)
def test_memory_token_ids_and_settings_are_no_magnitudes(alert, found):
    """A healthy job has gigabytes of memory and large token ids: only a rule that chooses them is told of them."""
    events = Told(alert)(0, (row("decoder.layers.0"), [1.0]), *_NOT_TENSORS)
    assert [event["name"] for event in events] == ([found] if found else [])


@pytest.mark.parametrize("alert", [Alert("limit", 1e9), Alert("custom", expression="absmax > 1e9")], ids=str)
def test_tensors_are_magnitudes(alert):
    [event] = Told(alert)(0, *_NOT_TENSORS, (row("decoder.layers.0"), [5e9]), (row("comm", kind="comm"), [5e9]))
    assert (event["name"], event["others"]) == ("decoder.layers.0", 1)


def test_cooldown_is_of_the_series_and_of_the_rule():
    told = Told(Alert("limit", 1.0, cooldown=3), Alert("limit", 5.0, cooldown=0))
    fired = []
    for number in range(6):
        events = told(number, (row("a"), [9.0]), (row("b"), [2.0 * (number == 2)]))
        fired.append([(event["name"], event["value"]) for event in events])
    a, b = ("a", 9.0), ("b", 2.0)
    assert fired == [[a, a], [a], [b, a], [a], [a, a], [a]]


def test_data_of_the_microbatch_is_named():
    told = Told(Alert("limit", 1.0))
    tokens = [(row("tokens", kind="data", microbatch=m, io="input", digest=255 + m), [1.0]) for m in range(2)]
    [event] = told(0, *tokens, (row("lm loss", kind="loss", microbatch=1), [50.0]))
    assert event["data"] == {"tokens": "0000000000000100"}


@pytest.mark.parametrize("rule", ["nonfinite", "spike", "limit", "vanish", "dead_expert", "custom"])
def test_a_fault_in_a_rule_switches_off_that_rule_alone(rule, monkeypatch):
    alert = Alert(rule, 1.0 if rule == "limit" else None, expression="norm > 1" if rule == "custom" else "")
    told = Told(alert, Alert("limit", 5.0, cooldown=0))
    watched = told.alerts._rules[0].rule
    monkeypatch.setattr(watched, "judge", lambda step: 1 / 0)
    assert [event["rule"] for event in told(0, (row("a"), [9.0]))] == ["limit"]
    assert [event["rule"] for event in told(1, (row("a"), [9.0]))] == ["limit"]
    assert told.faults == [f"alert {rule} is off after an internal error: ZeroDivisionError: division by zero"]


def test_what_is_remembered_is_bounded():
    numbers = SeriesNumbers(most=3)
    rows = [row(f"x{i}") for i in range(5)]
    assert numbers.of(rows).tolist() == [0, 1, 2, -1, -1]
    histories = {}
    spike, vanish = make_rule(Alert("spike"), histories), make_rule(Alert("vanish"), histories)
    assert list(histories) == [32] and spike._history is vanish._history
    told = Told(Alert("spike"), Alert("vanish"))
    for number in range(100):
        told(number, (row("a"), noisy()), (row("b"), noisy()))
    assert told.alerts._histories[32]._levels._values.shape[0] <= 4


def _loss(tokens, per_token, microbatch=0):
    """A loss as Megatron reports it: [sum over tokens, tokens]."""
    what = {"kind": "loss", "io": "output", "microbatch": microbatch}
    return (row("lm loss", path="0", **what), [tokens * per_token]), (row("lm loss", path="1", **what), [float(tokens)])


def test_a_loss_is_judged_per_token_whatever_the_masks_leave_of_a_batch():
    """Sums of 40 to 4,000 tokens are no spike of the loss; 1.6 times the loss over the usual tokens is one."""
    told = Told(Alert("spike", cooldown=0), Alert("limit", 5.0, kinds=("loss",), cooldown=0))
    for number in range(20):
        tokens = 4000 if number == 15 else 40 + 3 * (number % 5)
        assert told(number, *_loss(tokens, 3.0 + 0.01 * (number % 3)), *_loss(tokens // 2, 3.0, microbatch=1)) == []
    spike, limit = told(20, *_loss(48, 6.0), *_loss(48, 3.0, microbatch=1))
    assert spike["value"] == pytest.approx(6.0) and limit["value"] == pytest.approx(6.0)
    assert spike["text"].startswith("spike: lm loss per token (loss): root mean square 6 is 1.99 times the median 3.01")
    assert (spike["path"], spike["microbatch"]) == ("0", 0)


def test_a_microbatch_without_tokens_is_no_alert():
    told = Told(Alert("spike", cooldown=0), Alert("vanish", cooldown=0), Alert("nonfinite", cooldown=0))
    assert all(told(number, *_loss(40, 3.0)) == [] for number in range(12))
    assert told(12, *_loss(0, 3.0)) == []
