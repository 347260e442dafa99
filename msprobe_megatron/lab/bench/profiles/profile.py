"""Where the time and the memory of a variant go: the functions of the kit that spend it, and the writer thread.

For a line of a table that missed its target: the profile says what bounds it. Python's profiler makes small functions
look dearer than they are, so that shares are given, not times; the writer's share is measured, not profiled. What a
function of the kit calls that is no Python, such as the kernel or an operator of torch, has a line of its own. Missed
memory has two texts: what Python holds, and which tensors are alive at the peak. Benches that train nothing explain
their lines themselves (`why_missed`).
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import pstats
import re
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_megatron.lab.bench.clockwork.turns import Progress, Workload, silent
from msprobe_megatron.lab.bench.models.workloads import WORKLOADS
from msprobe_megatron.lab.bench.profiles.targets import verdicts
from msprobe_megatron.lab.bench.profiles.tensor_memory import LiveTensors, Peak, tensors_text

_PACKAGE = str(Path(__file__).parents[3])
_WARM_UP, _STEPS, _STEPS_OF_LARGE = 2, 12, 3
_LINES = 10
_MEMORY = ("extra_bytes", "memory_ratio", "peak_bytes")


def profile(workload: Workload, variant: Mapping[str, Any], line: Mapping[str, Any], out: Path) -> str:
    """A short text: shares of the added time, largest first."""
    # CPU time: that of the clock would show what others on the machine did in the meantime.
    watched = cProfile.Profile(time.thread_time)
    last = _WARM_UP + (_STEPS if line["median_s"] < 0.1 else _STEPS_OF_LARGE)  # noqa: PLR2004

    def after(iteration: int, session: Any) -> None:
        if iteration == _WARM_UP:  # caches are filled
            watched.enable()
        elif iteration == last:
            watched.disable()

    _train(workload, variant, out / _folder("profile", line), last + 1, after)
    return text(pstats.Stats(watched), line)


def memory_profile(workload: Workload, variant: Mapping[str, Any], line: Mapping[str, Any], out: Path) -> str:
    """A short text: what Python holds for the kit between steps, by the module that asked for it, largest first."""
    held: dict[str, int] = {}

    def after(iteration: int, session: Any) -> None:
        if iteration != _WARM_UP:
            return
        session.writer.flush()
        for found in tracemalloc.take_snapshot().statistics("filename"):
            where = _place(found.traceback[0].filename) or "the rest"
            held[where] = held.get(where, 0) + found.size
        tracemalloc.stop()

    tracemalloc.start()
    try:
        _train(workload, variant, out / _folder("memory", line), _WARM_UP + 1, after)
    finally:
        tracemalloc.stop()
    total = sum(held.values()) or 1
    largest = sorted(held.items(), key=lambda item: -item[1])[:_LINES]
    listed = ", ".join(f"`{name}` {size / total:.0%}" for name, size in largest)
    return f"{line['name']}: Python holds {total / 2**20:.0f} MiB more than before the job: {listed}."


def tensor_profile(workload: Workload, variant: Mapping[str, Any], line: Mapping[str, Any], out: Path) -> str:
    """A short text: tensors that are alive at the peak of a step beyond those of plain training, by who made them."""
    kit, plain = (_tensors_at_peak(workload, one, out / _folder("tensors", line)) for one in (variant, None))
    return f"{line['name']}: {tensors_text(kit, plain, line.get('extra_bytes'))}."


def _tensors_at_peak(workload: Workload, variant: Mapping[str, Any] | None, out: Path) -> Peak:
    def after(iteration: int, session: Any) -> None:
        if iteration == _WARM_UP:
            live.begin()

    live = LiveTensors()
    with live:  # from the first weight on, so that it is known who made what
        _train(workload, variant, out, _WARM_UP + 1, after)
    return live.at_peak


def _folder(kind: str, line: Mapping[str, Any]) -> str:
    return f"{kind}_{re.sub(r'[^A-Za-z0-9]+', '_', str(line['name']))}"


def _train(
    workload: Workload, variant: Mapping[str, Any] | None, out: Path, steps: int, after: Callable[[int, Any], None]
) -> None:
    """Train the workload with the variant, if any, laid over it; `after` is told each step's number and the session."""
    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    session: Any = None

    def ready(chunks: Any, optimizer: Any) -> None:
        nonlocal session
        if variant is not None:
            config = from_document(dict(variant), "bench", Overrides(output=str(out)))
            session = attach(chunks, optimizer, config, step=0)

    flags = [*workload.flags.split(), "--train-iters", str(steps), "--log-interval", "1000000000"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(flags, Callbacks(ready=ready, step=lambda step: after(step.iteration, session)))
        if session is not None:
            session.close()


def text(stats: pstats.Stats, line: Mapping[str, Any]) -> str:
    """The shares of a profile, in words."""
    writer = ""
    if line.get("training_ratio") is not None:
        share = max(0.0, line["ratio"] - line["training_ratio"]) / max(1e-9, line["ratio"] - 1)
        writer = f"the writer thread {min(1.0, share):.0%} of what is added; "
    return f"{line['name']}: {writer}of the training thread's part {shares(stats)}."


def shares(stats: pstats.Stats) -> str:
    """The functions of the kit that take the most of a profile, with their shares of what all of them take."""
    own = _own_seconds(stats)
    total = sum(own.values()) or 1.0
    largest = sorted(own.items(), key=lambda item: -item[1])[:_LINES]
    return ", ".join(f"`{name}` {seconds / total:.0%}" for name, seconds in largest)


def _own_seconds(stats: pstats.Stats) -> dict[str, float]:
    """Seconds in each function of the kit, and in what it calls directly that is not the kit's and not Python's."""
    own: dict[str, float] = {}
    for (file, _, function), (_, _, seconds, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        where = _place(file)
        if where:
            key = f"{where}.{function}"
            own[key] = own.get(key, 0.0) + seconds
        elif file == "~":  # built in: its time belongs to whoever calls it
            for (caller_file, _, caller), (_, _, its, _) in callers.items():
                if place := _place(caller_file):
                    key = f"{place}.{caller} → {_built_in(function)}"
                    own[key] = own.get(key, 0.0) + its
    return own


def _place(file: str) -> str:
    """The module of the kit that a file is, without the parts that are not the kit's work in a job."""
    if not file.startswith(_PACKAGE):
        return ""
    where = Path(file).relative_to(_PACKAGE).with_suffix("").as_posix()
    return "" if where.startswith(("demo", "bench", "backends")) else where


def _built_in(function: str) -> str:
    """``<built-in method torch._C.foo>`` and ``<method 'add' of ...>`` in short."""
    words = function.strip("<>").removeprefix("built-in method ").removeprefix("method ").replace("'", "")
    return words.partition(" of ")[0].partition(" object at ")[0]


def profiles(bench: Any, lines: Sequence[Mapping[str, Any]], out: Path, progress: Progress = silent) -> list[str]:
    """A text for each line of a bench that missed what was asked."""
    missed: dict[str, set[bool]] = {}
    for verdict in verdicts(lines):
        if not verdict.met:
            missed.setdefault(verdict.name, set()).add(verdict.figure in _MEMORY)
    found: list[str] = []
    for line in lines:
        name = str(line["name"])
        if name not in missed:
            continue
        progress(f"profile: {name}")
        if hasattr(bench, "why_missed"):
            found += [f"{name}: {why}." for why in bench.why_missed(line, out)]
        elif (job := _job(bench, name)) is not None:
            ways = [profile] * (False in missed[name]) + [memory_profile, tensor_profile] * (True in missed[name])
            found += [way(*job, line, out) for way in ways]
    return found


def _job(bench: Any, name: str) -> tuple[Workload, Mapping[str, Any]] | None:
    """What a line trained: as the bench's own `profiled` says, or by the size and the variant in its name."""
    if hasattr(bench, "profiled"):
        own: tuple[Workload, Mapping[str, Any]] | None = bench.profiled(name)
        return own
    size, _, variant = name.partition(":")
    variants = getattr(bench, "VARIANTS", {})
    return (WORKLOADS[size], variants[variant]) if size in WORKLOADS and variant in variants else None
