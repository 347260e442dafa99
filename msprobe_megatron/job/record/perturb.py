"""Examined results of a few steps on their way to disk: judged in the writer thread, where their figures arrive."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.probes.perturb.preheat import Preheat
from msprobe_megatron.probes.perturb.verdict import Examined, Verdict, judge
from msprobe_megatron.record.batches import ROW_BYTES, WriterCounts
from msprobe_megatron.record.directory import RunDirectory
from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.record.table import build_table
from msprobe_megatron.topology.layers import layer_of

Tell = Callable[[Examined, Verdict], None]


@dataclass(frozen=True)
class PerturbBatch:
    """Rows of kind ``perturb`` of one or several steps, in one file.

    Example::

        writer.submit(PerturbBatch(examined, figures.seal(), tell))
    """

    examined: list[Examined]
    figures: Callable[[], npt.NDArray[np.float64]]
    tell: Tell
    verdicts: Counter[str]
    preheat: Preheat | None = None

    @property
    def step(self) -> int:
        """The first step in it."""
        return self.examined[0].step

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the batch holds while it waits."""
        return 2 * ROW_BYTES * (1 + len(self.examined))

    def coming(self, last: int) -> int:
        """Taken to be as large as the last."""
        return last

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Judge, in the order of execution, tell of what was found, and write the rows."""
        import pyarrow as pa

        figures = self.figures()
        rows: dict[int, list[Row]] = {}
        for seen in self.examined:
            line = figures[seen.line] if seen.line >= 0 else figures[:0]
            threshold = self.preheat.threshold(seen) if self.preheat is not None else None
            verdict = judge(seen, line, threshold)
            self.verdicts[verdict.word] += 1
            if self.preheat is not None:
                self.preheat.saw(seen, line)
            if verdict.word != "ok":
                self.tell(seen, verdict)
            rows.setdefault(seen.step, []).append(_row(seen, verdict))
        nothing = np.empty((0, len(FLOAT_COLUMNS))), np.empty((0, len(COUNT_COLUMNS)), np.int64)
        tables = [build_table(step, some, *nothing, identity) for step, some in sorted(rows.items())]
        first, last = min(rows), max(rows)
        path = f"perturb/rank_{identity['rank']:05d}/steps_{first:06d}_{last:06d}.parquet"
        return directory.write_table(path, pa.concat_tables(tables))

    def count(self, counts: WriterCounts) -> None:
        """Its rows were written."""
        counts.rows_written += len(self.examined)

    def drop(self, counts: WriterCounts) -> None:
        """Its rows are lost."""
        counts.rows_dropped += len(self.examined)


def _row(seen: Examined, verdict: Verdict) -> Row:
    extra: dict[str, Any] = {
        "verdict": verdict.word,
        "severity": verdict.severity,
        "mode": seen.mode,
        "stage": seen.stage,
        "profile": seen.profile,
        "class": seen.kind,
        "call": seen.number,
        "layer": layer_of(seen.name.partition("/")[0]),
        **verdict.figures,
    }
    return Row(
        seen.seq,
        seen.microbatch,
        seen.phase,
        seen.chunk,
        "perturb",
        seen.name,
        "output" if seen.stage == "forward" else "input",
        seen.path,
        seen.api,
        -1,
        seen.dtype,
        seen.shape,
        None,
        "",
        math.prod(seen.shape),
        -1,
        json.dumps({key: _plain(value) for key, value in extra.items()}),
    )


def _plain(value: Any) -> Any:
    """JSON has no infinities: a very large number stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(1e300, value)
    return value
