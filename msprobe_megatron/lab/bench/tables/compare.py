"""Cost of comparing: a pair of runs of 1,024 ranks with 4,000 rows each, and tensors in GB/s of one core.

The pair is made up (`synthetic_runs`), one of its runs with a fault, and compared by the command in a process of its
own, whose time and memory are those of the line. Tensors are read from mapped files that are in the page cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare.pairs.assembly import Part, meet
from msprobe_megatron.analysis.compare.pairs.elements import Apart, View, add_views
from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.models.synthetic_runs import make
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.profiles.compare_profile import forget, rows_profile, tensors_profile

ABOUT = (
    "rows: seconds by the clock, asked: below 60 s and 4 GiB for 1,024 ranks on two cores. tensors: GB/s of one core,"
    " both sides counted, from the page cache, asked: at least 2; `cut` has one side in two parts along its columns."
    " Runs on a slower disk, or larger than the page cache, take as long as the disk."
)
RANKS, LAYERS, SAMPLES = 1024, 160, 320
_SECONDS, _MEMORY, _SPEED = 60.0, 4 << 30, 2.0
_PROFILED_RANKS = 128
_SIDE = 8192  # elements of a side of the tensors: 256 MiB in float32
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for the rows and one for each form of tensors; `--ranks` makes the pair smaller, `--only` takes one."""
    lines: list[dict[str, Any]] = []
    if options.only in (None, "rows"):
        lines.append(_rows(options))
    small = options.ranks is not None and options.ranks < RANKS
    for dtype in _DTYPES:
        for cut in (False, True):
            name = f"tensors {dtype}{' cut' if cut else ''}"
            if options.only in (None, "tensors", name):
                options.progress(name)
                lines.append(_tensors(name, options.out, dtype, cut, _SIDE // 8 if small else _SIDE))
    return lines


def _rows(options: Options) -> dict[str, Any]:
    ranks = options.ranks or RANKS
    if ranks & (ranks - 1) or ranks > RANKS:
        raise BenchFailed(f"--ranks {ranks}: accepted are powers of two up to {RANKS}")
    rows, fault = _pair(options, ranks)
    options.progress("comparing")
    command = [sys.executable, "-m", "msprobe_megatron.cli", "compare", "--json"]
    begun = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603  (our own command, on directories made above)
        [*command, str(options.out / "golden"), str(options.out / "faulty")], stdout=subprocess.PIPE
    )
    answer = json.loads(process.stdout.read() if process.stdout else "null")
    _, _, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    for name in ("golden", "faulty"):
        shutil.rmtree(options.out / name)
    first = answer["first_divergence"]
    if answer["verdict"] != "diverged" or f"layers.{fault}." not in first["name"]:
        raise RuntimeError(f"the fault in layer {fault} was not found: {answer['verdict']}, {first}")
    return {
        "name": f"rows of {ranks} ranks",
        "rows": rows,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "target": _SECONDS,
        "asked": {"peak_bytes": _MEMORY},
        "peak_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def _pair(options: Options, ranks: int) -> tuple[int, int]:
    """Write two runs, one with a fault; returns their rows and the layer of the fault."""
    grid = _grid(ranks)
    share = max(1, RANKS // ranks)
    layers, samples = max(grid["pp"], LAYERS // share), max(2 * grid["dp"], SAMPLES // share)
    fault = layers // 2
    rows = 0
    for name, broken in (("golden", None), ("faulty", fault)):
        options.progress(f"writing {name} of {ranks} ranks")
        rows += make(options.out / name, layers=layers, samples=samples, fault=broken, **grid)
    return rows, fault


def why_missed(line: Mapping[str, Any], out: Path) -> list[str]:
    """The profile of a line that missed what was asked: shares by stage."""
    name = str(line["name"])
    if name.startswith("tensors "):
        dtype, _, cut = name.removeprefix("tensors ").partition(" ")
        return [tensors_profile(lambda: _tensors(name, out / "profile", dtype, bool(cut), _SIDE // 4))]
    ranks = min(_PROFILED_RANKS, int(name.split()[-2]))
    _pair(Options(out / "profile"), ranks)
    golden, faulty = out / "profile" / "golden", out / "profile" / "faulty"
    try:
        return [f"by stage, of a pair of {ranks} ranks: {rows_profile(golden, faulty)}"]
    finally:
        forget(golden, faulty)


def _grid(ranks: int) -> dict[str, int]:
    """Tensor, pipeline and data parallel sizes of so many ranks, a power of two: 8 x 8 x 16 of 1,024."""
    tp = min(8, 2 ** ((ranks.bit_length() - 1) // 3 + (ranks >= 8)))
    tp = max(1, min(tp, ranks))
    pp = max(1, min(tp, ranks // tp))
    return {"tp": tp, "pp": pp, "dp": max(1, ranks // tp // pp)}


def _tensors(name: str, out: Path, dtype: str, cut: bool, side: int) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    left, right = (out / f"{dtype}_{word}.bin" for word in ("left", "right"))
    if not right.exists():
        _write(left, right, dtype, side)
    x, y = (_mapped(path, dtype, side) for path in (left, right))
    parts = [_part(View(_DTYPES[dtype], y), (0, side, 0), side)]
    if cut:
        half = side // 2
        parts = [
            _part(View(_DTYPES[dtype], np.ascontiguousarray(y[:, :half])), (0, half, 0), side),
            _part(View(_DTYPES[dtype], np.ascontiguousarray(y[:, half:])), (0, half, half), side),
        ]
    best = 0.0
    for _ in range(4):
        begun = time.thread_time()
        apart = Apart()
        for a, b, at in meet([_part(View(_DTYPES[dtype], x), (0, side, 0), side)], parts) or ():
            add_views(apart, a, b, at)
        best = max(best, (x.nbytes + y.nbytes) / (time.thread_time() - begun) / 1e9)
    if cut:  # the last of its dtype
        for path in (left, right):
            path.unlink()
    return {"name": name, "target": _SPEED, "GB_a_second": round(best, 2), "relative": f"{apart.relative:.1e}"}


def _part(view: View, along: tuple[int, int, int], side: int) -> Part:
    return Part(view, ("a", "b"), (((0, side, 0),), (along,)), (side, side))


def _write(left: Path, right: Path, dtype: str, side: int) -> None:
    """Two tensors that differ everywhere: the fast way for equal pieces would flatter."""
    generator = np.random.default_rng(0)
    with left.open("wb") as first, right.open("wb") as second:
        for _ in range(0, side, 64):
            x = generator.standard_normal((64, side), dtype=np.float32)
            for file, values in ((first, x), (second, x * np.float32(1.01))):
                if dtype == "bfloat16":
                    words = ((values.view("<u4") + np.uint32(0x8000)) >> 16).astype("<u2")
                    file.write(words.tobytes())
                else:
                    file.write(values.astype(dtype).tobytes())


def _mapped(path: Path, dtype: str, side: int) -> npt.NDArray[Any]:
    words = np.memmap(path, "<u2" if dtype == "bfloat16" else np.dtype(dtype), mode="r", shape=(side, side))
    return np.asarray(words)
