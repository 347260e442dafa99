"""Cost of the dump: CPU time of a training step recorded in several ways, over that of the same step without the kit.

Variants take turns within one process and one model, so that a busy machine is unfair to all of them alike. The time is
that of the whole process, writer thread included, until the step's files are written; medians are compared.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    "loaded": {"steps": [10**8], "dump": {"level": "L0"}},
    "L0": {"dump": {"level": "L0"}},
    "L1": {"dump": {"level": "L1"}},
    "mix": {"dump": {"level": "mix"}},
    "L0+digest": {"dump": {"level": "L0", "digest": True}},
    "L1+digest": {"dump": {"level": "L1", "digest": True}},
    "mix+digest": {"dump": {"level": "mix", "digest": True}},
}


@dataclass(frozen=True)
class Workload:
    """A size of the demo model, and how often each variant has its turn."""

    name: str
    flags: str
    turns: int
    steps: int


_COMMON = (
    "--num-layers 4 --micro-batch-size 1 --swiglu --normalization RMSNorm --position-embedding-type rope"
    " --attention-dropout 0 --hidden-dropout 0"
)
WORKLOADS = {
    "h64": Workload("h64", f"{_COMMON} --hidden-size 64 --num-attention-heads 4 --seq-length 32", 15, 3),
    "h1024": Workload("h1024", f"{_COMMON} --hidden-size 1024 --num-attention-heads 16 --seq-length 512", 5, 1),
}


@dataclass(frozen=True)
class Result:
    """One line of the table. Times are CPU milliseconds of a step; `microseconds` are those a row costs.

    `ratio` counts the whole process, `training_ratio` the thread that trains, without the writer's.
    """

    name: str
    ratio: float
    training_ratio: float
    cpu_ms: float
    rows: int
    microseconds: float | None

    def as_dict(self) -> dict[str, Any]:
        """The line for `--json`."""
        return asdict(self)


def measure(workload: Workload, out: Path, progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Train the workload and return a line for each variant.

    Example::

        measure(WORKLOADS["h64"], Path("bench_out"))
    """
    import torch

    from msprobe_megatron.demo.pretrain_gpt import run
    from msprobe_megatron.demo.train import Callbacks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    turns = _Turns(workload, out, progress)
    iterations = 2 + workload.turns * (len(VARIANTS) + 1) * (workload.steps + 1)
    flags = [*workload.flags.split(), "--train-iters", str(iterations), "--log-interval", "1000000000"]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(flags, Callbacks(ready=turns.ready, step=lambda step: turns.after_step()))
    finally:
        torch.set_num_threads(threads)
    return turns.results()


class _Turns:
    """Changes the variant between steps and keeps their times."""

    def __init__(self, workload: Workload, out: Path, progress: Callable[[str], None]) -> None:
        self._workload, self._out, self._progress = workload, out, progress
        self._times: dict[str, list[float]] = {name: [] for name in (PLAIN, *VARIANTS)}
        self._training: dict[str, list[float]] = {name: [] for name in self._times}
        self._rows: dict[str, int] = dict.fromkeys(self._times, 0)
        self._session: Any = None
        self._script = self._steps()
        self._model: tuple[Any, Any] = (None, None)

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
            self._progress(f"{self._workload.name}: turn {turn + 1} of {self._workload.turns}")
            for name in self._times:
                self._attach(name, turn)
                yield  # its first step fills the caches of places and plans
                for _ in range(self._workload.steps):
                    self._flush()
                    began, training = time.process_time(), time.thread_time()
                    yield
                    self._training[name].append(time.thread_time() - training)
                    self._flush()
                    self._times[name].append(time.process_time() - began)
                self._detach(name)

    def _attach(self, name: str, turn: int) -> None:
        from msprobe_megatron import attach
        from msprobe_megatron.config import Overrides, from_document

        if name == PLAIN:
            return
        folder = self._out / f"{self._workload.name}_{name}_{turn}"
        config = from_document(VARIANTS[name], "bench", Overrides(output=str(folder)))
        self._session = attach(*self._model, config, step=0)

    def _flush(self) -> None:
        if self._session is not None:
            self._session.writer.flush()

    def _detach(self, name: str) -> None:
        if self._session is None:
            return
        self._session.close()
        fired = self._session.ledger()["fired"]
        self._rows[name] = sum(fired.values()) // max(1, len(self._session.steps_recorded))
        self._session = None

    def results(self) -> list[Result]:
        """A line for each variant; the ratio is that of the medians."""
        base, training = statistics.median(self._times[PLAIN]), statistics.median(self._training[PLAIN])
        lines = []
        for name, times in self._times.items():
            median, rows = statistics.median(times), self._rows[name]
            own = statistics.median(self._training[name])
            cost = (own - training) * 1e6 / rows if rows else None
            line = f"{self._workload.name}:{name}"
            lines.append(Result(line, median / base, own / training, median * 1e3, rows, cost))
        return lines
