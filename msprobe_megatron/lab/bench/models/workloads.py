"""The models of the benches: the demo GPT in the sizes of the tables, and the seed's models, small."""

from __future__ import annotations

from collections.abc import Iterable

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed, Workload
from msprobe_megatron.lab.bench.options import Options

_LAYERS = "--num-layers 4 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0"
_LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope"
_COMMON = f"{_LAYERS} {_LLAMA}"
_SMALL = "--hidden-size 64 --num-attention-heads 4 --seq-length 32"

_MIDDLE = "--hidden-size 512 --num-attention-heads 8 --seq-length 256 --bf16"
_LARGE = "--hidden-size 1024 --num-attention-heads 16 --seq-length 512"

WORKLOADS = {
    "h64": Workload("h64", f"{_COMMON} {_SMALL}", turns=60, steps=4),
    "h512": Workload("h512", f"{_COMMON} {_MIDDLE}", turns=5, steps=2),
    "h1024": Workload("h1024", f"{_COMMON} {_LARGE}", turns=20, steps=1, warm_up=0, twice=("loaded",)),
}

# What tells the models apart; width and depth are those of a small machine.
_WIDTH = "--hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16"
_DEPTH = "--num-layers 2 --micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0"
_UNTIED = "--untie-embeddings-and-output-weights --disable-bias-linear"
ARCHITECTURES = {
    "llama2": f"{_LLAMA} {_UNTIED}",
    "aquila2": f"{_LLAMA} {_UNTIED} --rotary-base 10000",
    "baichuan2": f"{_LLAMA} {_UNTIED} --norm-epsilon 1e-6",
    "bloom": "--normalization LayerNorm --position-embedding-type learned_absolute",
    "internlm": f"{_LLAMA} --untie-embeddings-and-output-weights --add-qkv-bias --disable-bias-linear",
    "qwen": f"{_LLAMA} {_UNTIED} --add-qkv-bias --norm-epsilon 1e-6",
    "gemma": f"{_LLAMA} --disable-bias-linear --kv-channels 64 --num-query-groups 8",
}


def workload_of(model: str, turns: int = 5, steps: int = 2) -> Workload:
    """The workload of a named architecture, small."""
    return Workload(model, f"{_DEPTH} {_WIDTH} {ARCHITECTURES[model]}", turns, steps)


def asked(options: Options, usual: Iterable[Workload]) -> list[Workload]:
    """The workloads of `--model`, or the usual ones; flags of Megatron are taken as they are."""
    if options.model is None:
        return options.chosen(usual)
    turns = options.turns or 5
    if options.model.startswith("--"):
        return [Workload("model", options.model, turns, 2)]
    names = list(ARCHITECTURES) if options.model == "all" else [options.model]
    return [workload_of(known(name, ARCHITECTURES), turns) for name in names]


def known(name: str, names: Iterable[str]) -> str:
    """The name, if it is one of `names`; else an error that lists them."""
    if name not in (accepted := list(names)):
        raise BenchFailed(
            f"--model {name!r}: accepted are {', '.join(accepted)}, all, and flags of Megatron"
            ' (--model="--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64")'
        )
    return name
