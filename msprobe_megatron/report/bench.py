"""The table of `msprobe-megatron bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_costs(lines: Sequence[dict[str, Any]]) -> None:
    """Print one line a variant: ratios to no tool, CPU time of a step, rows, and what a row costs the training thread.

    Example::

        print_costs([result.as_dict() for result in measure(WORKLOADS["h64"], out)])
    """
    table = Table(box=None, pad_edge=False)
    for heading in ("", "ratio", "training thread", "CPU ms a step", "rows a step", "µs a row"):
        table.add_column(heading, justify="left" if not heading else "right")
    for line in lines:
        cost = line["microseconds"]
        table.add_row(
            line["name"],
            f"{line['ratio']:.3f}",
            f"{line['training_ratio']:.3f}",
            f"{line['cpu_ms']:.1f}",
            str(line["rows"] or ""),
            "" if cost is None else f"{cost:.1f}",
        )
    Console().print(table)
