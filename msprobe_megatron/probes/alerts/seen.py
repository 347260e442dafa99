"""What a rule looks at: the rows of one step as columns, and to which series each row belongs.

A series is one tensor over time: its kind, name, io, path, phase and virtual stage; its microbatches are values of one
series. Series are numbered once; rows that come again as the same list are not looked up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.record.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from msprobe_megatron.record.watching import StepRows
from msprobe_megatron.topology.layers import layer_of

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
MOST_SERIES = 50_000
"""Series that are remembered; what comes beyond is not judged by rules with a history."""


class SeriesNumbers:
    """Gives every series a number, up to `MOST_SERIES`.

    Example::

        numbers = SeriesNumbers()
        numbers.of(rows)        # array of numbers, -1 where there was no room
    """

    def __init__(self, most: int = MOST_SERIES) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._most = most
        self._last: tuple[Sequence[Row], Numbers] | None = None

    def __len__(self) -> int:
        return len(self._known)

    def of(self, rows: Sequence[Row]) -> Numbers:
        """The numbers of the series that the rows belong to."""
        if self._last is None or self._last[0] is not rows:
            self._last = (rows, np.fromiter(map(self._number, rows), np.int64, len(rows)))
        return self._last[1]

    def _number(self, row: Row) -> int:
        key = (row.kind, row.name, row.io, row.path, row.phase, row.vpp)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                return -1
            found = self._known[key] = len(self._known)
        return found


class Columns(Mapping[str, Any]):
    """The columns of a step's rows by name, each made when it is first asked for.

    Example::

        columns = Columns(rows)
        columns["norm"]         # NaN where a row has no figures

    What does not change with the figures is taken from `fixed`, columns of the same list of rows, if there are any.
    """

    def __init__(self, seen: StepRows, fixed: Columns | None = None) -> None:
        self.seen = seen
        self._made: dict[str, Any] = {}
        self._fixed: dict[str, Any] = fixed._fixed if fixed is not None and fixed.seen.rows is seen.rows else {}
        slots = self._fixed.get("slot")
        if slots is None:
            slots = self._fixed["slot"] = np.fromiter((row.slot for row in seen.rows), np.int64, len(seen.rows))
        # One line more than there are slots, at -1, for rows without figures.
        self._floats: Floats = np.concatenate((seen.floats, np.full((1, 5), np.nan)))[slots]
        self._counts: Numbers = np.concatenate((seen.counts, np.full((1, 4), -1)))[slots]
        self.measured: Flags = self._counts[:, 0] >= 0

    def __getitem__(self, name: str) -> Any:
        kept = self._fixed if name in _OF_THE_ROWS else self._made
        found = kept.get(name)
        if found is None:
            found = kept[name] = _MAKERS[name](self)
        return found

    @property
    def floating(self) -> Flags:
        """Rows of floating-point numbers; counts of tokens and masks have no usual size."""
        found = self._fixed.get("floating")
        if found is None:
            found = self._fixed["floating"] = np.array(["float" in row.dtype for row in self.seen.rows], bool)
        return np.asarray(found)

    @property
    def sizes(self) -> Floats:
        """Logarithm of every root mean square: minus infinity for zeros, NaN where something is not finite or absent.

        Not of the norm: an expert gets more tokens in one step than in another.
        """
        found = self._made.get("sizes")
        if found is None:
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = np.log(self["sumsq"] / self["numel"]) / 2
                found = self._made["sizes"] = np.where(self["n_nan"] + self["n_inf"] == 0, mean, np.nan)
        return np.asarray(found)

    def __iter__(self) -> Any:
        return iter(_MAKERS)

    def __len__(self) -> int:
        return len(_MAKERS)

    def floats(self, index: int) -> Floats:
        """One of min, max, sum, sumsq, absmax."""
        return self._floats[:, index]

    def counts(self, index: int) -> Floats:
        """One of the numbers of NaN, +Inf, -Inf, zeros; NaN where nothing was measured."""
        return np.where(self.measured, self._counts[:, index], np.nan)

    @property
    def finite(self) -> Floats:
        """How many elements are finite."""
        bad = self["n_nan"] + self["n_inf"]
        return np.asarray(self["numel"] - bad, np.float64)

    def texts(self, field: str) -> npt.NDArray[np.object_]:
        """A field of the rows as it stands there."""
        found = np.empty(len(self.seen.rows), object)
        found[:] = [getattr(row, field) for row in self.seen.rows]
        return found

    def numbers(self, field: str) -> Floats:
        """A field of the rows as numbers; None becomes NaN."""
        return np.array([np.nan if (v := getattr(row, field)) is None else v for row in self.seen.rows], np.float64)


def _share(part: Floats, whole: Floats) -> Floats:
    share: Floats = np.divide(part, whole, out=np.full(len(part), np.nan), where=whole > 0)
    return share


def _std(columns: Columns) -> Floats:
    mean = columns["mean"]
    return np.asarray(np.sqrt(np.maximum(_share(columns["sumsq"], columns.finite) - mean * mean, 0.0)))


def _layers(columns: Columns) -> Floats:
    found = [layer_of(row.name) for row in columns.seen.rows]
    return np.array([np.nan if layer is None else layer for layer in found], np.float64)


def _makers() -> dict[str, Callable[[Columns], Any]]:
    found: dict[str, Callable[[Columns], Any]] = {
        "n_inf": lambda c: c["n_posinf"] + c["n_neginf"],
        "norm": lambda c: np.sqrt(c["sumsq"]),
        "mean": lambda c: _share(c["sum"], c.finite),
        "std": _std,
        "zeros": lambda c: _share(c["n_zero"], c["numel"]),
        "step": lambda c: np.full(len(c.seen.rows), float(c.seen.step)),
        "layer": _layers,
    }
    for names, make in (
        (("kind", "name", "io", "path", "phase", "op", "dtype"), Columns.texts),
        (("numel", "microbatch", "seq"), Columns.numbers),
    ):
        found.update({name: partial(_field, make, name) for name in names})
    found.update({name: partial(_field, Columns.floats, i) for i, name in enumerate(FLOAT_COLUMNS)})
    found.update({name: partial(_field, Columns.counts, i) for i, name in enumerate(COUNT_COLUMNS)})
    return found


def _field(make: Callable[[Columns, Any], Any], which: Any, columns: Columns) -> Any:
    return make(columns, which)


_MAKERS = _makers()
_OF_THE_ROWS = frozenset(
    {"kind", "name", "io", "path", "phase", "op", "dtype", "numel", "microbatch", "seq", "layer"},
)
