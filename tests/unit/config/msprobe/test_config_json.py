"""Files of msprobe: every key of its schema is either honoured or refused by name."""

import json

import pytest

from msprobe_megatron.config import (
    DumpConfig,
    MonitorConfig,
    PerturbConfig,
    StepSelection,
    Target,
    parse_steps,
)
from msprobe_megatron.config.msprobe.config_json import BLOCKS, COMMON, TASKS
from msprobe_megatron.config.sections.dump import Slice

BASE = {"task": "statistics", "dump_path": "./d", "rank": [], "step": [], "level": "L0"}

# (task, key path, value) -> (path in the configuration, value there); a dot leads into the task's block.
HONOURED = [
    ("statistics", "dump_path", "./other", "output", "other"),
    ("statistics", "rank", [], "ranks", "all"),
    ("statistics", "rank", [0, "4-6", "9"], "ranks", "0, 4-6, 9"),
    ("statistics", "step", [], "steps", "all"),
    ("statistics", "step", [1, "20-22"], "steps", "1, 20-22"),
    ("statistics", "step", None, "steps", "all"),
    ("statistics", "level", "L0", "dump.level", "L0"),
    ("statistics", "level", "L1", "dump.level", "L1"),
    ("statistics", "level", "mix", "dump.level", "mix"),
    ("statistics", "level", "debug", "dump.level", "debug"),
    ("statistics", "level", None, "dump.level", "L1"),
    ("statistics", "extra_info", False, "dump.stacks", False),
    ("statistics", "extra_info", True, "dump.stacks", True),
    ("statistics", "task", "statistics", "dump.task", "statistics"),
    ("tensor", "task", "tensor", "dump.task", "tensor"),
    ("structure", "task", "structure", "dump.task", "structure"),
    ("structure", "level", "L1", "dump.level", "mix"),
    ("structure", "level", "L0", "dump.level", "L0"),
    ("overflow_check", "task", "overflow_check", "dump.task", "nonfinite"),
    ("statistics", "statistics.scope", ["a", "b"], "dump.scope", ("a", "b")),
    ("statistics", "statistics.scope", [], "dump.scope", ()),
    (
        "statistics",
        "statistics.tensor_list",
        ["relu", "Module.0.mlp.MLP.forward.0"],
        "dump.tensor_list",
        ("relu", "mlp"),
    ),
    ("statistics", "statistics.slice", [{"dim": 1, "end": 4}], "dump.slice", (Slice(1, None, 0, 4),)),
    ("statistics", "risk_level", "ALL", "dump.apis", "all"),
    ("statistics", "risk_level", "CORE", "dump.apis", "core"),
    ("statistics", "risk_level", "FOCUS", "dump.apis", "focus"),
    ("statistics", "dump_enable", False, "steps", "none"),
    ("statistics", "statistics.list", ["relu", "mlp"], "dump.list", ("relu", "mlp")),
    ("statistics", "statistics.list", ["name-regex(layers.[0-3])"], "dump.list", ("/layers.[0-3]/",)),
    (
        "statistics",
        "statistics.list",
        ["Module.0.module.module.decoder.layers.0.mlp.MLP.forward.3"],
        "dump.list",
        ("decoder.layers.0.mlp",),
    ),
    ("statistics", "statistics.list", ["Module.embedding.Embedding.backward.0"], "dump.list", ("embedding",)),
    ("statistics", "statistics.data_mode", ["all"], "dump.data_mode", ("all",)),
    ("statistics", "statistics.data_mode", [], "dump.data_mode", ("all",)),
    ("statistics", "statistics.data_mode", ["forward", "input"], "dump.data_mode", ("forward", "input")),
    ("statistics", "statistics.summary_mode", "statistics", "dump.digest", False),
    ("statistics", "statistics.summary_mode", "md5", "dump.digest", "crc32"),
    ("statistics", "statistics.summary_mode", "xor", "dump.digest", True),
    ("tensor", "tensor.scope", ["a", "b"], "dump.scope", ("a", "b")),
    ("tensor", "tensor.list", ["relu"], "dump.list", ("relu",)),
    ("tensor", "tensor.data_mode", ["backward"], "dump.data_mode", ("backward",)),
    ("tensor", "tensor.summary_mode", "md5", "dump.digest", "crc32"),
    ("overflow_check", "overflow_check.scope", ["a", "b"], "dump.scope", ("a", "b")),
    ("overflow_check", "overflow_check.list", ["relu"], "dump.list", ("relu",)),
    ("overflow_check", "overflow_check.data_mode", ["output"], "dump.data_mode", ("output",)),
    (
        "free_benchmark",
        "free_benchmark.scope",
        ["Torch.matmul.0.forward"],
        "perturb.scope",
        ("Torch.matmul.0.forward",),
    ),
    ("free_benchmark", "free_benchmark.list", ["softmax"], "perturb.list", ("softmax",)),
    ("free_benchmark", "free_benchmark.pert_mode", "bit_noise", "perturb.mode", "bit_noise"),
    ("free_benchmark", "free_benchmark.handler_type", "fix", "perturb.handler", "fix"),
    ("free_benchmark", "free_benchmark.fuzz_stage", "forward", "perturb.stage", "forward"),
    ("free_benchmark", "free_benchmark.if_preheat", True, "perturb.preheat", True),
    ("free_benchmark", "free_benchmark.preheat_step", 5, "perturb.preheat_steps", 5),
    ("free_benchmark", "free_benchmark.max_sample", 9, "perturb.max_samples", 9),
    ("grad_probe", "grad_probe.param_list", ["a", "b"], "monitor.targets", (Target("a"), Target("b"))),
    ("grad_probe", "task", "grad_probe", "monitor.gradients", True),
    ("free_benchmark", "task", "free_benchmark", "perturb.handler", "check"),
]

