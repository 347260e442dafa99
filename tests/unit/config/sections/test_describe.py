"""The summary names everything that will be recorded, and nothing else."""

from msprobe_megatron.config import describe


def test_small_file(probe):
    text = describe(probe("steps: [10, 20-22]\nranks: {tp: 0}\ndump: {list: [mlp], data_mode: [forward, input]}"))
    assert text.splitlines() == [
        "probe.yaml",
        "  output   probe_out",
        "  ranks    {tp: 0}",
        "  steps    10, 20-22",
        "  dump     statistics of modules (L0): forward/input data of names with mlp, with stacks",
        "  limits   host memory 2GiB",
        "  faults   disarm the probe, training goes on",
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
        " microbatches 0, layers 0-3, from a to b, without stacks",
        "gradients, optimizer, parameters of 2 targets, every 5 steps, as parquet; alerts: nonfinite, spike 0.5",
        "check by bit_noise (ulp) in backward of softmax, thresholds from 15 steps",
        "checks   replicas, optimizer, rng, collectives, every 1 steps",
        "recorder last 2 steps, on signal",
        "limits   host memory 2GiB, disk 5GiB",
        "stop the job (strict)",
    ):
        assert part in text


def test_translation_is_told(probe):
    text = describe(probe('{"task": "statistics", "dump_path": "d", "level": "L0", "async_dump": true}'))
    assert "  note     async_dump: the writer is always asynchronous" in text.splitlines()
