"""Terminal form of the settings in which two runs differ."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from msprobe_megatron.analysis.settings.env_diff import WORDS, EnvDiff, Setting
from msprobe_megatron.report.terminal.tables import console

_VALUE = 16


def print_env_diff(result: EnvDiff, out: Console | None = None, *, everything: bool = False) -> None:
    """Print the result of `msprobe-megatron env-diff A B`."""
    out = out if out is not None else console()
    out.print(f"[bold]{escape(result.left)} | {escape(result.right)}[/bold]")
    shown = result.settings if everything else result.matters
    if shown:
        out.print(_table(shown))
    else:
        out.print("no setting differs that can change the numerics", style="green")
    hidden = len(result.settings) - len(shown)
    if hidden:
        out.print(f"{hidden} settings without effect on the numerics differ too (--all shows them)")


def _table(settings: list[Setting]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("setting", no_wrap=True)
    for name in ("A", "B", "effect"):
        table.add_column(name, overflow="fold")
    previous = None
    for setting in settings:
        words = WORDS[setting.effect] if setting.effect != previous else '"'
        table.add_row(escape(setting.name), _short(setting.left), _short(setting.right), words)
        previous = setting.effect
    return table


def _short(value: object) -> str:
    text = str(value)
    return escape(text if len(text) <= _VALUE else f"{text[: _VALUE - 1]}…")