# What changes nothing: (task, key path, value, part of the note).
NOTED = [
    ("statistics", "async_dump", True, "always asynchronous"),
    ("statistics", "async_dump", False, "always asynchronous"),
    ("statistics", "precision", "low", "float32 or wider"),
    ("statistics", "precision", "high", "float32 or wider"),
    ("statistics", "dump_enable", True, "msprobe-megatron ctl RUN"),
    ("statistics", "custom_op_namespaces", [], "seen in every namespace"),
    ("statistics", "custom_op_namespaces", ["_C_ascend"], "seen in every namespace"),
    ("statistics", "enable_dataloader", False, "has no effect"),
    ("statistics", "is_deterministic", False, "has no effect"),
    ("statistics", "acl_config", "", "has no effect"),
    ("tensor", "tensor.file_format", "npy", "has no effect"),
    ("tensor", "tensor.backward_input", [], "has no effect"),
    ("tensor", "tensor.request_id", "", "has no effect"),
    ("tensor", "tensor.online_run_ut", False, "has no effect"),
    ("structure", "structure.scope", [], "has no effect"),
    ("structure", "structure.list", [], "has no effect"),
    ("structure", "structure.data_mode", ["all"], "has no effect"),
    ("overflow_check", "overflow_check.overflow_nums", -1, "has no effect"),
    ("overflow_check", "overflow_check.check_mode", "all", "has no effect"),
    ("free_benchmark", "free_benchmark.fuzz_device", "npu", "follows from pert_mode"),
    ("free_benchmark", "free_benchmark.fuzz_level", "L1", "all columns"),
    ("grad_probe", "grad_probe.grad_level", "L0", "has no effect"),
    ("grad_probe", "grad_probe.bounds", [], "has no effect"),
    ("statistics", "tensor", {"list": ["x"]}, "block not used, task is statistics"),
    ("statistics", "acc_check", {"white_list": []}, "block not used, task is statistics"),
]

# (task, key path, value, part of what to write instead)
REFUSED = [
    ("statistics", "load", {"path": "x"}, "leave it out"),
    ("statistics", "enable_dataloader", True, "leave it out"),
    ("statistics", "seed", 1234, "write --seed"),
    ("statistics", "is_deterministic", True, "--deterministic-mode"),
    ("statistics", "acl_config", "acl.json", "leave it out"),
    ("statistics", "hook_name", "dump", "write task"),
    ("statistics", "level", "L2", "write L0"),
    ("free_benchmark", "level", "L0", "write L1"),
    ("acc_check", "task", "acc_check", "write perturb: {mode: improve_precision"),
    ("run_ut", "task", "run_ut", "write perturb: {mode: improve_precision"),
    ("diff_check", "task", "diff_check", "msprobe-megatron compare GOLDEN RUN"),
    ("nan_check", "task", "nan_check", "write dump: {task: nonfinite}"),
    ("exception_dump", "task", "exception_dump", "write dump: {task: nonfinite}"),
    ("nan_analyze", "task", "nan_analyze", "msprobe-megatron diagnose RUN"),
    ("statistics", "statistics.list", ["Functional.relu.3.forward"], "write relu"),
    ("statistics", "statistics.request_id", "7", "leave it out"),
    ("statistics", "statistics.bench_path", "x", "msprobe-megatron compare"),
    ("statistics", "statistics.diff_nums", 1, "msprobe-megatron compare"),
    ("tensor", "tensor.file_format", "bin", "leave it out"),
    ("tensor", "tensor.backward_input", ["x.pt"], "leave it out"),
    ("tensor", "tensor.bench_path", "x", "msprobe-megatron compare"),
    ("tensor", "tensor.diff_nums", 3, "msprobe-megatron compare"),
    ("tensor", "tensor.online_run_ut", True, "msprobe-megatron compare"),
    ("tensor", "tensor.online_run_ut_recompute", True, "msprobe-megatron compare"),
    ("tensor", "tensor.nfs_path", "/n", "msprobe-megatron compare"),
    ("tensor", "tensor.host", "h", "msprobe-megatron compare"),
    ("tensor", "tensor.port", 0, "msprobe-megatron compare"),
    ("tensor", "tensor.tls_path", "/t", "msprobe-megatron compare"),
    ("structure", "structure.list", ["x"], "leave it out"),
    ("overflow_check", "overflow_check.overflow_nums", 1, "write -1"),
    ("overflow_check", "overflow_check.check_mode", "aicore", "write all"),
    ("grad_probe", "grad_probe.grad_level", "L1", "write L0"),
    ("grad_probe", "grad_probe.bounds", [-1, 0, 1], "leave it out"),
]

