"""How much the task `tensor` writes, by calculation, and how fast: the tables of data volume of seeds 000 and 001.

The size of a dump is a sum of products of the model's dimensions. Their coefficients are found once from small models
of the same architecture, cut as the given one is; a further small model that was not among them says how far the
calculation is off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.models.layouts import ONE_CARD, Layout
from msprobe_megatron.lab.bench.models.lone_rank import lone_rank
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.tables.write_speed import speeds, why_slow

ABOUT = (
    "Bytes of saved tensors of one step, each distinct tensor once (bf16), by level and microbatches a step: on one"
    " rank and on eight; files at most. tp8: the model is cut over the eight by tensor and sequence parallelism; else"
    " each of them holds all of it. Calculated from small models of the same architecture and layout; held out: a model"
    " that was not among them, and how far its calculated size is off. Attention is not fused: its scores are half of"
    " L1; the seeds fuse, so that their sizes are others. speed: what the kit's writer reaches over a plain sequential"
    " one on the same disk, and the seconds in which training waited for it."
)
LEVELS = ("L0", "L1", "mix")


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model on one rank."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    sequence: int
    vocabulary: int
    microbatch: int = 1
    microbatches: int = 1

    def terms(self) -> list[float]:
        """The products of dimensions that tensors of a step have as sizes."""
        tokens = self.sequence * self.microbatch * self.microbatches
        passes = self.microbatches
        per_head = self.hidden // self.heads
        inside = [
            *(tokens * self.hidden, tokens * self.ffn, tokens * self.sequence * self.heads, tokens * self.heads),
            *(tokens, self.sequence * self.sequence * passes, self.sequence * per_head * passes),
            # Weights once a step; at L1 also what each microbatch adds to their gradients.
            *(self.hidden * self.hidden, self.hidden * self.ffn, self.hidden),
            *(self.hidden * self.hidden * passes, self.hidden * self.ffn * passes, self.hidden * passes),
        ]
        outside = [
            *(tokens * self.hidden, tokens * self.vocabulary, tokens, passes),
            *(self.vocabulary * self.hidden, self.hidden),
            *(self.vocabulary * self.hidden * passes, self.hidden * passes),
            *(self.sequence * self.sequence * passes, self.sequence * per_head * passes),
        ]
        return [float(self.layers * n) for n in inside] + [float(n) for n in outside]

    def flags(self) -> list[str]:
        """The demo job of this shape: LLaMA's architecture."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}"
            f" --num-attention-heads {self.heads} --seq-length {self.sequence} --vocab-size {self.vocabulary}"
            f" --micro-batch-size {self.microbatch} --global-batch-size {self.microbatch * self.microbatches}"
            " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
            " --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --bf16"
            " --train-iters 1 --log-interval 1000000000"
        ).split()


# Each differs from the others so that every term can be told apart; Megatron pads vocabularies to multiples of 128.
CALIBRATION = (
    Shape(1, 16, 24, 2, 8, 128),
    Shape(2, 16, 24, 2, 8, 128),
    Shape(1, 32, 24, 2, 8, 128),
    Shape(2, 32, 24, 2, 8, 128),
    Shape(1, 16, 56, 2, 8, 128),
    Shape(2, 32, 56, 2, 8, 128),
    Shape(1, 16, 24, 4, 8, 128),
    Shape(2, 16, 24, 4, 8, 128),
    Shape(1, 16, 24, 2, 24, 128),
    Shape(2, 16, 24, 2, 24, 128),
    Shape(1, 16, 24, 2, 8, 256),
    Shape(1, 32, 24, 2, 8, 256),
    Shape(1, 16, 24, 2, 8, 128, 3),
    Shape(2, 16, 24, 2, 8, 128, 3),
    Shape(1, 16, 24, 2, 8, 128, 1, 3),
    Shape(2, 16, 24, 2, 8, 128, 1, 3),
    Shape(2, 48, 56, 4, 24, 256, 2, 2),
    Shape(1, 48, 40, 8, 16, 128, 2, 1),
    Shape(3, 32, 24, 8, 40, 256, 1, 3),
    Shape(3, 64, 96, 2, 16, 256, 2, 2),
    Shape(2, 64, 32, 8, 48, 128, 3, 2),
    Shape(1, 48, 80, 2, 32, 256, 1, 2),
    Shape(1, 32, 24, 2, 8, 128, 1, 4),
    Shape(2, 32, 24, 2, 8, 128, 1, 4),
    Shape(1, 16, 56, 2, 8, 128, 1, 4),
    Shape(2, 32, 56, 2, 8, 128, 1, 4),
    Shape(1, 16, 24, 2, 8, 256, 1, 4),
    Shape(1, 64, 40, 4, 16, 256, 1, 3),
    Shape(3, 48, 120, 2, 8, 128, 2, 4),
    Shape(4, 64, 24, 4, 8, 256, 1, 1),
)
HELD_OUT = Shape(4, 80, 128, 4, 32, 384, 2, 2)
MODELS = {
    "LLaMA2-7B": Shape(32, 4096, 11008, 32, 4096, 32000),
    "LLaMA2-13B": Shape(40, 5120, 13824, 40, 4096, 32000),
    "GPT-3, 1 layer": Shape(1, 12288, 49152, 24, 1024, 50304, 2),
    "GPT-3, 8 layers": Shape(8, 12288, 49152, 24, 1024, 50304, 2),
}
TP8 = Layout(tp=8, sequence_parallel=True)
BATCHES, RANKS = (1, 2, 3), 8
# Megatron's flags that a size follows from; those without a value must be given.
_MODEL_FLAGS: dict[str, int | None] = {
    **{"--num-layers": None, "--hidden-size": None, "--num-attention-heads": None, "--seq-length": None},
    **{"--ffn-hidden-size": 0, "--vocab-size": 32000, "--micro-batch-size": 1},
    **{"--tensor-model-parallel-size": 1, "--pipeline-model-parallel-size": 1, "--context-parallel-size": 1},
}
Model = tuple[Shape, Layout]


