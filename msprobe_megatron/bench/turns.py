"""The clockwork of every bench: variants of the kit that take turns within one job, and the lines of the table.

A variant is a probe file laid over the demo model; all of them train the same model in the same processes, one after
the other and again, so that a busy machine is unfair to all of them alike; each turn begins with another variant, so
that none always follows the same one. The time is that of the whole process, writer thread included, until the step's
files are written; medians are compared. What a bench adds is its variants.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from msprobe_megatron.bench.memory import PeakMemory

PLAIN = "plain"
Variants = Mapping[str, Mapping[str, Any]]
_MANY_VARIANTS = 3


class BenchFailed(Exception):
    """A figure that cannot be had; the text says why and what to change."""


class Progress(Protocol):
    """Told what is being done and, where it is known, which share of it is over."""

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show it."""


def silent(text: str, share: float | None = None) -> None:
    """Show nothing.

    Example: ``measure(workload, variants, out, progress=silent)``.
    """


@dataclass(frozen=True)
class Workload:
    """A model (flags of the demo job), how often each variant has its turn, and how many steps a turn has.

    `warm_up` are the first steps of a turn, which are not counted: they fill the caches of places and plans.
    """

    name: str
    flags: str
    turns: int
    steps: int
    warm_up: int = 1
    whole: bool = False
    """A turn is timed as a whole: what is done once in many steps, such as a file of the monitor, is in the figure."""


@dataclass(frozen=True)
class Result:
    """One line of the table; times are CPU seconds of a step, sizes are those that a turn of the variant wrote.

    `ratio` counts the whole process, `training_ratio` the thread that trains, without the writer's; both are of
    medians, `least_ratio` is of the least times. `spread` is the distance between the quartiles over the median.
    `microseconds` is what a row costs the training thread, `extra_bytes` what the peak of memory gained.
    """

    name: str
    ratio: float
    training_ratio: float
    median_s: float
    spread: float
    peak_bytes: int
    memory_ratio: float
    bytes: int
    files: int
    rows: int
    microseconds: float | None
    extra_bytes: int
    least_ratio: float

    def as_dict(self) -> dict[str, Any]:
        """The line for `--json`."""
        return asdict(self)


def measure(workload: Workload, variants: Variants, out: Path, progress: Progress = silent) -> list[Result]:
    """Train the workload in this process and return a line for each variant, the first for no tool at all.

    Example::

        measure(WORKLOADS["h64"], {"L0": {"dump": {"level": "L0"}}}, Path("bench_out"))
    """
    import torch

    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    turns = Turns(workload, variants, out, progress)
    flags = [*workload.flags.split(), "--train-iters", str(turns.iterations), "--log-interval", "1000000000"]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(flags, Callbacks(ready=turns.ready, step=lambda step: turns.after_step()))
    finally:
        torch.set_num_threads(threads)
    return turns.results()


