"""Every section of the probe file: defaults, accepted values and each refusal by what it says."""

import dataclasses
from pathlib import Path

import pytest

from msprobe_megatron.config import (
    Alert,
    ChecksConfig,
    ConfigError,
    DumpConfig,
    Limits,
    MonitorConfig,
    Overrides,
    PerturbConfig,
    RankSelection,
    RecorderConfig,
    StepSelection,
    Target,
    TensorChoice,
    from_document,
    load,
    parse_steps,
)
from msprobe_megatron.config.sections.top import SECTIONS, ProbeConfig

WHOLE = """
output: ./probe_out
ranks: {tp: 0, dp: [0, 1]}
steps: [10, "20-22", 100-1000/100]
dump:    {level: mix, task: tensor, digest: md5, sketch: 16, list: [mlp, '/layers\\.[0-3]\\./'],
          data_mode: [forward, output], stacks: false, microbatches: [0], layers: 0-3}
monitor: {activations: false, gradients: true, optimizer: false, parameters: true, comm: true, every: 5,
          targets: {decoder.layers.0: {input: "tuple[2]:0", output: tensor}, embedding: {}},
          alerts: [nonfinite, {rule: spike, threshold: 0.5}, {rule: limit, threshold: 10000}],
          format: [parquet, tensorboard]}
perturb: {mode: add_noise, handler: check, stage: backward, list: [softmax], preheat: true, preheat_steps: 3,
          max_samples: 7, modules: [linear_qkv], layers: 0-3, microbatches: 0, profile: msprobe, budget: all,
          device: npu, ulps: 2, rows: all, twin: precision}
checks:  {replicas: false, collectives: true}
recorder: {keep_steps: 2, on: [signal, nonfinite]}
limits:  {host_memory: 1GiB, disk: 10GB}
strict: true
"""


def test_every_key_is_read(probe):
    config = probe(WHOLE)
    assert config.output == Path("probe_out")
    assert config.ranks.describe() == "{tp: 0, dp: 0-1}"
    assert config.steps == parse_steps("10,20-22,100-1000/100")
    assert config.dump == DumpConfig(
        level="mix",
        task="tensor",
        digest="md5",
        sketch=16,
        list=("mlp", r"/layers\.[0-3]\./"),
        data_mode=("forward", "output"),
        stacks=False,
        microbatches=parse_steps("0"),
        layers=parse_steps("0-3"),
    )
    assert config.monitor == MonitorConfig(
        activations=False,
        gradients=True,
        optimizer=False,
        parameters=True,
        comm=True,
        every=5,
        targets=(
            Target("decoder.layers.0", input=TensorChoice(2, 0), output=TensorChoice()),
            Target("embedding"),
        ),
        alerts=(Alert("nonfinite"), Alert("spike", 0.5), Alert("limit", 10000.0)),
        format=("parquet", "tensorboard"),
    )
    assert config.perturb == PerturbConfig(
        mode="add_noise",
        stage="backward",
        list=("softmax",),
        modules=("linear_qkv",),
        layers=parse_steps("0-3"),
        microbatches=parse_steps("0"),
        profile="msprobe",
        budget=1.0,
        device="npu",
        ulps=2,
        rows=0,
        preheat=True,
        preheat_steps=3,
        max_samples=7,
    )
    assert PerturbConfig().share == 0.05
    assert PerturbConfig(list=("softmax",)).share == 1.0
    assert config.checks == ChecksConfig(replicas=False, collectives=True)
    assert config.recorder == RecorderConfig(keep_steps=2, on=("signal", "nonfinite"))
    assert config.limits == Limits(host_memory=2**30, disk=10**10)
    assert config.strict is True
    assert config.source == "probe.yaml"
    assert config.raw["dump"]["digest"] == "md5"
    assert config.notes == ()


def test_defaults(probe):
    config = probe("dump: {}")
    assert config == ProbeConfig(dump=DumpConfig(), source="probe.yaml")
    assert (config.output, config.ranks, config.steps) == (
        Path("probe_out"),
        RankSelection(),
        StepSelection(),
    )
    assert config.limits == Limits(2 * 1024**3, None)
    assert config.dump == DumpConfig(
        "L0", "statistics", False, 0, (), (), ("all",), True, microbatches=None, layers=None
    )
    assert [getattr(config, name) for name in SECTIONS[1:]] == [None] * 4
    assert config.strict is False


