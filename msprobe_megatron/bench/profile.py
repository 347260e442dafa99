"""Where the time of a variant goes: the functions of the kit in the training thread, and the writer thread as a whole.

For a line of a table that missed its target: the profile says what bounds it. Python's profiler makes small functions
look dearer than they are, so that shares are given, not times; the writer's share is measured, not profiled.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import pstats
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_megatron.bench.turns import Workload
from msprobe_megatron.bench.workloads import WORKLOADS

_PACKAGE = str(Path(__file__).parents[1])
_STEPS = 12
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

    def ready(chunks: Any, optimizer: Any) -> None:
        folder = out / f"profile_{str(line['name']).replace(':', '_')}"
        config = from_document(dict(variant), "bench", Overrides(output=str(folder)))
        sessions.append(attach(chunks, optimizer, config, step=0))

    def after(step: Any) -> None:
        if step.iteration == 2:  # noqa: PLR2004 - caches are filled
            watched.enable()
        elif step.iteration == _STEPS:
            watched.disable()

    flags = [*workload.flags.split(), "--train-iters", str(_STEPS + 1), "--log-interval", "1000000000"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(flags, Callbacks(ready=ready, step=after))
        sessions[0].close()
    return _text(pstats.Stats(watched), line)


def _text(stats: pstats.Stats, line: Mapping[str, Any]) -> str:
    own: dict[str, float] = {}
    for (file, _, function), (_, _, seconds, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        where = Path(file).relative_to(_PACKAGE).with_suffix("").as_posix() if file.startswith(_PACKAGE) else ""
        if where and not where.startswith(("demo", "bench", "backends")):
            own[f"{where}.{function}"] = own.get(f"{where}.{function}", 0.0) + seconds
    total = sum(own.values()) or 1.0
    writer = max(0.0, line["ratio"] - line["training_ratio"])
    added = max(1e-9, line["ratio"] - 1)
    shares = [f"the writer thread {writer / added:.0%} of what is added; of the training thread's part"]
    largest = sorted(own.items(), key=lambda item: -item[1])[:_LINES]
    shares += [f"`{name}` {seconds / total:.0%}" for name, seconds in largest]
    return f"{line['name']}: {', '.join(shares)}."


def profiles(bench: Any, lines: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """A text for each line of a bench's `VARIANTS` that missed its target.

    Example: ``profiles(msprobe_megatron.bench.dump, lines, Path("bench_out"))``.
    """
    found = []
    for line in lines:
        size, _, name = str(line["name"]).partition(":")
        missed = line.get("target") is not None and line["ratio"] > line["target"]
        if missed and size in WORKLOADS and name in getattr(bench, "VARIANTS", {}):
            found.append(profile(WORKLOADS[size], bench.VARIANTS[name], line, out))
    return found
