"""The table of `msprobe-megatron bench`: on the terminal, and as Markdown, JSON and a picture of bars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from msprobe_megatron.report.files import write_chunks

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
_NO_COLUMN = {"asked"}  # of further figures of a line
_FILES_FIRST = ("msprobe files", "msprobe written", "msprobe peak", "added memory", "least", "files", "peak", "spread")
_SHOWN = {"ratio": "ratio to no tool", "speedup": "speed-up", "GB_a_second": "GB/s", "bytes": "size", "operations": ""}
_PAPER = 100
_VERSIONS = ("torch", "megatron-core", "torch_npu", "numpy", "msprobe_megatron")
_KNOWN = {key for _, key, _ in _COLUMNS}
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def print_costs(report: Mapping[str, Any]) -> None:
    """Print one line a variant, and under it what the figures mean.

    Example::

        print_costs({"about": "…", "results": [result.as_dict()]})
    """
    console = Console()
    console = Console(width=max(_PAPER, console.width))
    headings, rows = _fitting(*_cells(report["results"]), console.width)
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(report["about"], style="dim")


def _width(headings: list[str], rows: list[list[str]]) -> int:
    return sum(2 + max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True))


def _fitting(headings: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Leave out what is only of interest in a file, from the right, until the rest fits."""
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
    """Write `<file>.json`, `.md` and `.svg` of the report into `out`; returns their paths.

    Example::

        write_costs(report, Path("bench_out"))
    """
    name = report.get("file", report["bench"])
    texts = {
        "md": markdown(report),
        "svg": bars(report["results"], f"bench {name}"),
        # Last: who finds it finds all.
        "json": json.dumps(report, indent=1),
    }
    paths = []
    for ending, text in texts.items():
        path = out / f"{name}.{ending}"
        write_chunks(path, [text.encode()], make_folder=True)
        paths.append(path)
    return paths


def markdown(report: Mapping[str, Any]) -> str:
    """The table in Markdown, with the machine it was measured on.

    Example: ``markdown(report).startswith("|")``.
    """
    parts = [markdown_table(report["results"]), report["about"], *report.get("profiles", [])]
    return "\n\n".join([*parts, machine_text(report["machine"])]) + "\n"


def markdown_table(lines: Sequence[Line]) -> str:
    """Only the table.

    Example: ``markdown_table([{"name": "L0", "ratio": 1.02}])``.
    """
    headings, rows = _cells(lines)
    text = ["| " + " | ".join(cells) + " |" for cells in (headings, *rows)]
    text.insert(1, "|" + "|".join("---" if i == 0 else "---:" for i in range(len(headings))) + "|")
    return "\n".join(text)


def machine_text(machine: Mapping[str, Any]) -> str:
    """One line on the machine.

    Example: ``machine_text(machine())``.
    """
    versions = machine.get("versions", {})
    some = ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name))
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {size_text(machine['memory_bytes'])},"
        f" {machine['device']}, load {machine['load']:.1f}; {machine['system']}; {some}."
    )


def bars(lines: Sequence[Line], title: str) -> str:
    """A picture of the ratios: one bar a line, a mark where no tool would end, a tick where the target is.

    Example::

        Path("dump.svg").write_text(bars(lines, "bench dump"))
    """
    # What has no ratio is shown by the first of its other figures.
    figure = next((key for key in _SHOWN if any(line.get(key) is not None for line in lines)), "ratio")
    shown = [line for line in lines if isinstance(line.get(figure), int | float)]
    height, width = 22, 560
    left = 30 + 7 * max([10, *(len(str(line["name"])) for line in shown)])
    longest = max([1e-9, *(max(line[figure], line.get("peer_ratio") or 0) for line in shown)])
    longest = max(1.0, longest) if figure == "ratio" else longest
    scale = width / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 170}" height="{height * len(shown) + 50}"'
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-weight="bold">{escape(f"{title}: {_SHOWN[figure]}")}</text>',
    ]
    for index, line in enumerate(shown):
        y, ratio = 34 + index * height, line[figure]
        target, peer = (line.get("target"), line.get("peer_ratio")) if figure == "ratio" else (None, None)
        colour = "#3b6fb6" if target is None or ratio <= target else "#c2571a"
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(str(line["name"]))}</text>')
        if peer:
            parts.append(f'<rect x="{left}" y="{y + 2}" width="{peer * scale:.1f}" height="16" fill="#d8d8d8"/>')
        parts.append(f'<rect x="{left}" y="{y + 2}" width="{ratio * scale:.1f}" height="16" fill="{colour}"/>')
        if target is not None:
            at = left + target * scale
            parts.append(f'<path d="M{at:.1f} {y}v20" stroke="black" stroke-width="2"/>')
        end = left + max(ratio, peer or 0, target or 0) * scale + 6
        text = (size_text(ratio) if figure.endswith("bytes") else f"{ratio:.3g}") + (
            f" (msprobe {peer:.3g})" if peer else ""
        )
        parts.append(f'<text x="{end:.1f}" y="{y + 14}">{text}</text>')
    if figure == "ratio":
        one = left + scale
        parts.append(f'<path d="M{one:.1f} 30V{40 + height * len(shown)}" stroke="#888" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>\n"])


def _cells(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    columns = [c for c in _COLUMNS if any(line.get(c[1]) not in (None, "") for line in lines)]
    # What a bench adds for itself comes after what all have, under its own key.
    more = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    more = {key: None for key in more if key not in _KNOWN and key not in _NO_COLUMN}
    columns += [(key.replace("_", " "), key, "size" if key.startswith("bytes_") else "{}") for key in more]
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


def size_text(count: float) -> str:
    """Bytes for people.

    Example: ``size_text(1536)  # "1.5 KiB"``.
    """
    for unit in _SIZES:
        if count < 1024 or unit == _SIZES[-1]:  # noqa: PLR2004
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
