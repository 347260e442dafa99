"""The table of `msprobe-megatron bench`: on the terminal, and as Markdown, JSON and a picture of bars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from msprobe_megatron.report.files.files import write_chunks
from msprobe_megatron.report.terminal.tables import size_text

Line = Mapping[str, Any]
# Heading, key, and how it is written; a column that no line has is left out.
_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("", "name", "{}"),
    ("ratio", "ratio", "{:.3f}"),
    ("±", "uncertainty", "{:.3f}"),
    ("asked", "target", "{:.4g}"),
    ("msprobe", "peer_ratio", "{:.2f}"),
    ("training", "training_ratio", "{:.3f}"),
    ("least", "least_ratio", "{:.3f}"),
    ("ms a step", "median_s", "ms"),
    ("spread", "spread", "{:.0%}"),
    ("peak", "peak_bytes", "size"),
    ("memory", "memory_ratio", "{:.2f}"),
    ("added memory", "extra_bytes", "size"),
    ("written", "bytes", "size"),
    ("files", "files", "{}"),
    ("rows a step", "rows", "{}"),
    ("µs a row", "microseconds", "{:.1f}"),
    ("msprobe peak", "peer_peak_bytes", "size"),
    ("msprobe written", "peer_bytes", "size"),
    ("msprobe files", "peer_files", "{}"),
    ("on 8 ranks", "bytes_of_8_ranks", "size"),
    ("files on 8 ranks", "files_of_8_ranks", "{}"),
    ("ours a second", "ours_bytes_s", "size"),
    ("plain writer a second", "plain_bytes_s", "size"),
)
_NO_COLUMN = {"asked", "table", "notes"}  # keys of a line that get no column
_FILES_FIRST = ("msprobe files", "msprobe written", "msprobe peak", "added memory", "least", "files", "peak", "spread")
_SHOWN = {"ratio": "ratio to no tool", "speedup": "speed-up", "GB_a_second": "GB/s", "bytes": "size", "operations": ""}
_SHOWN["host_us_per_row"] = "µs of the host a row"
_PAPER = 100
_VERSIONS = ("torch", "megatron-core", "torch_npu", "numpy", "msprobe_megatron")
_KNOWN = {key for _, key, _ in _COLUMNS}


def print_costs(report: Mapping[str, Any]) -> None:
    """Print one line per variant, and below it what the columns mean."""
    console = Console()
    console = Console(width=max(_PAPER, console.width))
    for title, lines in tables_of(report["results"]):
        headings, rows = _fitting(*_cells(lines), console.width)
        table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
        for heading in headings:
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print(*_notes(lines), sep="\n", style="dim", end="")
    console.print(report["about"], style="dim")


def tables_of(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Lines by the `table` they belong to, under its title; all of them without one if none has it."""
    groups: dict[str, list[Line]] = {}
    title = ""
    for line in lines:
        title = str(line.get("table") or title)  # a line without figures stands with the one before it
        groups.setdefault(title, []).append(line)
    return list(groups.items())


def _notes(lines: Sequence[Line]) -> list[str]:
    """What lines of a table assume, or why they are empty, each once."""
    found = {name: text for line in lines for name, text in (line.get("notes") or {}).items()}
    return [f"{name}: {text}" for name, text in found.items()] + [""] * bool(found)


def _width(headings: list[str], rows: list[list[str]]) -> int:
    return sum(2 + max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True))


