"""The clockwork of every bench: variants of the kit that take turns within one job, and the lines of the table.

A variant is a probe file laid over the demo model; all of them train the same model in the same processes, a step or
a few at a time, one after the other and again, so that a busy machine is unfair to all of them alike; each turn has an
order of its own, so that none always follows the same one. Their sessions sleep while it is not their turn. In the
first turns there is one at a time, which is closed after it, each behind steps without the kit: for what a session
needs of memory and writes. The time is that of the whole process, writer thread included, until the step's files are
written. What a bench adds is its variants.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from msprobe_megatron.lab.bench.clockwork.memory import PeakMemory
from msprobe_megatron.lab.bench.clockwork.paired import Cost, Step, cost, spread

PLAIN = "plain"
Variants = Mapping[str, Mapping[str, Any]]
_MEMORY_LAPS, _MEMORY_STEPS = 3, 2


class BenchFailed(Exception):
    """A figure that cannot be had; the text says why and what to change."""


class Progress(Protocol):
    """Told what is being done and, where it is known, which share of it is over."""

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show it."""


def silent(text: str, share: float | None = None) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Workload:
    """A model (flags of the demo job), how often each variant has its turn, and how many steps a turn has.

    `warm_up` are the first steps of a turn, which are not counted: they put hooks on the model.
    """

    name: str
    flags: str
    turns: int
    steps: int
    warm_up: int = 1
    whole: bool = False
    """A turn is timed as a whole: what is done once in many steps, such as a file of the monitor, is in the figure."""
    fresh: bool = False
    """Every turn has a session of its own: for what depends on how many steps it has seen."""
    twice: tuple[str, ...] = ()
    """Variants that have two places in every turn: those whose limit is the narrowest."""

    @property
    def laps(self) -> range:
        """The turns by number; those up to 0 are not timed but for memory, unless all are like them."""
        return range(1 if self.fresh else 1 - _MEMORY_LAPS, self.turns + 1)

    @property
    def kept(self) -> int:
        """The turn whose run directories are kept."""
        return 1 if self.fresh else 0


