"""Terminal tables: at most 100 columns, coloured on a terminal, plain when piped. Formats only; computes nothing.

Run directories may come from elsewhere: control characters in their text never reach the terminal (`harmless`).
"""

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

from msprobe_megatron.analysis.diagnose.summary import Summary

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
        """Without control characters, and in the encoding of the locale; "…" becomes "~" where there is none."""
        text = harmless(text)
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.translate(_PLAIN).encode(self.encoding, "replace").decode(self.encoding)
        return text


def console(stream: Any = None) -> Console:
    """A console of at most 100 columns; lines of text that go into a pipe or a file are never broken."""
    stream = stream if stream is not None else sys.stdout
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) if stream.isatty() else _WIDTH
    return _Console(file=stream, width=width, highlight=False, soft_wrap=not stream.isatty())


def print_summary(summary: Summary, out: Console | None = None) -> None:
    """Print the result of `msprobe-megatron summary RUN`."""
    out = out if out is not None else console()
    layout = " ".join(f"{axis.upper()}{size}" for axis, size in summary.sizes.items()) or "one process"
    versions = summary.versions
    out.print(f"[bold]{escape(summary.path)}[/bold]")
    out.print(
        f"{plural(summary.world, 'rank')} ({layout}), megatron-core {escape(versions.get('megatron-core', '?'))},"
        f" torch {escape(versions.get('torch', '?'))}"
    )
    ranks, steps = plural(len(summary.ranks), "rank"), span(summary.steps)
    out.print(f"{summary.rows:,} rows of {ranks}, steps {steps}, {size_text(summary.bytes)} on disk")
    if summary.lines:
        out.print(_table(summary, narrow=out.width < _NARROW))
    for reason, count in sorted(summary.unmerged.items()):
        out.print(f"not merged over shards: {count} rows: {escape(reason)}")
    for text in summary.warnings:
        out.print(Text(f"! {text}", style="yellow"))
    if not summary.warnings:
        out.print("everything requested was recorded", style="green")


def _table(summary: Summary, *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("where")
    table.add_column("kind")
    # A truncated number is a wrong number: a narrow terminal gets fewer columns.
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
    """Print the patches: requested, bound, fired."""
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
    """A count with its noun.

    Example::

        >>> plural(1, "rank"), plural(4, "rank")
        ('1 rank', '4 ranks')
    """
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def number(value: float | None) -> str:
    """Four significant digits; empty for None."""
    return "" if value is None else f"{value:.4g}"


def size_text(count: float) -> str:
    """Bytes in a readable unit.

    Example::

        >>> size_text(123456)
        '120.6 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


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


# Control characters, and those that change the direction of writing.
_CODES = (*range(10), *range(11, 32), *range(127, 160), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = {code: "·" for code in _CODES}


def harmless(text: str) -> str:
    r"""The text with every control character except the newline shown as a dot.

    Example::

        >>> harmless("layer\x1b[2J")
        'layer·[2J'
    """
    return text.translate(_CONTROLS)