# Values that are no values of msprobe either: the message names msprobe's own key.
WRONG = [
    ("statistics", "level", "L9", "accepted: L0, L1, mix, debug"),
    ("statistics", "task", "md5", "accepted: statistics, tensor"),
    ("statistics", "dump_path", 5, "name of a directory"),
    ("statistics", "rank", 0, "[] is all"),
    ("statistics", "rank", ["7-3"], "ends before it begins"),
    ("statistics", "step", "5", "[] is all"),
    ("statistics", "step", [-1], "out of range"),
    ("statistics", "extra_info", 1, "true, false"),
    ("statistics", "async_dump", "yes", "true, false"),
    ("statistics", "precision", "medium", "low, high"),
    ("statistics", "statistics.list", "relu", "a list of names"),
    ("statistics", "statistics.list", ["name-regex(()"], "does not compile"),
    ("statistics", "statistics.scope", ["a"], "[] or [name of the first"),
    ("statistics", "statistics.data_mode", ["all", "input"], "mixes all with others"),
    ("statistics", "statistics.data_mode", "all", "a list such as [all]"),
    ("statistics", "statistics.summary_mode", "sha", "statistics, md5, xor"),
    ("statistics", "tensor", 5, "a mapping"),
    ("free_benchmark", "free_benchmark.pert_mode", "noise", "improve_precision, add_noise"),
    ("free_benchmark", "free_benchmark.fuzz_device", "gpu", "npu, cpu"),
    ("free_benchmark", "free_benchmark.fuzz_level", "L2", "accepted: L1"),
    ("free_benchmark", "free_benchmark.fuzz_stage", "backward", "backward with a list"),
    ("free_benchmark", "free_benchmark.preheat_step", 0, "from 1 to"),
]


def file_of(task, key, value):
    document = {**BASE, "task": task}
    if task == "free_benchmark":
        document["level"] = "L1"
    block, _, name = key.rpartition(".")
    if block:
        document[block] = {name: value}
    else:
        document[key] = value
    return json.dumps(document)


def look_up(config, path):
    value = config
    for name in path.split("."):
        value = getattr(value, name)
    return value.describe() if path in ("ranks", "steps") else str(value) if path == "output" else value


@pytest.mark.parametrize(("task", "key", "value", "path", "expected"), HONOURED)
def test_honoured(probe, task, key, value, path, expected):
    config = probe(file_of(task, key, value), "config.json")
    found = look_up(config, path)
    assert found == expected
    assert type(found) is type(expected)
    assert config.source == "config.json"


@pytest.mark.parametrize(("task", "key", "value", "part"), NOTED)
def test_noted(probe, task, key, value, part):
    with_key = probe(file_of(task, key, value), "config.json")
    without = probe(file_of(task, "step", []), "config.json")
    notes = [note for note in with_key.notes if note not in without.notes]
    assert len(notes) == 1
    assert notes[0].startswith(f"{key}: ")
    assert part in notes[0]
    assert with_key.dump == without.dump
    assert with_key.perturb == without.perturb
    assert with_key.monitor == without.monitor


@pytest.mark.parametrize(("task", "key", "value", "part"), REFUSED)
def test_refused_with_what_to_write_instead(refused, task, key, value, part):
    message = refused(file_of(task, key, value), "config.json")
    assert message.startswith(f"config.json: {key}")
    assert "cannot be translated: " in message
    assert part in message


@pytest.mark.parametrize(("task", "key", "value", "part"), WRONG)
def test_wrong_value_names_the_key_of_msprobe(refused, task, key, value, part):
    message = refused(file_of(task, key, value), "config.json")
    assert message.startswith(f"config.json: {key}")
    assert part in message


