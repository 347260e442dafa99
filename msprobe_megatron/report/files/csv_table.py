"""CSV of a run's tensors. A name that a spreadsheet would take for a formula is quoted so that it stays a name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_LINES = 5000


def csv_chunks(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    r"""The text of a CSV file, in pieces; None becomes an empty field.

    Example::

        >>> b"".join(csv_chunks(("step", "name"), [(0, "=1+1")]))
        b"step,name\r\n0,'=1+1\r\n"
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for number, row in enumerate(rows, start=1):
        writer.writerow([plain(value) for value in row])
        if number % _LINES == 0:
            yield buffer.getvalue().encode("utf-8", "replace")
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode("utf-8", "replace")


def plain(value: Any) -> Any:
    """A field as it is written: texts that start like a formula get a quote in front, numbers stay.

    Example::

        >>> plain("@SUM(A1)"), plain(-1.5)
        ("'@SUM(A1)", -1.5)
    """
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
