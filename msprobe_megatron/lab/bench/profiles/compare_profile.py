"""Where comparing spends its time and its memory, by stage: the profile of the bench `compare`.

Rows: a smaller pair is compared in this process, with every stage of `analyse.compare` timed and its peak of memory
noted. Tensors: functions and what they call, as `profile` has them.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from msprobe_megatron.lab.bench.clockwork.memory import PeakMemory

# The steps of `analyse.compare.compare` in their order; what is between them is "the rest".
STAGES = (
    "match",
    "different_models",
    "compare_tensors",
    "_judge",
    "forward_places",
    "causal_order",
    "classify",
    "_counted",
    "_diverged",
)
_LINES = 8


def rows_profile(golden: Path, run: Path) -> str:
    """Shares of the time by stage, the largest first, and which stage needs the most memory."""
    from msprobe_megatron.analysis.compare import compare as stages
    from msprobe_megatron.analysis.load.run import open_run

    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    memory = PeakMemory()
    began = time.perf_counter()
    with _watched(stages, seconds, peaks, memory):
        left, right = (_timed(open_run, "open_run", seconds, peaks, memory)(path) for path in (golden, run))
        stages.compare(left, right)
    total = time.perf_counter() - began
    seconds["the rest"] = total - sum(seconds.values())
    largest = sorted(seconds.items(), key=lambda item: -item[1])[:_LINES]
    shares = ", ".join(f"`{name}` {part / total:.0%}" for name, part in largest)
    most = max(peaks, key=peaks.__getitem__)
    return f"{shares}; the most memory is resident in `{most}`, {peaks[most] / 2**20:.0f} MiB"


@contextlib.contextmanager
def _watched(stages: Any, seconds: dict[str, float], peaks: dict[str, int], memory: PeakMemory) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in STAGES:
            timed = _timed(getattr(stages, name), name, seconds, peaks, memory)
            stack.enter_context(mock.patch.object(stages, name, timed))
        yield


def _timed(
    function: Callable[..., Any], name: str, seconds: dict[str, float], peaks: dict[str, int], memory: PeakMemory
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        memory.reset()
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
            peaks[name] = max(peaks.get(name, 0), memory.peak())

    return timed


def tensors_profile(work: Callable[[], Any]) -> str:
    """Shares of the CPU time of comparing tensors, by function and what it calls."""
    from msprobe_megatron.lab.bench.profiles.profile import shares

    watched = cProfile.Profile(time.thread_time)
    watched.runcall(work)
    return shares(pstats.Stats(watched))


def forget(*folders: Path) -> None:
    """Remove the runs that were made for a profile."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