def test_no_key_of_the_schema_is_without_a_test():
    tested = {(task, key) for task, key, *_ in (*HONOURED, *NOTED, *REFUSED)}
    keys = {key for _, key in tested}
    assert {key for key in COMMON if key not in keys} == set()
    filters_of_one_reader = {"slice", "request_id", "file_format", "backward_input"}
    online = {"online_run_ut", "online_run_ut_recompute", "nfs_path", "host", "port", "tls_path"}
    for block, table in BLOCKS.items():
        for key in table:
            if key in filters_of_one_reader | online:  # one table for statistics and tensor
                assert {f"statistics.{key}", f"tensor.{key}"} & keys
            else:
                assert f"{block}.{key}" in keys
    assert {task for task, key in tested if key == "task"} == set(TASKS)
    assert set(BLOCKS) == set(TASKS)


def test_the_known_schema_is_covered():
    # Written down independently of the tables: the keys msprobe's PyTorch side has had, by its documentation.
    common = "task dump_path rank step level dump_enable extra_info async_dump precision risk_level load"
    common += " custom_op_namespaces enable_dataloader seed is_deterministic acl_config"
    assert set(common.split()) <= set(COMMON)
    statistics = "scope list tensor_list data_mode summary_mode slice request_id"
    assert set(statistics.split()) <= set(BLOCKS["statistics"])
    tensor = "scope list data_mode summary_mode slice request_id bench_path diff_nums file_format backward_input"
    assert set(tensor.split()) <= set(BLOCKS["tensor"])
    benchmark = "scope list fuzz_device pert_mode handler_type fuzz_level fuzz_stage if_preheat"
    benchmark += " preheat_step max_sample"
    assert set(benchmark.split()) == set(BLOCKS["free_benchmark"])
    assert {"overflow_nums", "check_mode"} <= set(BLOCKS["overflow_check"])
    assert set(BLOCKS["grad_probe"]) == {"grad_level", "param_list", "bounds"}


def test_the_file_msprobe_ships(probe):
    shipped = """{
    "task": "statistics", "dump_path": "./dump_path", "rank": [], "step": [], "level": "L1",
    "extra_info": true, "async_dump": false,
    "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    "acc_check": {"white_list": [], "black_list": [], "error_data_path": "./"}
}"""
    config = probe(shipped, "config.json")
    assert config.dump == DumpConfig(level="L1")
    assert config.steps == StepSelection()
    assert config.monitor is config.perturb is None


def test_free_benchmark_of_the_documentation(probe):
    config = probe(
        """{"task":"free_benchmark","dump_path":"./fb","rank":[],"step":["10-12"],"level":"L1",
 "free_benchmark":{"scope":[],"list":["softmax","layer_norm"],"fuzz_device":"npu","pert_mode":"bit_noise",
  "handler_type":"check","fuzz_level":"L1","fuzz_stage":"forward","if_preheat":false,"preheat_step":15,"max_sample":20}}
""",
        "config.json",
    )
    assert config.perturb == PerturbConfig(mode="bit_noise", list=("softmax", "layer_norm"), profile="msprobe")
    assert config.dump is None
    assert config.steps == parse_steps("10-12")


def test_free_benchmark_without_a_block(probe):
    config = probe('{"task": "free_benchmark", "dump_path": "d"}', "config.json")
    assert config.perturb == PerturbConfig(profile="msprobe")
    assert config.dump is None


def test_grad_probe_watches_gradients_only(probe):
    config = probe('{"task": "grad_probe", "dump_path": "d"}', "config.json")
    assert config.monitor == MonitorConfig(activations=False, optimizer=False)
    assert config.dump is None


def test_unknown_key_has_a_hint(refused):
    assert "stp: unknown key (did you mean step?)" in refused('{"task": "statistics", "stp": []}')
    message = refused('{"task": "statistics", "level": "L0", "statistics": {"lst": []}}')
    assert "statistics.lst: unknown key (did you mean list?)" in message


def test_a_file_with_a_key_of_ours_is_ours(refused):
    assert "level: unknown key" in refused("dump: {}\nlevel: L0")


def test_ranks_of_a_translated_file_name_their_key(probe):
    from msprobe_megatron.config import ConfigError

    config = probe('{"task": "statistics", "level": "L0", "rank": [8]}', "config.json")
    with pytest.raises(ConfigError) as caught:
        config.ranks.check(4, {})
    assert str(caught.value) == "config.json: rank: 8 does not exist; accepted: 0..3 (world size 4)"


def test_notes_tell_of_what_was_changed(probe):
    config = probe('{"statistics": {"summary_mode": "xor", "list": ["Module.a.b.C.forward.0"]}}', "config.json")
    text = "\n".join(config.notes)
    assert "statistics.summary_mode: xor is taken as digest: true" in text
    assert "statistics.list[0]: Module.a.b.C.forward.0 is taken as a.b" in text
    assert "level: not written; L1 is taken" in text
    assert "dump_path: not written" in text
    assert config.dump is not None
    assert config.dump.list == ("a.b",)