def bench(options: Options) -> list[dict[str, Any]]:
    """Lines for the models of the seeds, the error of the calculation, and the speed of the writer."""
    models = _models(options.model)
    layouts = list(dict.fromkeys(layout for _, layout in models.values()))
    lines: list[dict[str, Any]] = []
    for level in (level for level in LEVELS if options.only in (None, level)):
        for layout in layouts:
            weights = {}
            for name, (stage, _) in layout.stages().items():
                weights[name], line = _calibrated(level, layout, stage, options)
                lines.append({**line, "name": _joined("held out", level, layout_text(layout), name)})
            for model, (shape, own) in models.items():
                if own == layout:
                    lines += _lines(model, level, layout.divided(shape), layout, weights)
    if options.only in (None, "speed"):
        options.progress("speed of the writer")
        lines.append({"name": "speed", **speeds(options.out, options.turns or 5), "target": 0.8})
    return lines


def why_missed(line: Mapping[str, Any], out: Path) -> list[str]:
    """The profile of a line that missed what was asked: of the writer, or of the calculation."""
    if line["name"] == "speed":
        return [why_slow(out)]
    _, level, *rest = str(line["name"]).split(":")
    every = {layout_text(layout): layout for _, layout in _models(None).values()}
    words = [word for word in rest if word not in ("first", "middle", "last")]
    layout = every.get(words[0] if words else "")
    if layout is None:
        return []
    shapes = tuple(layout.fitting(shape) for shape in CALIBRATION)
    sizes = [recorded(shape, level, layout)[0] for shape in shapes]
    weights = fitted(shapes, sizes)
    off = [abs(calculation(weights, shape) / size - 1) for shape, size in zip(shapes, sizes, strict=True)]
    worst = shapes[off.index(max(off))]
    told = "a product of dimensions is missing" if max(off) > 0.02 else "it is a matter of scale"  # noqa: PLR2004
    return [f"the small models themselves are met to within {max(off):.2%} (the worst is {worst}): {told}"]


def _calibrated(
    level: str, layout: Layout, stage: int, options: Options
) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
    """The coefficients of a level on a stage of a layout, and the line of the model that was held out."""
    shapes = tuple(layout.fitting(shape) for shape in CALIBRATION)
    sizes = []
    for at, shape in enumerate(shapes):
        options.progress(f"{level} {layout_text(layout)}: {len(shapes)} small models", at / len(shapes))
        sizes.append(recorded(shape, level, layout, stage)[0])
    weights = fitted(shapes, sizes)
    held_out = layout.fitting(HELD_OUT)
    actual, files = recorded(held_out, level, layout, stage)
    error = calculation(weights, held_out) / actual - 1
    return weights, {"bytes": actual, "files": files, "error": error, "target": 0.02}


