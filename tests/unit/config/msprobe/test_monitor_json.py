"""The monitor's file of msprobe, in its first form and in its later one."""

import json

import pytest

from msprobe_megatron.config import Alert, MonitorConfig, RankSelection, Target, TensorChoice, parse_steps
from msprobe_megatron.config.msprobe.monitor_json import ALERT, COLLECTIVES, MONITOR

# The settings of the monitor's published baseline: ten layers of a LLaMA2-13B.
LAYER = '{"input": "tuple[2]:0", "output": "tensor", "input_grad":"tuple[2]:0", "output_grad":"tuple[1]:0"}'
BASELINE = (
    '{  \n    "targets": {  \n'
    + ",\n".join(f'        "language_model.encoder.layers.{i}": {LAYER}' for i in range(10))
    + '\n    },\n    "module_ranks": "0"\n}  \n'
)


def test_baseline(probe):
    config = probe(BASELINE, "config.json")
    first = TensorChoice(2, 0)
    assert config.monitor == MonitorConfig(
        activations=True,
        gradients=True,
        optimizer=True,
        parameters=False,
        targets=tuple(
            Target(f"language_model.encoder.layers.{i}", first, TensorChoice(), first, TensorChoice(1, 0))
            for i in range(10)
        ),
    )
    assert config.dump is config.perturb is None
    assert config.ranks == RankSelection(parse_steps("0"))
    assert config.steps.describe() == "all"
    assert any("activations, gradients and optimizer state are monitored" in note for note in config.notes)


def test_baseline_as_printed_has_wide_commas(probe):
    printed = BASELINE.replace("},\n", "}，\n")
    assert printed != BASELINE
    assert probe(printed, "config.json").monitor == probe(BASELINE, "config.json").monitor


def test_wide_signs_inside_of_strings_are_left_alone(probe):
    (target,) = probe('{"targets": {"a，b": {}}，"module_ranks": "0"}', "config.json").monitor.targets
    assert target.name == "a，b"


