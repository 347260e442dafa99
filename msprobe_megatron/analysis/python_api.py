"""Runs from Python: ``import msprobe_megatron as mp; run = mp.load("probe_out")``; the manual is docs/python.md.

Needs no torch. Tables are pandas or polars DataFrames, whichever is installed, and Arrow tables otherwise; tensors are
NumPy arrays.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt

from msprobe_megatron.analysis.compare import compare as comparing
from msprobe_megatron.analysis.compare.merge import labelled_query
from msprobe_megatron.analysis.compare.pairs.assembly import Part, covers, part_of, together
from msprobe_megatron.analysis.compare.pairs.tensor_pairs import Saved, read_saved
from msprobe_megatron.analysis.diagnose import diagnose as diagnosing
from msprobe_megatron.analysis.load.loss_units import log_losses
from msprobe_megatron.analysis.load.run import Run, RunError, open_run
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles
from msprobe_megatron.analysis.page.table import RunView, open_view
from msprobe_megatron.config.document import did_you_mean
from msprobe_megatron.topology.shards import ShardSpec

# What a name alone stands for, the first of these that was recorded.
_KINDS = ("activation", "loss", "scalar", "parameter", "grad_reduced", "gradient", "grad_unreduced", "optimizer_state")
_IO = ("output", "value", "weight", "input")
_BAD = "sum(n_nan + n_posinf + n_neginf)"
# Statistics of all microbatches of a step together.
STATISTICS = {
    "norm": "sqrt(sum(sumsq))",
    "mean": f"sum(sum) / nullif(sum(numel) - {_BAD}, 0)",
    "min": "min(min)",
    "max": "max(max)",
    "absmax": "max(absmax)",
    "zeros": "sum(n_zero) / nullif(sum(numel), 0)",
    "nonfinite": _BAD,
}
_FORMS = ("auto", "arrow", "pandas", "polars")


class Series(NamedTuple):
    """One statistic over steps; ``plt.plot(*series)`` draws it."""

    steps: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __repr__(self) -> str:
        pairs = ", ".join(f"{step}: {value:.6g}" for step, value in list(zip(*self, strict=True))[:4])
        return f"Series of {len(self.steps)} steps ({pairs}{', …' if len(self.steps) > 4 else ''})"


@dataclass(frozen=True)
class LoadedRun:
    """A run directory; `recorded` is what the commands work on."""

    recorded: Run

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.recorded.path

    @property
    def steps(self) -> list[int]:
        """Recorded steps, from 0."""
        return self.recorded.steps

    @property
    def ranks(self) -> list[int]:
        """Ranks that recorded."""
        return sorted(self.recorded.ranks or {rank for _, rank, _ in self.recorded.files})

    @property
    def layout(self) -> dict[str, int]:
        """Size of every parallel axis."""
        return self.recorded.sizes

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the training job."""
        return dict(self.recorded.facts.get("arguments", {}))

    @cached_property
    def _view(self) -> RunView:
        return open_view(self.recorded)

    @cached_property
    def names(self) -> list[str]:
        """Canonical names that have rows, in order of execution."""
        found = self._view.ask("select name from whole group by name order by min(step), min(seq), name")
        return [str(name) for (name,) in found]

    def rows(
        self,
        kind: str | None = None,
        name: str | None = None,
        step: int | None = None,
        rank: int | None = None,
        *,
        form: str = "auto",
    ) -> Any:
        """The rows of each rank, as they were recorded, with `norm` and `mean` added.

        `form` is pandas, polars or arrow; auto is pandas where it is installed, else polars, else arrow.
        """
        chosen = {"kind": kind, "name": name, "step": step, "rank": rank}
        given = {key: value for key, value in chosen.items() if value is not None}
        connection = duckdb.connect()
        # As a view, so that values are bound and never part of the text.
        connection.register("asked", self.recorded.rows(connection, step))
        where = " and ".join(f'"{key}" = ?' for key in given) or "true"
        finite = "nullif(numel - (n_nan + n_posinf + n_neginf), 0)"
        columns = f"*, sqrt(sumsq) as norm, sum / {finite} as mean"
        query = f"select {columns} from asked where {where} order by step, rank, seq"  # noqa: S608
        return _as_form(connection.sql(query, params=list(given.values())).to_arrow_table(), form)

    def series(
        self,
        name: str,
        statistic: str = "norm",
        *,
        kind: str | None = None,
        io: str | None = None,
        path: str | None = None,
    ) -> Series:
        """A statistic of one tensor over the steps: shards put together, microbatches too.

        Without `kind` and `io` a name stands for the (first) output of the module, else its loss, weight or gradient,
        whichever was recorded. A step whose shards cannot be put together is NaN. A loss comes in the units of
        Megatron's log.
        """
        if statistic not in STATISTICS:
            raise RunError(f"{statistic!r} is no statistic{did_you_mean(statistic, STATISTICS)}; {_one_of(STATISTICS)}")
        kind, io, path = self._tensor_of(name, kind, io, path)
        if kind == "loss" and io == "output":
            points = log_losses(self._view.connection, "run_rows").get(name, [])
        else:
            query = f"""select step, case when bool_or(reason <> '') then null else {STATISTICS[statistic]} end
                from whole where name = ? and kind = ? and io = ? and path = ? and phase <> 'recompute'
                group by step order by step"""  # noqa: S608
            points = self._view.ask(query, [name, kind, io, path])
        values = [float("nan") if value is None else float(value) for _, value in points]
        return Series(np.array([step for step, _ in points], np.int64), np.array(values, np.float64))

    @property
    def loss(self) -> Series:
        """The first reported loss over the steps, in the units of Megatron's log."""
        found = log_losses(self._view.connection, "run_rows")
        if not found:
            raise RunError(f"{self.path}: no loss was recorded")
        steps, values = zip(*next(iter(found.values())), strict=True)
        return Series(np.array(steps, np.int64), np.array(values, np.float64))

    def tensor(
        self,
        name: str,
        step: int,
        *,
        kind: str | None = None,
        io: str | None = None,
        path: str | None = None,
        microbatch: int = 0,
    ) -> npt.NDArray[Any]:
        """A saved tensor (`task: tensor`), whole over the shards of all ranks; bfloat16 as float32.

        Gradients are divided by the loss scale. The samples of all data-parallel ranks stand beside each other.
        """
        kind, io, path = self._tensor_of(name, kind, io, path)
        connection = duckdb.connect()
        saved = read_saved(connection, labelled_query(connection, self.recorded, step, "api"))
        phases = ("forward", "backward", "optimizer")
        held = next((saved[key] for phase in phases if (key := (step, phase, kind, name, io, path)) in saved), [])
        if not held:
            accepted = "accepted: a step recorded with dump: {task: tensor}"
            raise RunError(f"{self.path}: {name} {kind} {io} of step {step} was not saved; {accepted}")
        return _whole(self.recorded, held, step, microbatch, f"{name} {kind} {io}")

    def _tensor_of(self, name: str, kind: str | None, io: str | None, path: str | None) -> tuple[str, str, str]:
        """Kind, side and path that are meant; raises RunError naming those there are."""
        query = "select distinct kind, io, path from whole where name = ? and phase <> 'recompute'"
        there = [(str(a), str(b), str(c)) for a, b, c in self._view.ask(query, [name])]
        if not there:
            raise RunError(f"{self.path}: nothing is called {name!r}{did_you_mean(name, self.names)}; see run.names")
        order = {value: place for place, value in enumerate((*_KINDS, *_IO))}
        asked = (kind, io, path)
        fitting = [one for one in there if all(a is None or a == b for a, b in zip(asked, one, strict=True))]
        if not fitting:
            raise RunError(f"{name}: has no {[a for a in asked if a]}; {_one_of(map(' '.join, there))}")
        first = min(fitting, key=lambda one: (order.get(one[0], 99), order.get(one[1], 99), one[2]))
        rivals = [one for one in fitting if one[:2] == first[:2]]
        # Of several results the first one is meant: modules of Megatron return their bias beside the output.
        if len(rivals) > 1 and first[1:] != ("output", "0"):
            paths = _one_of(one[2] for one in rivals)
            raise RunError(f"{name}: {first[0]} {first[1]} is several tensors, to be told apart by path=; {paths}")
        return first

    def __repr__(self) -> str:
        sizes = " ".join(f"{axis}{size}" for axis, size in self.layout.items() if size > 1) or "one rank"
        steps = f"{len(self.steps)} steps" + (f" {self.steps[0]}-{self.steps[-1]}" if self.steps else "")
        return f"<run {self.path}: {steps}, {len(self.ranks)} ranks, {sizes}>"

    def _repr_html_(self) -> str:
        facts = {"run": self.path, "steps": f"{len(self.steps)}: {_ends(self.steps)}", "ranks": len(self.ranks)}
        facts["layout"] = ", ".join(f"{axis} {size}" for axis, size in self.layout.items() if size > 1) or "one rank"
        lines = "".join(f"<tr><th>{key}</th><td>{html.escape(str(value))}</td></tr>" for key, value in facts.items())
        notes = "".join(f"<li>{html.escape(text)}</li>" for text in self.recorded.problems[:5])
        return f"<table>{lines}</table>" + (f"<ul>{notes}</ul>" if notes else "")


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Open a run directory; raises RunError, which names the file and the problem."""
    return LoadedRun(open_run(Path(path)))


Opened = LoadedRun | str | Path
"""A run, or its directory."""


def compare(golden: Opened, run: Opened, step: int | None = None) -> comparing.Comparison:
    """Compare two runs of any two layouts, as `msprobe-megatron compare` does."""
    return comparing.compare(_recorded(golden), _recorded(run), step)


def diagnose(run: Opened, step: int | None = None) -> diagnosing.Diagnosis:
    """What is wrong with one run, as `msprobe-megatron diagnose` says it."""
    return diagnosing.diagnose(_recorded(run), step)


def _recorded(run: Opened) -> Run:
    return run.recorded if isinstance(run, LoadedRun) else open_run(run)


def _as_form(table: Any, form: str) -> Any:
    if form not in _FORMS:
        raise RunError(f"form: {form!r} is not known{did_you_mean(form, _FORMS)}; {_one_of(_FORMS)}")
    if form == "auto":
        form = next((name for name in ("pandas", "polars") if importlib.util.find_spec(name)), "arrow")
    if form == "pandas":
        return table.to_pandas()
    if form == "polars":
        return importlib.import_module("polars").from_arrow(table)
    return table


def _whole(run: Run, held: list[Saved], step: int, microbatch: int, what: str) -> npt.NDArray[Any]:
    """Shards of one microbatch, of all data-parallel ranks, copied into one array."""
    starts = sorted({row.samples_from for row in held})
    # Each microbatch has as many first samples as there are data-parallel ranks.
    by_samples = {"b", "s*b"} & {dim.name for dim in ShardSpec.parse(held[0].shard).dims}
    width = run.sizes.get("dp", 1) if by_samples else 1
    chosen = starts[microbatch * width : (microbatch + 1) * width]
    if not chosen:
        raise RunError(f"{what}: no microbatch {microbatch} in step {step}; accepted: 0 to {len(starts) // width - 1}")
    rows = [row for row in held if row.samples_from in chosen]
    files, parts = TensorFiles(run), []
    for row in rows:
        spec = ShardSpec.parse(row.shard)
        if row.whole is None or spec.unknown is not None or len(row.whole) != len(spec.dims):
            raise RunError(f"{run.path}: {what}: its shards have no known place: {spec.unknown or row.shard}")
        dims = [dim.name for dim in spec.dims]
        samples = row.whole[dims.index("b")] if "b" in dims else 0
        batch = (0, samples * len(chosen), chosen.index(row.samples_from) * samples) if len(chosen) > 1 else None
        view = files.view(step, row.rank, row.tensor, row.shape)
        part = part_of(view, spec, row.whole, row.place, run.sizes, batch)
        if part is None:
            raise RunError(f"{run.path}: {what}: its shards cannot be put together ({row.shard})")
        parts.append(part)
    values = _values(parts, run, what)
    return values if rows[0].factor == 1 else values / rows[0].factor


def _values(parts: list[Part], run: Run, what: str) -> npt.NDArray[Any]:
    """The elements of all parts in one array; optimizers keep ranges of elements, which are laid end to end."""
    whole = parts[0].whole
    words = np.empty(math.prod(whole), parts[0].view.words.dtype)
    if parts[0].flat:
        held = [(part, *segment) for part in parts for segment in part.segments[0]]
        complete = sum(count for _, _, count, _ in held) == words.size
        for part, first, count, start in held:
            words[start : start + count] = part.view.words.reshape(-1)[first : first + count]
    else:
        complete = covers(parts, whole)
        words = together(parts, whole) if complete else words
    if not complete:
        raise RunError(f"{run.path}: {what}: not all of its shards were saved")
    if parts[0].view.dtype == "BF16":
        words = (words.astype("<u4") << 16).view("<f4")
    return words.reshape(whole)


def _one_of(words: Any) -> str:
    return f"accepted: {', '.join(sorted(map(str, words)))}"


def _ends(steps: list[int]) -> str:
    shown = [*steps[:3], "…", *steps[-2:]] if len(steps) > 6 else steps
    return ", ".join(map(str, shown)) or "none"