def _lines(
    model: str, level: str, shape: Shape, layout: Layout, weights: dict[str, npt.NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """By batch and stage: one rank, and as many ranks as hold the model once, at least eight."""
    lines = []
    ranks = max(RANKS, layout.world)
    for batch in BATCHES:
        own = {name: round(calculation(found, replace(shape, microbatches=batch))) for name, found in weights.items()}
        each = {name: count * layout.tp * layout.cp for name, (_, count) in layout.stages().items()}
        of_all = sum(own[name] * each[name] for name in own) * ranks // layout.world
        files_of_all = sum(_files(own[name]) * each[name] for name in own) * ranks // layout.world
        for name, size in own.items():
            line = {"name": _joined(model, level, f"batch {batch}", name), "bytes": size, "files": _files(size)}
            lines.append({**line, f"bytes_of_{ranks}_ranks": of_all, f"files_of_{ranks}_ranks": files_of_all})
    return lines


def layout_text(layout: Layout) -> str:
    """The layout in a word; empty for one card."""
    sizes = [f"{axis}{size}" for axis, size in (("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp)) if size > 1]
    return " ".join([*sizes, "sp"] if layout.sequence_parallel else sizes)


def _joined(*words: str) -> str:
    return ":".join(word for word in words if word)


def _models(asked: str | None) -> dict[str, Model]:
    """The seeds' models, one of them, or one that is given by Megatron's flags, with its layout."""
    from msprobe_megatron.lab.bench.models.workloads import known

    every = {name: (shape, ONE_CARD) for name, shape in MODELS.items()}
    every |= {f"{name}, tp8": (MODELS[name], TP8) for name in ("LLaMA2-7B", "LLaMA2-13B")}
    if asked is None or asked == "all":
        return every
    if not asked.startswith("--"):
        return {known(asked, every): every[asked]}
    parser = argparse.ArgumentParser(prog="--model", add_help=False, exit_on_error=False)
    for flag, default in _MODEL_FLAGS.items():
        parser.add_argument(flag, type=int, default=default, required=default is None)
    parser.add_argument("--sequence-parallel", action="store_true")
    try:
        given, _ = parser.parse_known_args(asked.split())
    except (argparse.ArgumentError, SystemExit):
        needed = " ".join(f"{flag} N" for flag, default in _MODEL_FLAGS.items() if default is None)
        raise BenchFailed(f"--model {asked!r}: the size of a model needs {needed}") from None
    ffn = given.ffn_hidden_size or 4 * given.hidden_size
    shape = Shape(
        given.num_layers, given.hidden_size, ffn, given.num_attention_heads, given.seq_length, given.vocab_size
    )
    sizes = (given.tensor_model_parallel_size, given.pipeline_model_parallel_size, given.context_parallel_size)
    if min(sizes) < 1:
        raise BenchFailed(f"--model {asked!r}: accepted are parallel sizes from 1")
    # Megatron has no sequence to cut without tensor parallel ranks.
    layout = Layout(*sizes, sequence_parallel=given.sequence_parallel and sizes[0] > 1)
    layout.divided(shape)
    return {"model": (replace(shape, microbatch=given.micro_batch_size), layout)}


def _files(size: int) -> int:
    """Packs of tensors, and the rows and call sites of the step."""
    from msprobe_megatron.job.record.tensors import PACK_BYTES

    return -(-size // PACK_BYTES) + 2


def recorded(shape: Shape, level: str, layout: Layout = ONE_CARD, stage: int = 0) -> tuple[int, int]:
    """Bytes and files of the saved tensors of one step of a demo job, on one rank of a stage that has this shape."""
    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document
    from msprobe_megatron.lab.bench.clockwork.turns import size_of
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    rank = lone_rank(layout.rank(stage), layout.world)
    with tempfile.TemporaryDirectory(prefix="msprobe_volume_") as folder, rank:
        out = Path(folder) / "run"
        config = from_document({"dump": {"level": level, "task": "tensor"}}, "bench", Overrides(output=str(out)))
        sessions: list[Any] = []
        ready: Callable[[Any, Any], None] = lambda chunks, optimizer: sessions.append(  # noqa: E731
            attach(chunks, optimizer, config, step=0)
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            whole = replace(shape, layers=shape.layers * layout.pp)
            run([*whole.flags(), *layout.flags()], Callbacks(ready=ready))
            sessions[0].close()
        packs = list((out / "step_000000").rglob("*.safetensors"))
        return sum(_data_bytes(path) for path in packs), size_of(out / "step_000000")[1]


def _data_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def fitted(shapes: tuple[Shape, ...], sizes: list[int]) -> npt.NDArray[np.float64]:
    """The bytes that each product of dimensions stands for."""
    terms = np.array([shape.terms() for shape in shapes])
    scale = terms.max(axis=0)
    found: npt.NDArray[np.float64] = np.linalg.lstsq(terms / scale, np.array(sizes, np.float64), rcond=None)[0] / scale
    return found


def calculation(weights: npt.NDArray[np.float64], shape: Shape) -> float:
    """The bytes of a model of this shape."""
    return float(np.array(shape.terms()) @ weights)
