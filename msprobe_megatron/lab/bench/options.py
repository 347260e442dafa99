"""What the command line asks of a bench, and what every bench is: a module with `ABOUT` and `bench(options)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from msprobe_megatron.lab.bench.clockwork.turns import Progress, Variants, Workload, silent


@dataclass(frozen=True)
class Options:
    """`only`: part of the names of workloads; `turns` and `ranks` override those of the bench."""

    out: Path
    only: str | None = None
    turns: int | None = None
    ranks: int | None = None
    model: str | None = None
    peer_python: str | None = None
    progress: Progress = silent

    def chosen(self, workloads: Iterable[Workload]) -> list[Workload]:
        """The workloads that are asked for, with the number of turns that is asked for."""
        some = [w for w in workloads if self.only is None or w.name == self.only]
        return [replace(w, turns=self.turns) for w in some] if self.turns else some


class Bench(Protocol):
    """A module of this package that the command runs.

    `ABOUT` says in one line what its figures can and cannot be compared with. The lines that `bench` returns have
    at least `name`; those that measure the cost of the kit are `turns.Result`s.
    """

    ABOUT: str

    def bench(self, options: Options) -> list[dict[str, Any]]:
        """Measure, and return the lines of the table."""


def measured(workload: Workload, variants: Variants, options: Options) -> list[dict[str, Any]]:
    """Measure a workload with its variants, in this process or in as many as the command line asks."""
    from msprobe_megatron.lab.bench.clockwork.processes import measure_in_processes
    from msprobe_megatron.lab.bench.clockwork.turns import measure

    if options.ranks and options.ranks > 1:
        return measure_in_processes(workload, variants, options.out, options.ranks, options.progress)
    return [result.as_dict() for result in measure(workload, variants, options.out, options.progress)]