@dataclass(frozen=True)
class Result:
    """One line of the table; times are CPU seconds of a step, sizes are those that a turn of the variant wrote.

    `ratio` counts the whole process, `training_ratio` the thread that trains, without the writer's; both are medians
    over the steps without the kit next to a step (`beside`), `uncertainty` is how well the first is known,
    `least_ratio` is of the least times. `spread` is the
    distance between the quartiles over the median, of the times themselves: how restless the machine was.
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
    uncertainty: float

    def as_dict(self) -> dict[str, Any]:
        """The line for `--json`."""
        return asdict(self)


def measure(workload: Workload, variants: Variants, out: Path, progress: Progress = silent) -> list[Result]:
    """Train the workload in this process and return a line for each variant, the first for no tool at all."""
    import torch

    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

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
    """Changes the variant between steps and keeps their times; fed by the callbacks of a training loop."""

    def __init__(self, workload: Workload, variants: Variants, out: Path, progress: Progress = silent) -> None:
        self._workload, self._variants, self._out, self._progress = workload, variants, out, progress
        names = (PLAIN, *variants)
        self.steps: list[Step] = []
        self._peaks: dict[str, list[int]] = {name: [] for name in names}
        self._added: dict[str, list[int]] = {name: [] for name in names}
        self._before: list[int] = []
        self._now: list[int] = []
        self._rows: dict[str, int] = dict.fromkeys(names, 0)
        self._written: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))
        self._session: Any = None
        self._asleep: dict[str, Any] = {}
        self._script = self._steps()
        self._model: tuple[Any, Any] = (None, None)
        self._memory = PeakMemory()

    @property
    def iterations(self) -> int:
        """How many steps the job has to make."""
        laps, warm_up = self._workload.laps, self._workload.warm_up
        return 2 + sum(len(self._order(lap)) * (warm_up + self._steps_of(lap)) for lap in laps)

    def _steps_of(self, lap: int) -> int:
        return self._workload.steps if lap > 0 else max(_MEMORY_STEPS, self._workload.steps)

    def _order(self, lap: int) -> list[str]:
        """The variants of a turn; no tool at all several times among many of them, for it is a part of every ratio."""
        if lap <= 0:  # what the allocator holds changes from step to step: each has its own to be compared with
            return [one for name in self._variants for one in (PLAIN, name)]
        twice = self._workload.twice
        names = [name for name in self._variants for _ in range(1 + (name in twice))]
        random.Random(lap).shuffle(names)  # noqa: S311 - the same in every process of a job
        apart = math.ceil(len(names) / max(1, round(math.sqrt(len(names)))))
        order = [one for i, name in enumerate(names) for one in ([PLAIN, name] if i % apart == 0 else [name])]
        first = lap % len(order)
        return order[first:] + order[:first]

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
        for lap in self._workload.laps:
            if not self._workload.fresh:
                self._memory.exact(lap <= 0)
            order = self._order(lap)
            for at, name in enumerate(order):
                done = lap - self._workload.laps.start + at / len(order)
                text = f"turn {lap} of {self._workload.turns}" if lap > 0 else "memory"
                self._progress(f"{self._workload.name}: {text}", done / len(self._workload.laps))
                self._begin(name, lap)
                for _ in range(self._workload.warm_up):
                    yield
                steps = self._steps_of(lap)
                at_once = steps if self._workload.whole else 1
                for _ in range(steps // at_once):
                    yield from self._timed(name, at_once, lap)
                self._end(name, lap)
        for name in list(self._asleep):
            self._session = self._asleep.pop(name)
            self._close(name, self._workload.turns)

    def _timed(self, name: str, steps: int, lap: int) -> Iterator[None]:
        alone = lap <= 0 or self._workload.fresh
        self._flush()
        if alone:
            self._memory.reset()
        began, training = time.process_time(), time.thread_time()
        for _ in range(steps):
            yield
        trained = time.thread_time() - training
        self._flush()
        took = time.process_time() - began
        if alone:
            self._now.append(self._memory.peak())
            self._peaks[name].append(self._now[-1])
            if name != PLAIN and len(self._now) <= len(self._before):
                self._added[name].append(self._now[-1] - self._before[len(self._now) - 1])
        if lap > 0:
            self.steps.append(Step(name, took / steps, trained / steps))

    def _begin(self, name: str, lap: int) -> None:
        if lap <= 0 or self._workload.fresh:
            self._memory.trim()
            self._now = []
        if name in self._asleep:
            self._session = self._asleep.pop(name)
            self._session.wake()
        elif name != PLAIN:
            self._attach(name, lap)

    def _end(self, name: str, lap: int) -> None:
        if name == PLAIN:
            self._before = self._now
        if self._session is None:
            return
        if lap <= 0 or self._workload.fresh:
            self._close(name, lap)
            return
        self._session.sleep()
        self._check(name)
        self._asleep[name], self._session = self._session, None

    def _folder(self, name: str, lap: int) -> Path:
        return self._out / f"{self._workload.name}_{name}_{lap if self._workload.fresh else min(1, lap)}"

    def _attach(self, name: str, lap: int) -> None:
        from msprobe_megatron import attach
        from msprobe_megatron.config import Overrides, from_document

        config = from_document(dict(self._variants[name]), "bench", Overrides(output=str(self._folder(name, lap))))
        self._session = attach(*self._model, config, step=0)

    def _flush(self) -> None:
        writer = getattr(self._session, "writer", None)  # a rank that was not chosen has none
        if writer is not None:
            writer.flush()

    def _check(self, name: str) -> None:
        if self._session.faults:
            # The kit has disarmed itself, as it should; what would be measured is a job without it.
            raise BenchFailed(f"{self._workload.name}:{name}: {self._session.faults[0]}")

    def _close(self, name: str, lap: int) -> None:
        self._session.close()
        self._check(name)
        first = lap == self._workload.kept
        if first and self._session.selected:
            counts = self._session.writer.counts.as_dict()
            self._rows[name] = counts["rows_written"] // max(1, counts["steps_written"])
        self._session = None
        if first:
            self._written[name] = size_of(self._folder(name, lap))
        elif "WORLD_SIZE" not in os.environ:  # other ranks may still be writing into it
            shutil.rmtree(self._folder(name, lap), ignore_errors=True)

    def results(self) -> list[Result]:
        """A line for each variant, the first for no tool at all."""
        middle = statistics.median
        least = min(step.took for step in self.steps if step.name == PLAIN)
        memory = middle(self._peaks[PLAIN])
        lines = []
        for name, peaks in self._peaks.items():
            times = [step.took for step in self.steps if step.name == name]
            found = cost(self.steps, name, PLAIN) if name != PLAIN else Cost(1.0, 1.0, 0.0, 0.0)
            # In a single turn of fresh sessions some may have had no step without the kit before them.
            added, rows = middle(self._added[name] or [middle(peaks) - memory]), self._rows[name]
            lines.append(
                Result(
                    f"{self._workload.name}:{name}",
                    found.ratio,
                    found.training_ratio,
                    middle(times),
                    spread(times),
                    max(peaks),
                    1 + added / memory if memory else 1.0,
                    *self._written[name],
                    rows,
                    found.added_s * 1e6 / rows if rows else None,
                    max(0, round(added)),
                    min(times) / least,
                    found.uncertainty,
                )
            )
        return lines


def size_of(folder: Path) -> tuple[int, int]:
    """Bytes and number of the files below a folder; what another rank renames or removes meanwhile is left out."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.lstat(os.path.join(place, name)).st_size)
    return sum(sizes), len(sizes)