class Turns:
    """Changes the variant between steps and keeps their times; fed by the callbacks of a training loop.

    Example::

        turns = Turns(workload, variants, out)
        turns.ready([model], optimizer)
        for _ in range(turns.iterations):
            train_one_step()
            turns.after_step()
        turns.results()
    """

    def __init__(self, workload: Workload, variants: Variants, out: Path, progress: Progress = silent) -> None:
        self._workload, self._variants, self._out, self._progress = workload, variants, out, progress
        self.times: dict[str, list[float]] = {name: [] for name in (PLAIN, *variants)}
        self.training: dict[str, list[float]] = {name: [] for name in self.times}
        self._peaks: dict[str, list[int]] = {name: [] for name in self.times}
        self._rows: dict[str, int] = dict.fromkeys(self.times, 0)
        self._written: dict[str, tuple[int, int]] = dict.fromkeys(self.times, (0, 0))
        self._session: Any = None
        self._script = self._steps()
        self._model: tuple[Any, Any] = (None, None)
        self._memory = PeakMemory()

    @property
    def iterations(self) -> int:
        """How many steps the job has to make."""
        return 2 + self._workload.turns * len(self._order(0)) * (self._workload.steps + self._workload.warm_up)

    def _order(self, turn: int) -> list[str]:
        """The variants of a turn; no tool at all twice among many of them, for it is a part of every ratio."""
        names = list(self.times)
        if len(self._variants) >= _MANY_VARIANTS:
            names.insert(len(names) // 2 + 1, PLAIN)
        first = turn % len(names)
        return names[first:] + names[:first]

    def ready(self, chunks: Any, optimizer: Any) -> None:
        """All is built, nothing has run."""
        self._model = (chunks, optimizer)
        next(self._script)

    def after_step(self) -> None:
        """A step is over: note its time, prepare the next one."""
        with contextlib.suppress(StopIteration):
            next(self._script)

    def _steps(self) -> Iterator[None]:
        yield  # two steps in which allocators and caches find their size
        yield
        for turn in range(self._workload.turns):
            order = self._order(turn)
            for at, name in enumerate(order):
                share = (turn + at / len(order)) / self._workload.turns
                self._progress(f"{self._workload.name}: turn {turn + 1} of {self._workload.turns}", share)
                self._memory.trim()
                self._attach(name, turn)
                for _ in range(self._workload.warm_up):
                    yield
                if self._workload.whole:
                    yield from self._whole_turn(name, turn)
                    continue
                for _ in range(self._workload.steps):
                    self._flush()
                    self._memory.reset()
                    began, training = time.process_time(), time.thread_time()
                    yield
                    self.training[name].append(time.thread_time() - training)
                    self._flush()
                    self.times[name].append(time.process_time() - began)
                    self._peaks[name].append(self._memory.peak())
                self._detach(name, turn)

    def _whole_turn(self, name: str, turn: int) -> Iterator[None]:
        self._flush()
        self._memory.reset()
        began, training = time.process_time(), time.thread_time()
        for _ in range(self._workload.steps):
            yield
        self.training[name].append((time.thread_time() - training) / self._workload.steps)
        self._flush()
        self.times[name].append((time.process_time() - began) / self._workload.steps)
        self._peaks[name].append(self._memory.peak())
        self._detach(name, turn)

    def _folder(self, name: str, turn: int) -> Path:
        return self._out / f"{self._workload.name}_{name}_{turn}"

    def _attach(self, name: str, turn: int) -> None:
        from msprobe_megatron import attach
        from msprobe_megatron.config import Overrides, from_document

        if name == PLAIN:
            return
        config = from_document(dict(self._variants[name]), "bench", Overrides(output=str(self._folder(name, turn))))
        self._session = attach(*self._model, config, step=0)

    def _flush(self) -> None:
        writer = getattr(self._session, "writer", None)  # a rank that was not chosen has none
        if writer is not None:
            writer.flush()

    def _detach(self, name: str, turn: int) -> None:
        if self._session is None:
            return
        self._session.close()
        if self._session.faults:
            # The kit has disarmed itself, as it should; what would be measured is a job without it.
            raise BenchFailed(f"{self._workload.name}:{name}: {self._session.faults[0]}")
        if self._session.selected:
            counts = self._session.writer.counts.as_dict()
            self._rows[name] = counts["rows_written"] // max(1, counts["steps_written"])
        self._written[name] = size_of(self._folder(name, turn))
        self._session = None
        if turn and "WORLD_SIZE" not in os.environ:  # other ranks may still be writing into it
            shutil.rmtree(self._folder(name, turn), ignore_errors=True)

    def results(self) -> list[Result]:
        """A line for each variant; ratios are those of medians."""
        middle = statistics.median
        base, training = middle(self.times[PLAIN]), middle(self.training[PLAIN])
        memory = middle(self._peaks[PLAIN])
        lines = []
        for name, times in self.times.items():
            median, own, rows = middle(times), middle(self.training[name]), self._rows[name]
            peak = middle(self._peaks[name])
            lines.append(
                Result(
                    f"{self._workload.name}:{name}",
                    median / base,
                    own / training,
                    median,
                    spread(times),
                    max(self._peaks[name]),
                    peak / memory if memory else 1.0,
                    *self._written[name],
                    rows,
                    (own - training) * 1e6 / rows if rows else None,
                    max(0, round(peak - memory)),
                    min(times) / min(self.times[PLAIN]),
                )
            )
        return lines


def spread(times: list[float]) -> float:
    """Distance between the quartiles over the median; 0 for a single value.

    Example: ``spread([1.0, 2.0, 3.0]) == 1.0``.
    """
    if len(times) < 2:  # noqa: PLR2004
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder; what another rank renames or removes meanwhile is left out.

    Example: ``size_of(Path("probe_out"))``.
    """
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.lstat(os.path.join(place, name)).st_size)
    return sum(sizes), len(sizes)
