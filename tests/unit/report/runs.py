"""Run directories that a page has something to say about: healthy, not finite, diverged, replicas that disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.jobs.compare.faults import Chunks, around, named, weight
from tests.support.forked import run_forked

_MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0"
    " --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --log-interval 100 --no-check-for-nan-in-loss-and-grad"
)
_MICROBATCHES = 4
_LAYOUTS = {
    "single": (1, ""),
    "tp2_pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
}


def _overflow(chunks: Chunks, step: int) -> None:
    """The norm before the MLP of layer 2 gives an infinity in the first microbatch of one step."""
    module, calls = named(chunks, "decoder.layers.2.pre_mlp_layernorm"), []

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        output = original(*args, **kwargs)
        if len(calls) == _MICROBATCHES * step + 1:
            output = output.clone()
            output.view(-1)[0] = float("inf")
        return output

    if module is not None:
        around(module, forward)


def _attention_scale(chunks: Chunks, step: int) -> None:
    """From one step on, attention of layer 1 is scaled twice on one of two tensor-parallel ranks."""
    from msprobe_megatron.topology import coordinates

    module, calls = named(chunks, "decoder.layers.1.self_attention.core_attention"), []

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == _MICROBATCHES * step + 1:
            module.softmax_scale *= 2
        return original(*args, **kwargs)

    if module is not None and coordinates.current().of("tp") == 1:
        around(module, forward)


def _torn_weight(chunks: Chunks, step: int) -> None:
    """A norm weight that all ranks should share is larger on one of them."""
    from msprobe_megatron.topology import coordinates

    value = weight(chunks, "decoder.layers.1.input_layernorm.weight")
    if value is not None and coordinates.current().of("tp") == 1:
        value.data[3] += 0.5


_FAULTS = {"none": None, "overflow": _overflow, "attention_scale": _attention_scale, "torn_weight": _torn_weight}


def _train(argv: list[str], fault: str, step: int) -> list[float]:
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    change = _FAULTS[fault]
    return run(argv, Callbacks(ready=(lambda chunks, _: change(chunks, step)) if change else None)).losses


def make_run(out: Path, layout: str, *, steps: int, fault: str = "none", since: int = 0) -> Path:
    """Train `steps` steps in forked ranks, all recorded into `out`, with a fault from step `since` on."""
    world, flags = _LAYOUTS[layout]
    probe = out.parent / f"{out.name}.yaml"
    probe.write_text("steps: all\ndump: {level: L0, task: statistics}\n")
    argv = [*_MODEL.split(), *flags.split(), "--train-iters", str(steps), "--msprobe-device", "cpu"]
    run_forked(world, _train, [*argv, "--msprobe-config", str(probe), "--msprobe-output", str(out)], fault, since)
    return out
