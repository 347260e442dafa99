"""Terminal form of a comparison: verdict, first divergence, suspects; one screen, at most 100 columns."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from msprobe_megatron.analyse.compare import Comparison, Difference
from msprobe_megatron.report.terminal import console, span

_STYLES = {"agree": "bold green", "diverged": "bold red", "incomparable": "bold yellow"}
_STACK = 4
_LINE = 90


def print_comparison(result: Comparison, out: Console | None = None) -> None:
    """The answer to `msprobe-megatron compare GOLDEN RUN`."""
    out = out if out is not None else console()
    out.print(Text(result.verdict, style=_STYLES[result.verdict]), escape(f"{result.golden} | {result.run}"))
    if result.reason:
        out.print(escape(result.reason))
    if any(result.counts.values()):
        words = {"only_left": "only in golden", "only_right": "only in run", "layout": "not comparable"}
        parts = [f"{n} {words.get(state, state)}" for state, n in result.counts.items() if n or state == "agree"]
        exact = f"; {result.tensors} compared element by element" if result.tensors else ""
        out.print(f"steps {span(result.steps)}: {', '.join(parts)}{exact}")
    if result.verdict == "agree" and result.nearest is not None:
        near = result.nearest
        out.print(
            f"largest error: {near['share']:.0%} of what rounding explains, {escape(near['name'])} {near['kind']}"
        )
    for reason, count in sorted(result.layout.items(), key=lambda item: -item[1])[:5]:
        out.print(escape(f"  not comparable: {count}: {reason}"))
    if result.first_divergence is not None:
        _first(out, result.first_divergence)
    for text in result.hints:
        out.print(Text(f"hint: {text}", style="cyan"))
    if result.suspects:
        out.print(_suspects(result.suspects, out.width))
    if result.replicas:
        names = ", ".join(f"{r['name']} ({r['kind']}, ranks {span(r['ranks'])})" for r in result.replicas[:3])
        more = f" and {len(result.replicas) - 3} more" if len(result.replicas) > 3 else ""
        out.print(Text(f"replicas that differ: {names}{more}", style="yellow"))


def _first(out: Console, first: Difference) -> None:
    layer = "" if first.layer is None else f", layer {first.layer}"
    microbatch = "" if first.microbatch is None else f", microbatch {first.microbatch}"
    op = f" ({first.site['class']})" if first.site else ""
    out.print(f"[bold]first divergence: {escape(_label(first))}[/bold]")
    if first.module != first.name:
        out.print(f"  look at [bold]{escape(first.module)}[/bold]")
    elif op:
        out.print(f" {escape(op)}")
    out.print(f"  step {first.step}{microbatch}, {first.phase}{layer}, ranks {span(first.ranks)}")
    out.print(f"  {escape(first.what)}; error {_figure(first.error)}, rounding explains {_figure(first.tolerance)}")
    for line in stack_lines(first.site["stack"]) if first.site else ():
        out.print(Text(line, style="dim"))


def stack_lines(stack: list[str]) -> list[str]:
    """The innermost frames of a stack, without the kit's own and short enough for a line.

    Example::

        >>> stack_lines(["/x/lib/python3.11/site-packages/megatron/core/mlp.py:7 forward"])
        ['    megatron/core/mlp.py:7 forward']
    """
    theirs = [line for line in stack if "/msprobe_megatron/backends/" not in line and "/patching.py:" not in line]
    short = [line.rpartition("site-packages/")[2] for line in theirs[:_STACK]]
    return [f"    {line}" if len(line) <= _LINE else f"    …{line[-_LINE:]}" for line in short]


def _label(item: Difference) -> str:
    what = {"activation": item.io, "gradient": f"gradient of {item.io}"}.get(item.kind, item.kind)
    path = f" {item.path}" if item.path else ""
    return f"{item.name} {what}{path}"


def _suspects(suspects: list[Difference], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("then", no_wrap=True)
    heads = ("step", "mb", "ranks", "error", "allowed")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    figures = [_figures(item) for item in suspects]
    # What the figures leave; rich would shorten figures too.
    room = width - sum(2 + max(map(len, column)) for column in zip(heads, *figures, strict=True))
    for item, values in zip(suspects, figures, strict=True):
        style = "" if item.state == "diverged" else "dim"
        table.add_row(Text(_tail(_label(item), max(room, 12)), style=style), *values)
    return table


def _figures(item: Difference) -> tuple[str, ...]:
    microbatch = "" if item.microbatch is None else str(item.microbatch)
    return str(item.step), microbatch, _few(span(item.ranks)), _figure(item.error), _figure(item.tolerance)


def _tail(text: str, room: int) -> str:
    """Names of a model differ at their ends. Room is counted in cells: some letters take two."""
    if cell_len(text) <= room:
        return text
    text = text[-room + 1 :]
    while cell_len(text) > room - 1:
        text = text[1:]
    return f"…{text}"


def _few(text: str) -> str:
    return text if len(text) <= 10 else f"{text[:9]}…"


def _figure(value: float) -> str:
    return "inf" if value == float("inf") else f"{value:.1e}"