def _fitting(headings: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Drop columns that matter only in a file, from the right, until the rest fits."""
    first = [headings.index(heading) for heading in _FILES_FIRST if heading in headings]
    order = [*first, *range(len(headings) - 1, 1, -1)]
    left = list(range(len(headings)))

    def cut(of: list[str]) -> list[str]:
        return [of[i] for i in left]

    for index in order:
        if _width(cut(headings), [cut(row) for row in rows]) <= width:
            break
        if index in left:
            left.remove(index)
    return cut(headings), [cut(row) for row in rows]


def write_costs(report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write `<file>.json`, `.md` and `.svg` of the report into `out`; returns their paths."""
    name = report.get("file", report["bench"])
    texts = {
        "md": markdown(report),
        "svg": bars(report["results"], f"bench {name}"),
        # Last: when the JSON exists, all files exist.
        "json": json.dumps(report, indent=1),
    }
    paths = []
    for ending, text in texts.items():
        path = out / f"{name}.{ending}"
        write_chunks(path, [text.encode()], make_folder=True)
        paths.append(path)
    return paths


def markdown(report: Mapping[str, Any]) -> str:
    """The table in Markdown, with the machine it was measured on."""
    parts = [titled_tables(report["results"]), report["about"], *report.get("profiles", [])]
    return "\n\n".join([*parts, machine_text(report["machine"])]) + "\n"


def titled_tables(lines: Sequence[Line]) -> str:
    """The tables that lines belong to, each under its title and above its notes."""
    parts = []
    for title, some in tables_of(lines):
        parts += [f"**{title[:1].upper()}{title[1:]}**"] * bool(title)
        parts += [markdown_table(some), "; ".join(text for text in _notes(some) if text)]
    return "\n\n".join(part for part in parts if part)


def markdown_table(lines: Sequence[Line]) -> str:
    """Only the table."""
    headings, rows = _cells(lines)
    text = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    text.insert(1, "|" + "|".join("---" if i == 0 else "---:" for i in range(len(headings))) + "|")
    return "\n".join(text)


def machine_text(machine: Mapping[str, Any]) -> str:
    """One line on the machine."""
    versions = machine.get("versions", {})
    some = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name))
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {size_text(machine['memory_bytes'])},"
        f" {machine['device']}, load {machine['load']:.1f}; {machine['system']}; {some}."
    )


_BAR_HEIGHT, _BAR_WIDTH = 22, 560


def bars(lines: Sequence[Line], title: str) -> str:
    """SVG picture of the ratios: one bar per line, a tick at its target, a dashed line at 1 (no tool)."""
    # Lines without a ratio are shown by the first of their other columns.
    key = next((key for key in _SHOWN if any(line.get(key) is not None for line in lines)), "ratio")
    shown = [line for line in lines if isinstance(line.get(key), int | float)]
    left = 30 + 7 * max([10, *(len(str(line["name"])) for line in shown)])
    scale = _BAR_WIDTH / _longest(shown, key)
    bottom = _BAR_HEIGHT * len(shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + _BAR_WIDTH + 170}" height="{bottom + 50}"'
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">{escape(f"{title}: {_SHOWN[key]}")}</text>',
    ]
    for index, line in enumerate(shown):
        parts += _bar(line, key, left, 34 + index * _BAR_HEIGHT, scale)
    if key == "ratio":
        one = left + scale
        parts.append(f'<path d="M{one:.1f} 30V{40 + bottom}" stroke="#888" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>\n"])


def _longest(lines: Sequence[Line], key: str) -> float:
    longest = max([1e-9, *(float(max(line[key], line.get("peer_ratio") or 0)) for line in lines)])
    return max(1.0, longest) if key == "ratio" else longest


def _bar(line: Line, key: str, left: int, y: int, scale: float) -> list[str]:
    """Name, bar of the peer, bar, tick of the target, and value of one line."""
    value = line[key]
    target, peer = (line.get("target"), line.get("peer_ratio")) if key == "ratio" else (None, None)
    colour = "#3b6fb6" if target is None or value <= target else "#c2571a"
    parts = [f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(str(line["name"]))}</text>']
    if peer:
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{peer * scale:.1f}" height="16" fill="#d8d8d8"/>')
    parts.append(f'<rect x="{left}" y="{y + 2}" width="{value * scale:.1f}" height="16" fill="{colour}"/>')
    if target is not None:
        parts.append(f'<path d="M{left + target * scale:.1f} {y}v20" stroke="black" stroke-width="2"/>')
    end = left + max(value, peer or 0, target or 0) * scale + 6
    text = size_text(value) if key.endswith("bytes") else f"{value:.3g}"
    text += f" (msprobe {peer:.3g})" if peer else ""
    return [*parts, f'<text x="{end:.1f}" y="{y + 14}">{text}</text>']


def _cells(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    columns = [c for c in _COLUMNS if any(line.get(c[1]) not in (None, "") for line in lines)]
    # Columns of a single bench come after the common ones, under their own key.
    more = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    more = {key: None for key in more if key not in _KNOWN and key not in _NO_COLUMN}
    sizes = {key for key in more if key.startswith("bytes_") and "_per_" not in key}
    columns += [(key.replace("_", " "), key, "size" if key in sizes else "{}") for key in more]
    return [heading for heading, _, _ in columns], [
        [_text(line.get(key), form) for _, key, form in columns] for line in lines
    ]


def _text(value: Any, form: str) -> str:
    if value is None:
        return ""
    if form == "ms":
        return f"{value * 1e3:.1f}"
    if form == "size":
        return size_text(value)
    if form == "{}" and isinstance(value, float):
        return f"{value:.4g}"
    return form.format(value)
