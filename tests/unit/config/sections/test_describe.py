"""The summary names everything that will be recorded, and nothing else."""

from msprobe_megatron.config import describe


def test_small_file(probe):
    text = describe(probe("steps: [10, 20-22]\nranks: {tp: 0}\ndump: {list: [mlp], data_mode: [forward, input]}"))
    assert text.splitlines() == [
        "probe.yaml",
        "  output    ./probe_out",
        "  ranks     {tp: 0}",
        "  steps     10, 20-22",
        "  dump      statistics of modules (L0): forward/input data of names matching mlp, with call stacks",
        "  limits    host memory 2GiB",
        "  faults    disable the probe, training continues",
    ]


def test_whole_file(probe):
    text = describe(
        probe(
            """
dump: {level: mix, task: tensor, digest: true, sketch: 8, scope: [a, b], stacks: false, microbatches: 0,
       layers: 0-3}
monitor: {parameters: true, activations: false, every: 5, targets: {a: {}, b: {}},
          alerts: [nonfinite, {rule: spike, threshold: 0.5}]}
perturb: {mode: bit_noise, stage: backward, list: [softmax], preheat: true}
checks: {collectives: true}
recorder: {keep_steps: 2, on: [signal]}
limits: {disk: 5GiB}
strict: true
"""
        )
    )
    for part in (
        "tensor of modules and API calls (mix): all data of all names, digest sum64, sketch of 8,"
        " microbatches 0, layers 0-3, from a to b, without call stacks",
        "gradients, optimizer, parameters of 2 target(s), every 5 steps, as parquet; alerts: nonfinite, spike 0.5",
        "check with bit_noise (profile ulp), backward of softmax, limits learned over 15 steps",
        "checks    replicas, optimizer, rng, collectives, update, products, every 100 steps",
        "recorder  last 2 steps, written on signal",
        "limits    host memory 2GiB, disk 5GiB",
        "stop the job (strict)",
    ):
        assert part in text


def test_settings_without_words_of_their_own_are_listed(probe):
    text = describe(
        probe("dump: {apis: core, slice: [{dim: 1, end: 4}]}\nrecorder: {times: 2}\nmonitor: {direction: forward}")
    )
    assert "with call stacks, apis: core, slice: [{dim: 1, end: 4}]" in text
    assert "signal, times: 2" in text
    assert "as parquet, direction: forward" in text
    assert "apis" not in describe(probe("dump: {apis: focus}"))


def test_translation_is_reported(probe):
    text = describe(probe('{"task": "statistics", "dump_path": "d", "level": "L0", "async_dump": true}'))
    assert "  note      async_dump: the writer is always asynchronous" in text.splitlines()