HONOURED = [
    ("targets", {"a": {}}, "monitor.targets", (Target("a"),)),
    ("targets", {}, "monitor.targets", ()),
    ("module_ranks", [], "ranks", "all"),
    ("module_ranks", "", "ranks", "all"),
    ("module_ranks", "0,3", "ranks", "0, 3"),
    ("module_ranks", [0, 1], "ranks", "0-1"),
    ("xy_distribution", True, "monitor.activations", True),
    ("mv_distribution", True, "monitor.optimizer", True),
    ("param_distribution", True, "monitor.parameters", True),
    ("wg_distribution", True, "monitor.gradients", True),
    ("xy_distribution", False, "monitor.activations", False),
    ("cc_distribution", {"enable": True}, "monitor.comm", True),
    ("cc_distribution", {}, "monitor.comm", False),
    (
        "alert",
        {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}]},
        "monitor.alerts",
        (Alert("spike", 0.5),),
    ),
    ("alert", {"rules": [{"rule_name": "AnomalyNan"}]}, "monitor.alerts", (Alert("nonfinite"),)),
    (
        "alert",
        {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}]},
        "monitor.alerts",
        (Alert("nonfinite"), Alert("limit", 1e10)),
    ),
    ("start_step", 5, "monitor.start_step", 5),
    ("step_interval", 10, "monitor.every", 10),
    ("collect_times", 3, "monitor.collect_times", 3),
    ("collect_times", 10**8, "monitor.collect_times", None),
    ("forward_only", True, "monitor.direction", "forward"),
    ("backward_only", True, "monitor.direction", "backward"),
    ("forward_only", False, "monitor.direction", "both"),
    ("monitor_mbs_grad", True, "monitor.microbatch_gradients", True),
    ("ur_distribution", True, "monitor.update", True),
    ("mg_direction", True, "monitor.agreement", True),
    ("mg_distribution", True, "monitor.agreement", True),
    ("format", "csv", "monitor.format", ("parquet",)),
    ("format", "tensorboard", "monitor.format", ("parquet", "tensorboard")),
]
SWITCHES = (
    "print_struct",
    "stack_info",
    "params_effrank",
    "cc_distribution.cc_log_only",
)
NOTED = [
    ("all_xy", True, "empty targets are all modules"),
    ("all_xy", False, "empty targets are all modules"),
    ("ops", ["norm", "min"], "all statistics"),
    ("ndigits", 12, "in full"),
    ("step_count_per_record", 50, "length of its files"),
    ("squash_name", True, "canonical"),
    ("dynamic_on", True, "ctl RUN --monitor"),
    ("cc_distribution.cc_pre_hook", True, "like what comes out"),
    ("alert.dump", True, "events.jsonl"),
    ("alert.inform", {}, "has no effect"),
    ("cc_distribution.cc_codeline", [], "has no effect"),
    *[(key, False, "has no effect") for key in SWITCHES],
    ("eps", 1e-8, "has no effect"),
    ("append_output", [], "has no effect"),
    ("l2_targets", {"linear_hook": []}, "has no effect"),
    ("recording_l2_features", False, "has no effect"),
    ("recording_l2_features", True, "nothing is recorded"),
    ("sa_order", "s,b,h,d", "has no effect"),
]
REFUSED = [
    *[(key, True, "write|leave it out") for key in SWITCHES],
    ("cc_distribution.cc_codeline", ["train.py"], "leave it out"),
    ("alert.inform", {"recipient": "x"}, "events.jsonl"),
    ("eps", 1e-6, "leave it out"),
    ("append_output", ["a", "b"], "leave it out"),
    ("sa_order", "b,s,h,d", "leave it out"),
    ("format", "api", "leave it out"),
    ("monitors", {"module": {}}, "write monitor: "),
    ("targets", {"1:decoder.layers.0": {}}, "write decoder.layers.0"),
]
WRONG = [
    ("targets", [], "a mapping from module names"),
    ("targets", {"a": {"input": "list"}}, "tuple[N]:i"),
    ("module_ranks", 0, "[] is all"),
    ("module_ranks", "x", "'x' is not"),
    ("xy_distribution", 1, "true, false"),
    ("ops", ["median"], "norm, min"),
    ("ndigits", 21, "from 0 to 20"),
    ("step_interval", 0, "from 1 to"),
    ("collect_times", 0, "from 1 to"),
    ("start_step", -1, "from 0 to"),
    ("alert", {"rules": [{"args": {}}]}, "rule_name"),
    ("alert", {"rules": [{"rule_name": "Other"}]}, "AnomalyTurbulence, AnomalyNan"),
    ("alert", {"rules": [{"rule_name": "AnomalyTurbulence"}]}, "threshold"),
    ("alert", {"rule": []}, "did you mean rules?"),
    ("cc_distribution", {"enabled": True}, "did you mean enable?"),
    ("format", "xlsx", "csv, tensorboard, api"),
]


def file_of(key, value):
    document = {"wg_distribution": True}
    head, _, name = key.partition(".")
    document[head] = {name: value} if name else value
    return json.dumps(document)


def look_up(config, path):
    value = config
    for name in path.split("."):
        value = getattr(value, name)
    return value.describe() if path in ("ranks", "steps") else value


@pytest.mark.parametrize(("key", "value", "path", "expected"), HONOURED)
def test_honoured(probe, key, value, path, expected):
    config = probe(file_of(key, value), "config.json")
    assert look_up(config, path) == expected
    assert config.monitor is not None
    assert config.monitor.gradients is True


@pytest.mark.parametrize(("key", "value", "part"), NOTED)
def test_noted(probe, key, value, part):
    with_key = probe(file_of(key, value), "config.json")
    without = probe(file_of("wg_distribution", True), "config.json")
    notes = [note for note in with_key.notes if note not in without.notes]
    assert len(notes) == 1
    assert notes[0].startswith(f"{key}: ")
    assert part in notes[0]
    assert with_key.monitor == without.monitor
    assert with_key.steps == without.steps


