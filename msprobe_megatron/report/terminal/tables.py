"""Terminal tables: at most 100 columns, coloured on a terminal, plain when piped. Formats only; computes nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from msprobe_megatron.analyse.summary import Summary
from msprobe_megatron.report.harmless import harmless

_WIDTH = 100
_NARROW = 80
_PLAIN = str.maketrans({"…": "~", "·": ".", "×": "x", "–": "-", "→": ">", "█": "#", "━": "-"})


class _Console(Console):
    """A console on which data cannot move the cursor, set the title or clear the screen."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(self._printable(segment.text), segment.style) for segment in buffer
        )

    def _printable(self, text: str) -> str:
        """Harmless, and in the letters of the locale: one that has no "…" gets another single character for it."""
        text = harmless(text)
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.translate(_PLAIN).encode(self.encoding, "replace").decode(self.encoding)
        return text


def console(stream: Any = None) -> Console:
    """A console that never wraps at more than 100 columns."""
    stream = stream if stream is not None else sys.stdout
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if stream.isatty() else _WIDTH
    return _Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_summary(summary: Summary, out: Console | None = None) -> None:
    """The answer to `msprobe-megatron summary RUN`."""
    out = out if out is not None else console()
    layout = " ".join(f"{axis.upper()}{size}" for axis, size in summary.sizes.items()) or "one process"
    versions = summary.versions
    out.print(f"[bold]{escape(summary.path)}[/bold]")
    out.print(
        f"{plural(summary.world, 'rank')} ({layout}), megatron-core {escape(versions.get('megatron-core', '?'))},"
        f" torch {escape(versions.get('torch', '?'))}"
    )
    steps = span(summary.steps)
    out.print(
        f"{summary.rows:,} rows of {plural(len(summary.ranks), 'rank')}, steps {steps}, {size(summary.bytes)} on disk"
    )
    if summary.lines:
        out.print(_table(summary, narrow=out.width < _NARROW))
    for reason, count in sorted(summary.unmerged.items()):
        out.print(f"not merged over shards: {count} rows: {escape(reason)}")
    for text in summary.warnings:
        out.print(Text(f"! {text}", style="yellow"))
    if not summary.warnings:
        out.print("everything that was asked was recorded", style="green")


def _table(summary: Summary, *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("where")
    table.add_column("kind")
    # A figure that is cut off is a wrong figure: on a narrow terminal there are fewer of them.
    for name in (
        ("absmax", "norm", "non-finite") if narrow else ("names", "tensors", "absmax", "norm", "zeros", "non-finite")
    ):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for line in summary.lines:
        bad = Text(str(line.non_finite), style="bold red" if line.non_finite else "")
        kind = line.kind if line.replicas_agree else f"{line.kind} (replicas differ)"
        place = escape(line.place) if line.place != previous else ""
        zeros = "" if line.zeros is None else f"{100 * line.zeros:.1f}%"
        largest = (number(line.absmax), number(line.norm))
        wide = (str(line.names), str(line.tensors), *largest, zeros, bad)
        table.add_row(place, kind, *((*largest, bad) if narrow else wide))
        previous = line.place
    return table


def print_ledger(lines: Sequence[dict[str, Any]], title: str, out: Console | None = None) -> None:
    """The patches: what was asked, bound, fired."""
    out = out if out is not None else console()
    out.print(f"[bold]{escape(title)}[/bold]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("patch", "phase", "state", "fired"):
        table.add_column(name, no_wrap=name != "patch", overflow="fold", justify="right" if name == "fired" else "left")
    for line in lines:
        style = {"bound": "green", "absent": "yellow", "left": "yellow"}.get(line["state"], "")
        table.add_row(escape(line["id"]), line["phase"], Text(line["state"], style=style), str(line["fired"]))
    out.print(table)
    for line in lines:
        if line["reason"]:
            out.print(f"{escape(line['id'])}: {escape(line['reason'])}")


def plural(count: int, word: str) -> str:
    """A count with its word.

    Example::

        >>> plural(1, "rank"), plural(4, "rank")
        ('1 rank', '4 ranks')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def number(value: float | None) -> str:
    """Four significant digits, or nothing."""
    return "" if value is None else f"{value:.4g}"


def size(count: int) -> str:
    """Bytes for people.

    Example::

        >>> size(123456)
        '120.6 KiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges.

    Example::

        >>> span([0, 1, 2, 5])
        '0-2, 5'
    """
    ranges: list[list[int]] = []
    for value in numbers:
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges) or "none"
