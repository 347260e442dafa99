"""The table of `msprobe-megatron scaling` on the terminal and as files, with a plot of speed-up over cards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from msprobe_megatron.analysis.diagnose.throughput import RunThroughput
from msprobe_megatron.report.terminal.bench import markdown_table

_GIB = 1 << 30


def scaling_cells(lines: Sequence[RunThroughput]) -> list[dict[str, object]]:
    """The table's columns as text, one line per run."""
    timed = any(line.seconds_to_loss is not None for line in lines)
    return [
        {
            "name": line.name,
            "cards": line.cards,
            "layout": line.layout,
            "GiB/card": f"{line.memory_bytes / _GIB:.2f}",
            "local batch": f"{line.local_batch:g}",
            "global batch": f"{line.global_batch:g}",
            "workers": "" if line.workers is None else str(line.workers),
            "iter/s": f"{line.iterations_per_second:.3g}",
            "samples/s": f"{line.samples_per_second:.4g}",
            "speed-up": f"{line.speedup:.2f}",
            "efficiency": f"{line.efficiency:.0%}",
            **(
                {"s to loss": f"{line.seconds_to_loss:.1f}" if line.seconds_to_loss else "not reached"} if timed else {}
            ),
        }
        for line in lines
    ]


def print_scaling(lines: Sequence[RunThroughput]) -> None:
    """Print the table."""
    cells = scaling_cells(lines)
    table = Table(box=None, pad_edge=False)
    for heading in cells[0] if cells else ():
        table.add_column("" if heading == "name" else heading, justify="left" if heading == "name" else "right")
    for line in cells:
        table.add_row(*map(str, line.values()))
    console = Console()
    Console(width=max(100, console.width)).print(table)


def write_scaling(lines: Sequence[RunThroughput], out: Path) -> list[Path]:
    """Write scaling.json, scaling.md and scaling.svg into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "scaling_runs.json": json.dumps({"results": [line.as_dict() for line in lines]}, indent=1),
        "scaling_runs.md": markdown_table(scaling_cells(lines)) + "\n",
        "scaling_runs.svg": plot(lines),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def plot(lines: Sequence[RunThroughput]) -> str:
    """SVG plot of speed-up over cards, with the ideal line."""
    width, height, margin = 520, 360, 50
    most = max([1, *(line.cards for line in lines)])
    top = max([1.0, most / (lines[0].cards if lines else 1), *(line.speedup for line in lines)])

    def at(cards: float, speedup: float) -> tuple[float, float]:
        x = margin + cards / most * (width - 2 * margin)
        return x, height - margin - speedup / top * (height - 2 * margin)

    base = lines[0].cards if lines else 1
    (x0, y0), (x1, y1) = at(0, 0), at(most, most / base)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="13"><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{x0} {margin}V{y0}H{width - margin}" stroke="#444" fill="none"/>',
        f'<path d="M{x0} {y0}L{x1:.1f} {y1:.1f}" stroke="#999" stroke-dasharray="4 4" fill="none"/>',
        f'<text x="{width / 2}" y="{height - 10}" text-anchor="middle">cards</text>',
        f'<text x="10" y="{margin - 14}">speed-up (dashed: ideal)</text>',
    ]
    points = [at(line.cards, line.speedup) for line in lines]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    parts.append(f'<path d="M{path}" stroke="#3b6fb6" stroke-width="2" fill="none"/>')
    for line, (x, y) in zip(lines, points, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#3b6fb6"/>')
        parts.append(f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle">{line.cards}</text>')
        parts.append(f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle">{line.speedup:.2f}</text>')
    return "\n".join([*parts, "</svg>\n"])