@pytest.mark.parametrize(("key", "value", "part"), REFUSED)
def test_refused_with_what_to_write_instead(refused, key, value, part):
    message = refused(file_of(key, value), "config.json")
    assert message.startswith(f"config.json: {key}") or message.startswith("config.json: 'targets.1:")
    assert "cannot be translated: " in message
    assert any(word in message for word in part.split("|"))


@pytest.mark.parametrize(("key", "value", "part"), WRONG)
def test_wrong_value_names_the_key_of_msprobe(refused, key, value, part):
    message = refused(file_of(key, value), "config.json")
    assert message.startswith(f"config.json: {key}")
    assert part in message


def test_no_key_of_the_schema_is_without_a_test():
    tested = {key for key, *_ in (*HONOURED, *NOTED, *REFUSED)}
    tested |= {"cc_distribution.enable", "alert.rules"}  # HONOURED, inside their values
    assert set(MONITOR) <= tested
    assert {f"alert.{key}" for key in ALERT} <= tested
    assert {f"cc_distribution.{key}" for key in COLLECTIVES} <= tested


def test_the_known_schema_is_covered():
    known = (
        "targets module_ranks xy_distribution all_xy forward_only backward_only wg_distribution ops eps"
        " monitor_mbs_grad mv_distribution ur_distribution mg_direction param_distribution cc_distribution"
        " alert ndigits start_step step_interval collect_times step_count_per_record dynamic_on format"
        " print_struct stack_info squash_name append_output l2_targets recording_l2_features sa_order"
        " params_effrank"
    )
    assert set(known.split()) <= set(MONITOR)
    assert set(COLLECTIVES) == {"enable", "cc_codeline", "cc_pre_hook", "cc_log_only"}


def test_kinds_that_are_not_switched_on_are_off(probe):
    config = probe('{"targets": {}, "mv_distribution": true}', "config.json")
    assert config.monitor == MonitorConfig(activations=False, gradients=False, optimizer=True)


def test_everything_off_is_nothing_asked(refused):
    message = refused('{"targets": {}, "xy_distribution": false, "wg_distribution": false}', "config.json")
    assert "requests nothing" in message


def test_all_modules_beside_targets(refused):
    message = refused('{"targets": {"a": {}}, "xy_distribution": true, "all_xy": true}', "config.json")
    assert message.startswith("config.json: all_xy: true cannot be translated")


def test_window(probe, refused):
    text = '{"wg_distribution": true, "start_step": 100, "step_interval": 10, "collect_times": 5}'
    monitor = probe(text, "config.json").monitor
    assert (monitor.start_step, monitor.every, monitor.collect_times) == (100, 10, 5)


def test_forward_and_backward_only(refused):
    text = '{"xy_distribution": true, "forward_only": true, "backward_only": true}'
    assert "collect nothing" in refused(text, "config.json")


def test_alerts_that_are_wrong_name_their_place(refused):
    rule = '{"rule_name": "AnomalyNan", "args": {"threshold": -1}}'
    text = f'{{"wg_distribution": true, "alert": {{"rules": [{rule}]}}}}'
    assert refused(text, "config.json").startswith(
        "config.json: alert.rules[0].args.threshold: -1 is out of range; accepted: a finite number above 0"
    )


def test_features_become_metrics(probe, refused):
    hooks = '"attention_hook": ["a.b"], "moe_router_logit_hook": [], "moe_router_weight_hook": []'
    text = f'{{"wg_distribution": true, "recording_l2_features": true, "l2_targets": {{{hooks}}}}}'
    assert probe(text, "config.json").monitor.metrics == ("attention", "router")
    assert "did you mean linear_hook?" in refused(text.replace("attention_hook", "linear_hooks"), "config.json")
    assert probe(text.replace('features": true', 'features": false'), "config.json").monitor.metrics == ()
