"""Terminal form of a comparison of checkpoints: counts, then the tensors that differ, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from msprobe_megatron.report.terminal.tables import console

_SHOWN = 20
_NAME = 58


def print_diff(result: dict[str, Any], *, everything: bool = False, out: Console | None = None) -> None:
    """Print the result of `msprobe-megatron ckpt-diff A B`."""
    out = out if out is not None else console()
    sides = [
        f"{result[side]} ({form}{'' if step is None else f', iteration {step}'})"
        for side, form, step in zip(("left", "right"), result["forms"], result["iterations"], strict=True)
    ]
    out.print(escape(" | ".join(sides)))
    states = {"only_left": "only in A", "only_right": "only in B", "layout": "not comparable"}
    parts = [f"{count} {states.get(state, state)}" for state, count in result["counts"].items() if count]
    out.print(", ".join(parts) or "no tensors")
    for cause in result["causes"]:
        out.print(Text(f"cause: {cause['text']} [{cause['id']}]", style="bold"))
    for text in result["problems"][:5]:
        out.print(Text(text, style="yellow"))
    different = [item for item in result["tensors"] if item["state"] != "equal"]
    if different:
        out.print(_table(different if everything else different[:_SHOWN]))
    if len(different) > _SHOWN and not everything:
        out.print(f"and {len(different) - _SHOWN} more (--all shows them)")


def _table(items: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tensor", "of", "relative", "cosine", "digests"):
        table.add_column(name, justify="left" if name in ("tensor", "of", "digests") else "right", no_wrap=True)
    for item in items:
        name = item["name"] if len(item["name"]) <= _NAME else f"…{item['name'][-_NAME + 1 :]}"
        table.add_row(
            escape(name),
            escape(item["kind"]),
            "" if item["relative"] is None else f"{item['relative']:.1e}",
            "" if item["cosine"] is None else f"{item['cosine']:.6f}",
            _last(item),
        )
    return table


def _last(item: dict[str, Any]) -> str:
    if item["digests"]:
        return " ".join(digest[:8] for digest in item["digests"])
    return escape(item["reason"]) or {"only_left": "only in A", "only_right": "only in B"}.get(item["state"], "")
