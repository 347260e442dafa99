"""CSV files as msprobe's monitor writes them: a directory a rank, a file a kind, its columns and names.

Only what the ancestor has a file for; collectives and metrics stay in the Parquet files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_megatron.analysis.load.run import Run

_FIGURES = ("min", "max", "norm", "mean", "nans", "zeros", "shape", "dtype")
COLUMNS = ("vpp_stage", "name", "step", *_FIGURES)
COLUMNS_BY_MICROBATCH = ("vpp_stage", "name", "step", "micro_step", *_FIGURES)
# File of the ancestor -> which rows go there, whether it has a column of microbatches, and their name there.
_FILES: dict[str, tuple[str, bool]] = {
    "actv": ("kind = 'activation'", True),
    "actv_grad": ("kind = 'gradient'", True),
    "grad_unreduced": ("kind = 'grad_unreduced' and path = ''", False),
    "grad_reduced": ("kind = 'grad_reduced'", False),
    "exp_avg": ("kind = 'optimizer_state' and io = 'exp_avg'", False),
    "exp_avg_sq": ("kind = 'optimizer_state' and io = 'exp_avg_sq'", False),
    "param_origin": ("kind = 'parameter' and path = 'before'", False),
    "param_updated": ("kind = 'parameter' and path = 'after'", False),
    "other": ("kind = 'optimizer_state' and io = 'sign_agreement'", False),
}


class CsvFile(NamedTuple):
    """A file to write, below the directory of all."""

    path: Path
    columns: Sequence[str]
    rows: list[tuple[Any, ...]]


def monitor_csv(run: Run) -> Iterator[CsvFile]:
    """The files of a run that was watched; raises RunError for one that was not."""
    rows = run.monitor_rows()
    ranks = [rank for (rank,) in rows.aggregate("rank", "rank").order("rank").fetchall()]
    for rank in ranks:
        folder = _folder(run, rank)
        for name, (chosen, by_microbatch) in _FILES.items():
            found = rows.filter(f"rank = {int(rank)} and phase <> 'recompute' and {chosen}").order("step, seq")
            lines = [_line(row, by_microbatch) for row in found.project(_WANTED).fetchall()]
            if lines:
                steps = [line[2] for line in lines]
                columns = COLUMNS_BY_MICROBATCH if by_microbatch else COLUMNS
                yield CsvFile(folder / f"{name}_{min(steps)}-{max(steps)}.csv", columns, lines)


_WANTED = (
    "vpp, kind, name, io, path, step, microbatch, min, max, sqrt(sumsq) as norm, sum / nullif(numel, 0) as mean, n_nan,"
    " n_zero / nullif(numel, 0) as zeros, shape, dtype"
)


def _line(row: tuple[Any, ...], by_microbatch: bool) -> tuple[Any, ...]:
    vpp, kind, name, io, path, step, microbatch, *figures, shape, dtype = row
    if kind in ("activation", "gradient"):
        name = f"{name}.{io}" + (f"_{path}" if path.isdigit() else f".{path}" if path else "")
    when = (step, 0 if microbatch is None else microbatch) if by_microbatch else (step,)
    return (vpp or 0, name, *when, *figures, str(list(shape)), f"torch.{dtype}")


def _folder(run: Run, rank: int) -> Path:
    """A directory as the ancestor names them: time, rank, and eight digits that tell runs apart."""
    try:
        moment = datetime.fromisoformat(str(run.facts.get("started")).replace("Z", "+00:00"))
    except ValueError:
        moment = datetime.fromtimestamp(0, timezone.utc)
    apart = hashlib.sha256(f"{run.path.resolve()}".encode()).hexdigest()[:8]
    return Path(f"{moment:%b%d_%H-%M-%S}-rank{rank}-{apart}")
