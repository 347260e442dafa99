"""Where the time of a variant goes: the functions of the kit in the training thread, and the writer thread as a whole.

For a line of a table that missed its target: the profile says what bounds it. Python's profiler makes small functions
look dearer than they are, so that shares are given, not times; the writer's share is measured, not profiled. What a
function of the kit calls that is no Python, such as the kernel or an operator of torch, has a line of its own.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import pstats
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_megatron.bench.targets import verdicts
from msprobe_megatron.bench.turns import Progress, Workload, silent
from msprobe_megatron.bench.workloads import WORKLOADS

_PACKAGE = str(Path(__file__).parents[1])
_WARM_UP, _STEPS, _STEPS_OF_LARGE = 2, 12, 3
_LINES = 10


def profile(workload: Workload, variant: Mapping[str, Any], line: Mapping[str, Any], out: Path) -> str:
    """A short text: shares of the added time, largest first.

    Example::

        print(profile(WORKLOADS["h64"], VARIANTS["L0"], result.as_dict(), Path("bench_out")))
    """
    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document
    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks

    watched = cProfile.Profile()
    sessions: list[Any] = []
    last = _WARM_UP + (_STEPS if line["median_s"] < 0.1 else _STEPS_OF_LARGE)  # noqa: PLR2004

    def ready(chunks: Any, optimizer: Any) -> None:
        folder = out / f"profile_{str(line['name']).replace(':', '_').replace('+', '_')}"
        config = from_document(dict(variant), "bench", Overrides(output=str(folder)))
        sessions.append(attach(chunks, optimizer, config, step=0))

    def after(step: Any) -> None:
        if step.iteration == _WARM_UP:  # caches are filled
            watched.enable()
        elif step.iteration == last:
            watched.disable()

    flags = [*workload.flags.split(), "--train-iters", str(last + 1), "--log-interval", "1000000000"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(flags, Callbacks(ready=ready, step=after))
        sessions[0].close()
    return text(pstats.Stats(watched), line)


def text(stats: pstats.Stats, line: Mapping[str, Any]) -> str:
    """The shares of a profile, in words.

    Example: ``text(pstats.Stats(profile), {"name": "h64:L0", "ratio": 1.7, "training_ratio": 1.5})``.
    """
    own = _own_seconds(stats)
    total = sum(own.values()) or 1.0
    largest = sorted(own.items(), key=lambda item: -item[1])[:_LINES]
    shares = ", ".join(f"`{name}` {seconds / total:.0%}" for name, seconds in largest)
    writer = ""
    if line.get("training_ratio") is not None:
        share = max(0.0, line["ratio"] - line["training_ratio"]) / max(1e-9, line["ratio"] - 1)
        writer = f"the writer thread {min(1.0, share):.0%} of what is added; "
    return f"{line['name']}: {writer}of the training thread's part {shares}."


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
    """A text for each line of a bench that missed what was asked.

    Example: ``profiles(msprobe_megatron.bench.dump, lines, Path("bench_out"))``.
    """
    missed = {verdict.name for verdict in verdicts(lines) if not verdict.met}
    found = []
    for line in lines:
        if line["name"] in missed and (job := _job(bench, str(line["name"]))) is not None:
            progress(f"profile: {line['name']}")
            found.append(profile(*job, line, out))
    return found


def _job(bench: Any, name: str) -> tuple[Workload, Mapping[str, Any]] | None:
    """What a line trained: as the bench's own `profiled` says, or by the size and the variant in its name."""
    if hasattr(bench, "profiled"):
        own: tuple[Workload, Mapping[str, Any]] | None = bench.profiled(name)
        return own
    size, _, variant = name.partition(":")
    variants = getattr(bench, "VARIANTS", {})
    return (WORKLOADS[size], variants[variant]) if size in WORKLOADS and variant in variants else None