def test_the_examples_of_the_sections(probe):
    config = probe(
        """
monitor: {activations: true, gradients: true, optimizer: true, parameters: false, comm: false, every: 1,
          targets: {}, alerts: [], format: [parquet, tensorboard]}
perturb: {mode: add_noise, handler: check, stage: forward, list: [softmax], preheat: false}
checks:  {replicas: true, collectives: false}
recorder: {keep_steps: 4, on: [nonfinite, alert, signal]}
"""
    )
    assert config.monitor == MonitorConfig(format=("parquet", "tensorboard"))
    assert config.perturb == PerturbConfig(mode="add_noise", list=("softmax",))
    assert config.checks == ChecksConfig()
    assert config.recorder == RecorderConfig()


def test_everything_is_frozen(probe):
    config = probe(WHOLE)
    for part in (
        config,
        *(getattr(config, name) for name in SECTIONS),
        config.limits,
        config.steps,
        config.ranks,
    ):
        name = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


def test_home_directory(probe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert probe("output: ~/runs\ndump: {}").output == Path("/home/somebody/runs")


REFUSED = [
    # the document
    ("", ["is empty", "accepted: keys such as"]),
    ("- dump", ["not a mapping at the top"]),
    ("dump", ["not a mapping at the top"]),
    ("steps: [1]", ["requests nothing", "dump, monitor, perturb, checks, recorder", "dump: {level: L0}"]),
    ("dmup: {}", ["dmup: unknown key (did you mean dump?)", "accepted: output, ranks, steps"]),
    ("dump: {}\nstep: [1]", ["step: unknown key (did you mean steps?)"]),
    ("dump: {}\n'bad\\nkey': 1", ["unknown key"]),
    # output, strict, steps, ranks, limits
    ("dump: {}\noutput: 5", ["output: 5 is not text", "name of a directory"]),
    ("dump: {}\noutput: ''", ["output: '' is empty"]),
    ('dump: {}\noutput: "a\\0b"', ["output: 'a\\x00b' cannot be the name"]),
    ('dump: {}\noutput: "\\uD800"', ["output: '\\ud800' cannot be the name"]),
    ("dump: {}\noutput: ~no_such_user_xyz/a", ["output: '~no_such_user_xyz/a' cannot be the name"]),
    ("dump: {}\nstrict: 1", ["strict: 1 is not a boolean", "accepted: true, false"]),
    ("dump: {}\nstrict: yes", ["strict: 'yes' is not a boolean"]),
    ("dump: {}\nsteps: []", ["steps: [] selects nothing"]),
    ("dump: {}\nsteps: abc", ["steps: 'abc' is not", "a list of these, all, none, or {after_start"]),
    ("dump: {}\nranks: {pp: []}", ["ranks.pp: [] selects nothing"]),
    ("dump: {}\nlimits: {memory: 2GiB}", ["limits.memory: unknown key", "host_memory, disk"]),
    ("dump: {}\nlimits: {host_memory: 2XB}", ["limits.host_memory: '2XB'", "accepted: a size above 0"]),
    ("dump: {}\nlimits: 5GiB", ["limits: '5GiB' is not a mapping"]),
    # dump
    ("dump:", ["dump: null is not a mapping", "level, task"]),
    ("dump: L0", ["dump: 'L0' is not a mapping"]),
    ("dump: [level]", ["dump: ['level'] is not a mapping"]),
    ("dump: {lvl: L0}", ["dump.lvl: unknown key (did you mean level?)"]),
    ("dump: {level: L2}", ["dump.level: 'L2' is not known", "accepted: L0, L1, mix, debug"]),
    ("dump: {level: 0}", ["dump.level: 0 is not known"]),
    ("dump: {level: [L0]}", ["dump.level: ['L0'] is not known"]),
    ("dump: {task: all}", ["dump.task: 'all'", "accepted: statistics, tensor, structure, nonfinite"]),
    ("dump: {digest: sha1}", ["dump.digest: 'sha1' is not a digest", "accepted: false, true, md5, crc32"]),
    ("dump: {digest: 1}", ["dump.digest: 1 is not a digest"]),
    ("dump: {digest: [md5]}", ["dump.digest: ['md5'] is not a digest"]),
    ("dump: {sketch: -1}", ["dump.sketch: -1 is out of range", "from 0 to 4096"]),
    ("dump: {sketch: true}", ["dump.sketch: true is not a whole number"]),
    ("dump: {sketch: 1.0}", ["dump.sketch: 1.0 is not a whole number"]),
    ("dump: {list: mlp}", ["dump.list: 'mlp' is not a list"]),
    ("dump: {list: [1]}", ["dump.list[0]: 1 is not text"]),
    ("dump: {list: [a, '']}", ["dump.list[1]: '' is empty"]),
    ("dump: {list: ['/(/']}", ["dump.list[0]: '/(/' does not compile", "accepted: part of a name"]),
    ("dump: {list: ['/abc']}", ["dump.list[0]: '/abc' is not closed"]),
    ("dump: {list: ['//']}", ["dump.list[0]: '//' is not closed"]),
    ("dump: {list: ['/a{99999999999999999999}/']}", ["dump.list[0]:", "does not compile"]),
    ("dump: {scope: [a]}", ["dump.scope: ['a'] has 1 names", "[] or [name of the first"]),
    ("dump: {scope: [a, b, c]}", ["dump.scope:", "has 3 names"]),
    ("dump: {scope: [a, 1]}", ["dump.scope[1]: 1 is not text"]),
    ("dump: {scope: [a, b], list: [c]}", ["dump.scope: ['a', 'b'] stands beside a list", "either list or scope"]),
    ("dump: {scope: [a, b], level: debug}", ["dump.scope:", "level is debug"]),
    ("dump: {tensor_list: [a], task: tensor}", ["dump.tensor_list: ['a'] belongs to task statistics"]),
    ("dump: {slice: {dim: 0}}", ["dump.slice:", "is not a list"]),
    ("dump: {slice: [{}]}", ["dump.slice[0]: {} cuts nothing", "dim, size, begin, end"]),
    ("dump: {slice: [{dim: -1}]}", ["dump.slice[0].dim: -1 is out of range"]),
    ("dump: {slice: [{begin: -4}]}", ["dump.slice[0].begin: -4 is out of range"]),
    ("dump: {slice: [{begin: 4, end: 4}]}", ["dump.slice[0].end: 4 is not beyond begin, which is 4"]),
    ("dump: {slice: [{dims: 1}]}", ["dump.slice[0].dims: unknown key (did you mean dim?)"]),
    ("dump: {slice: [{dim: 1}], digest: true}", ["dump.slice:", "digest: false and sketch: 0"]),
    ("dump: {slice: [{dim: 1}], task: structure}", ["dump.slice:", "task is structure"]),
    ("dump: {level: L1, functions: [relu]}", ["dump.functions[0]: 'relu' does not say where", "module:function"]),
    ("dump: {level: L0, functions: ['a:b']}", ["dump.functions:", "level L1 or mix"]),
    ("dump: {data_mode: []}", ["dump.data_mode: [] selects nothing", "forward, backward, input, output"]),
    ("dump: {data_mode: all}", ["dump.data_mode: 'all' is not a list"]),
    ("dump: {data_mode: [fwd]}", ["dump.data_mode[0]: 'fwd' is not known"]),
    ("dump: {data_mode: [all, input]}", ["dump.data_mode: ['all', 'input'] mixes all with others"]),
    ("dump: {stacks: 1}", ["dump.stacks: 1 is not a boolean"]),
    ("dump: {microbatches: []}", ["dump.microbatches: [] selects nothing"]),
    ("dump: {layers: [x]}", ["dump.layers[0]: 'x' is not"]),
    ("dump: {task: structure, digest: true}", ["dump.digest: true has no values", "task is structure"]),
    ("dump: {task: structure, sketch: 4}", ["dump.sketch: 4 has no values", "task is structure"]),
    # monitor
    ("monitor: {activation: true}", ["monitor.activation: unknown key (did you mean activations?)"]),
    ("monitor: {activations: 1}", ["monitor.activations: 1 is not a boolean"]),
    ("monitor: {every: 0}", ["monitor.every: 0 is out of range", "from 1 to"]),
    ("monitor: {activations: false, gradients: false, optimizer: false}", ["monitor: requests nothing", "comm"]),
    ("monitor: {targets: [a]}", ["monitor.targets: ['a'] is not a mapping"]),
    ("monitor: {targets: {a: tensor}}", ["monitor.targets.a: 'tensor' is not a mapping"]),
    ("monitor: {targets: {'': {}}}", ["stands under an empty name"]),
    (
        "monitor: {targets: {a: {inputs: tensor}}}",
        ["monitor.targets.a.inputs: unknown key (did you mean input?)"],
    ),
    ("monitor: {targets: {a: {input: tuple}}}", ["monitor.targets.a.input: 'tuple'", "tuple[N]:i"]),
    ("monitor: {targets: {a: {input: 'tuple[2]:2'}}}", ["'tuple[2]:2' names a tensor that is not there"]),
    ("monitor: {targets: {a: {input: 'tuple[0]'}}}", ["'tuple[0]' names a tensor that is not there"]),
    ("monitor: {alerts: nonfinite}", ["monitor.alerts: 'nonfinite' is not a list"]),
    ("monitor: {alerts: [nan]}", ["monitor.alerts[0]: 'nan' is not known", "nonfinite, spike, limit"]),
    ("monitor: {alerts: [replica]}", ["monitor.alerts[0]: 'replica' needs the checks section"]),
    ("monitor: {alerts: [{rule: vanish, action: {record: 2}}]}", ["monitor.alerts[0]: 'vanish' is to record steps"]),
    ("monitor: {alerts: [{rule: vanish, action: {recorder: true}}]}", ["keep the flight recorder and there is none"]),
    ("monitor: {alerts: [limit]}", ["monitor.alerts[0]: 'limit' needs a threshold"]),
    ("monitor: {alerts: [custom]}", ["monitor.alerts[0]: 'custom' needs an expression"]),
    ("monitor: {alerts: [{rule: spike, expression: norm > 1}]}", ["takes no expression"]),
    ("monitor: {alerts: [{rule: limit, threshold: 1, window: 8}]}", ["takes no window", "spike, vanish"]),
    ("monitor: {alerts: [{rule: vanish, deviations: 8}]}", ["takes no deviations"]),
    ("monitor: {alerts: [{rule: spike, kinds: [weights]}]}", ["alerts[0].kinds[0]: 'weights' is not known", "loss"]),
    ("monitor: {alerts: [{rule: spike, cooldown: -1}]}", ["alerts[0].cooldown: -1 is out of range"]),
    ("monitor: {alerts: [{rule: custom, expression: size > 1}]}", ["alerts[0].expression: 'size > 1'", "no column"]),
    ("monitor: {alerts: [{rule: vanish, action: {}}]}", ["alerts[0].action: {} does nothing", "record: STEPS"]),
    ("monitor: {alerts: [{rule: vanish, action: {command: [1]}}]}", ["alerts[0].action.command[0]: 1 is not text"]),
    ("monitor: {alerts: [{rule: vanish, action: {command: ls -l}}]}", ["alerts[0].action.command: 'ls -l' is not a"]),
    ("monitor: {alerts: [{threshold: 1}]}", ["monitor.alerts[0]: {'threshold': 1} has no rule"]),
    ("monitor: {alerts: [{rule: nonfinite, threshold: 1}]}", ["takes no threshold"]),
    ("monitor: {alerts: [{rule: spike, threshold: 0}]}", ["monitor.alerts[0].threshold: 0 is out of range"]),
    (
        "monitor: {alerts: [{rule: spike, threshold: .inf}]}",
        ["monitor.alerts[0].threshold: inf is out of range"],
    ),
    (
        "monitor: {alerts: [{rule: spike, threshold: .nan}]}",
        ["monitor.alerts[0].threshold: nan is out of range"],
    ),
    (
        "monitor: {alerts: [{rule: spike, threshold: true}]}",
        ["monitor.alerts[0].threshold: true is not a number"],
    ),
    ("monitor: {format: []}", ["monitor.format: [] selects nothing"]),
    ("monitor: {format: [csv]}", ["monitor.format[0]: 'csv' is not known", "parquet, tensorboard"]),
    # perturb
    ("perturb: {mode: noise}", ["perturb.mode: 'noise' is not known", "add_noise, bit_noise"]),
    ("perturb: {handler: both}", ["perturb.handler: 'both'", "check, fix"]),
    ("perturb: {stage: both}", ["perturb.stage: 'both'", "forward, backward"]),
    (
        "perturb: {list: [a], scope: [b]}",
        ["perturb.scope: ['b'] stands beside a list", "either list or scope"],
    ),
    (
        "perturb: {stage: backward, profile: msprobe}",
        ["perturb.stage: 'backward' of the whole network", "a list, or profile: ulp"],
    ),
    ("perturb: {mode: to_cpu, device: npu}", ["perturb.device: 'npu' is not where mode to_cpu runs", "device: cpu"]),
    ("perturb: {device: cpu}", ["perturb.device: 'cpu' is not where mode improve_precision", "mode: to_cpu"]),
    ("perturb: {handler: fix, budget: 5%}", ["perturb.budget: '5%' would repair", "budget: all"]),
    ("perturb: {preheat: true, budget: 5%}", ["perturb.preheat: true counts every call", "budget: all"]),
    ("perturb: {twin: sibling}", ["perturb.twin: 'sibling' is the code", "handler: fix with names in modules"]),
    ("perturb: {budget: 0%}", ["perturb.budget: '0%' is not a share", "5%, or all"]),
    ("perturb: {budget: 0.05}", ["perturb.budget: 0.05 is not a share"]),
    ("perturb: {budget: 101%}", ["perturb.budget: '101%' is not a share"]),
    ("perturb: {rows: 0}", ["perturb.rows: 0 is out of range"]),
    ("perturb: {preheat_steps: -1}", ["perturb.preheat_steps: -1 is out of range"]),
    (
        "perturb: {handler: fix, mode: add_noise}",
        ["perturb.handler: 'fix' cannot repair with mode add_noise"],
    ),
    ("perturb: {handler: fix, preheat: true}", ["perturb.handler: 'fix' has no thresholds to preheat"]),
    ("perturb: {preheat: 5}", ["perturb.preheat: 5 is not a boolean"]),
    ("perturb: {preheat_steps: 0}", ["perturb.preheat_steps: 0 is out of range"]),
    ("perturb: {max_samples: x}", ["perturb.max_samples: 'x' is not a whole number"]),
    ("perturb: {scope: [1]}", ["perturb.scope[0]: 1 is not text"]),
    # checks, recorder
    ("checks: {replica: true}", ["checks.replica: unknown key (did you mean replicas?)"]),
    (
        "checks: {replicas: false, optimizer: false, rng: false, update: false, products: false}",
        ["checks: requests nothing", "replicas, optimizer, rng"],
    ),
    ("recorder: {keep_steps: 0}", ["recorder.keep_steps: 0 is out of range"]),
    ("recorder: {on: []}", ["recorder.on: [] selects nothing", "nonfinite, alert, signal"]),
    ("recorder: {on: [crash]}", ["recorder.on[0]: 'crash' is not known"]),
]


@pytest.mark.parametrize(("text", "parts"), REFUSED, ids=[text for text, _ in REFUSED])
def test_refused(refused, text, parts):
    message = refused(text)
    for part in parts:
        assert part in message
    assert "; accepted: " in message


def test_long_values_are_cut(refused):
    message = refused(f"dump: {{level: {'x' * 5000}}}")
    assert len(message) < 200
    assert "…" in message


def test_asked_twice_is_asked_once(probe):
    assert probe("dump: {data_mode: [input, forward, input]}").dump.data_mode == ("input", "forward")


def test_overrides(probe):
    text = "output: from_file\nsteps: [1]\nstrict: false\ndump: {}"
    config = probe(text, overrides=Overrides(output="from_flag", steps="5-6", strict=True))
    assert (config.output, config.steps.describe(), config.strict) == (Path("from_flag"), "5-6", True)
    config = probe(text, overrides=Overrides())
    assert (config.output, config.steps.describe(), config.strict) == (Path("from_file"), "1", False)


def test_override_errors_name_the_flag(tmp_path):
    path = tmp_path / "probe.yaml"
    path.write_text("dump: {}")
    with pytest.raises(ConfigError, match="^command line: --msprobe-steps: '9-1' is a range"):
        load(path, Overrides(steps="9-1"))
    with pytest.raises(ConfigError, match="^command line: --msprobe-output: '' is empty"):
        load(path, Overrides(output=""))


def test_document_in_memory():
    config = from_document({"dump": {"list": ("a",), "level": "L0"}}, "my script")
    assert config.dump == DumpConfig(list=("a",))
    assert config.source == "my script"
    with pytest.raises(ConfigError, match="^my script: key 1 is not text"):
        from_document({1: 2}, "my script")
    with pytest.raises(ConfigError, match="^my script: dump: key 1 is not text"):
        from_document({"dump": {1: 2}}, "my script")
