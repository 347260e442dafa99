"""How much the task `tensor` writes, by calculation, and how fast: the tables of data volume of seeds 000 and 001.

The size of a dump is a sum of products of the model's dimensions. Their coefficients are found once from small models
of the same architecture; a further small model that was not among them says how far the calculation is off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.bench.options import Options
from msprobe_megatron.bench.turns import BenchFailed

ABOUT = (
    "Bytes of saved tensors of one step, each distinct tensor once (bf16), by level and microbatches a step: on one"
    " rank without tensor parallelism and on eight such ranks; files at most. Calculated from small models of the same"
    " architecture; held out: a model that was not among them, and how far its calculated size is off. Attention is not"
    " fused: its scores are half of L1; the seeds cut each model over eight cards and fuse, so that their sizes are"
    " others. speed: what the kit's writer reaches over a plain sequential one on the same disk, and the seconds in"
    " which training waited for it."
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
BATCHES, RANKS = (1, 2, 3), 8
# Megatron's flags that a size follows from; those without a value must be given.
_MODEL_FLAGS: dict[str, int | None] = {
    **{"--num-layers": None, "--hidden-size": None, "--num-attention-heads": None, "--seq-length": None},
    **{"--ffn-hidden-size": 0, "--vocab-size": 32000, "--micro-batch-size": 1},
}
_SPEED_BYTES, _SPEED_TENSOR = 384 << 20, 4 << 20


def bench(options: Options) -> list[dict[str, Any]]:
    """Lines for the models of the seeds, the error of the calculation, and the speed of the writer.

    Example::

        bench(Options(Path("bench_out"), only="L0"))
    """
    models = _models(options.model)
    lines: list[dict[str, Any]] = []
    for level in (level for level in LEVELS if options.only in (None, level)):
        sizes = []
        for at, shape in enumerate(CALIBRATION):
            options.progress(f"{level}: {len(CALIBRATION)} small models", at / len(CALIBRATION))
            sizes.append(recorded(shape, level))
        weights = fitted(CALIBRATION, [size for size, _ in sizes])
        actual, files = recorded(HELD_OUT, level)
        calculated = calculation(weights, HELD_OUT)
        error = calculated / actual - 1
        lines.append({"name": f"held out:{level}", "bytes": actual, "files": files, "error": error, "target": 0.02})
        for model, shape in models.items():
            for batch in BATCHES:
                size = round(calculation(weights, Shape(**{**vars(shape), "microbatches": batch})))
                lines.append(
                    {
                        **{"name": f"{model}:{level}:batch {batch}", "bytes": size, "files": _files(size)},
                        **{f"bytes_of_{RANKS}_ranks": size * RANKS, f"files_of_{RANKS}_ranks": _files(size) * RANKS},
                    }
                )
    if options.only in (None, "speed"):
        options.progress("speed of the writer")
        lines.append({"name": "speed", **speeds(options.out, options.turns or 5), "target": 0.8})
    return lines


def _models(asked: str | None) -> dict[str, Shape]:
    """The seeds' models, one of them, or one that is given by Megatron's flags."""
    from msprobe_megatron.bench.workloads import known

    if asked is None or asked == "all":
        return MODELS
    if not asked.startswith("--"):
        return {known(asked, MODELS): MODELS[asked]}
    parser = argparse.ArgumentParser(prog="--model", add_help=False, exit_on_error=False)
    for flag, default in _MODEL_FLAGS.items():
        parser.add_argument(flag, type=int, default=default, required=default is None)
    try:
        given, _ = parser.parse_known_args(asked.split())
    except (argparse.ArgumentError, SystemExit):
        needed = " ".join(f"{flag} N" for flag, default in _MODEL_FLAGS.items() if default is None)
        raise BenchFailed(f"--model {asked!r}: the size of a model needs {needed}") from None
    ffn = given.ffn_hidden_size or 4 * given.hidden_size
    shape = Shape(
        given.num_layers, given.hidden_size, ffn, given.num_attention_heads, given.seq_length, given.vocab_size
    )
    return {"model": replace(shape, microbatch=given.micro_batch_size)}


def _files(size: int) -> int:
    """Packs of tensors, and the rows and call sites of the step."""
    from msprobe_megatron.record.tensors import PACK_BYTES

    return -(-size // PACK_BYTES) + 2


def recorded(shape: Shape, level: str) -> tuple[int, int]:
    """Bytes and files of the saved tensors of one step of a demo job of this shape."""
    from msprobe_megatron import attach
    from msprobe_megatron.bench.turns import size_of
    from msprobe_megatron.config import Overrides, from_document
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks

    with tempfile.TemporaryDirectory(prefix="msprobe_volume_") as folder:
        out = Path(folder) / "run"
        config = from_document({"dump": {"level": level, "task": "tensor"}}, "bench", Overrides(output=str(out)))
        sessions: list[Any] = []
        ready: Callable[[Any, Any], None] = lambda chunks, optimizer: sessions.append(  # noqa: E731
            attach(chunks, optimizer, config, step=0)
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(shape.flags(), Callbacks(ready=ready))
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


def speeds(out: Path, turns: int) -> dict[str, Any]:
    """The kit's writer and a plain sequential one on the same disk, taking turns: bytes a second, medians."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    tensors = [torch.full((_SPEED_TENSOR // 4,), float(n)) for n in range(_SPEED_BYTES // _SPEED_TENSOR)]
    times: dict[str, list[float]] = {"ours": [], "plain": [], "held up": []}
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="msprobe_speed_", dir=out) as folder:
            times["plain"].append(_plain(tensors, Path(folder) / "plain.bin"))
        with tempfile.TemporaryDirectory(prefix="msprobe_speed_", dir=out) as folder:
            ours, held = _ours(tensors, Path(folder) / "run", turn)
            times["ours"].append(ours)
            times["held up"].append(held)
    ours, plain, held = (statistics.median(times[name]) for name in ("ours", "plain", "held up"))
    return {
        "bytes": _SPEED_BYTES,
        "share": plain / ours,
        "ours_bytes_s": _SPEED_BYTES / ours,
        "plain_bytes_s": _SPEED_BYTES / plain,
        "training_thread_s": held,
    }


def _plain(tensors: list[Any], path: Path) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def _ours(tensors: list[Any], path: Path, step: int) -> tuple[float, float]:
    """Seconds until all is on the disk, and seconds in which the thread that trains could not train."""
    from msprobe_megatron import backends
    from msprobe_megatron.record.directory import RunDirectory
    from msprobe_megatron.record.schema import IDENTITY_COLUMNS
    from msprobe_megatron.record.tensors import TensorPacks
    from msprobe_megatron.record.writer import Writer

    faults: list[BaseException] = []
    directory = RunDirectory.create(path)
    writer = Writer(directory, dict.fromkeys(IDENTITY_COLUMNS, 0), 4 * _SPEED_BYTES, faults.append)
    packs = TensorPacks(backends.select().to_host, writer.submit)
    began = time.perf_counter()
    for tensor in tensors:
        packs.add(step, tensor)
    packs.finish()
    held = time.perf_counter() - began
    writer.flush()
    took = time.perf_counter() - began
    writer.close()
    directory.close()
    if faults:
        raise faults[0]
    return took, held
