"""Terminal form of a comparison: verdict, first divergence, suspects; one screen, at most 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from msprobe_megatron.analysis.compare.compare import Comparison, Difference
from msprobe_megatron.report.terminal.tables import console, span

_STYLES = {"agree": "bold green", "diverged": "bold red", "incomparable": "bold yellow"}
_STACK = 4
_LINE = 90


def print_comparison(result: Comparison, out: Console | None = None) -> None:
    """Print the result of `msprobe-megatron compare GOLDEN RUN`."""
    out = out if out is not None else console()
    out.print(Text(result.verdict, style=_STYLES[result.verdict]), escape(f"{result.golden} | {result.run}"))
    if result.reason:
        out.print(escape(result.reason))
    _counts(out, result)
    if result.first_divergence is not None:
        _first(out, result.first_divergence)
    for cause in result.causes:
        out.print(Text(f"cause: {cause['text']} [{cause['id']}]", style="bold"))
    for text in result.hints:
        out.print(Text(f"hint: {text}", style="cyan"))
    if result.suspects:
        out.print(_suspects(result.suspects, out.width))
    if result.replicas:
        names = ", ".join(f"{r['name']} ({r['kind']}, ranks {span(r['ranks'])})" for r in result.replicas[:3])
        more = f" and {len(result.replicas) - 3} more" if len(result.replicas) > 3 else ""
        out.print(Text(f"replicas that differ: {names}{more}", style="yellow"))


def print_comparisons(results: Sequence[Comparison], out: Console | None = None) -> None:
    """Print several runs beside one golden run: a line each, with the first divergence."""
    out = out if out is not None else console()
    out.print(escape(f"golden run: {results[0].golden}"))
    table = Table(box=None, padding=(0, 1))
    for name in ("run", "verdict", "agree", "diverged", "first divergence"):
        right = name in ("agree", "diverged")
        table.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for result in results:
        first = result.first_divergence
        where = result.reason if first is None else f"step {first.step}: {_label(first)}"
        verdict = Text(result.verdict, style=_STYLES[result.verdict])
        counts = [str(result.counts.get(state, 0)) for state in ("agree", "diverged")]
        table.add_row(escape(result.run), verdict, *counts, escape(where))
    out.print(table)
    apart = next((result for result in results if result.verdict == "diverged"), None)
    if apart is not None:
        out.print(escape(f"next: msprobe-megatron compare {apart.golden} {apart.run}"))


def _counts(out: Console, result: Comparison) -> None:
    """Tensors by state, the largest error if all agree, and why some could not be compared."""
    if any(result.counts.values()):
        names = {"only_left": "only in golden", "only_right": "only in run", "layout": "not comparable"}
        parts = [f"{n} {names.get(state, state)}" for state, n in result.counts.items() if n or state == "agree"]
        exact = f"; {result.tensors} compared element by element" if result.tensors else ""
        out.print(f"steps {span(result.steps)}: {', '.join(parts)}{exact}")
    if result.verdict == "agree" and result.nearest is not None:
        near = result.nearest
        out.print(
            f"largest error: {near['share']:.0%} of the rounding tolerance, {escape(near['name'])} {near['kind']}"
        )
    if result.verdict == "agree" and result.bits is not None:
        same, other = result.bits["equal"], result.bits["differ"]
        out.print(f"bits: {same} equal, {other} differ" if other else f"bits: equal in all {same} comparable tensors")
    for reason, count in sorted(result.layout.items(), key=lambda item: -item[1])[:5]:
        out.print(escape(f"  not comparable: {count}: {reason}"))


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
    errors = f"relative error {_error(first.error)}, expected from rounding {_error(first.tolerance)}"
    out.print(f"  {escape(first.what)}; {errors}")
    for line in stack_lines(first.site["stack"]) if first.site else ():
        out.print(Text(line, style="dim"))


def stack_lines(stack: list[str]) -> list[str]:
    """The innermost frames of a stack, without those of the kit, short enough for a line.

    Example::

        >>> stack_lines(["/x/lib/python3.11/site-packages/megatron/core/mlp.py:7 forward"])
        ['    megatron/core/mlp.py:7 forward']
    """
    theirs = [line for line in stack if "/msprobe_megatron/job/" not in line]
    short = [line.rpartition("site-packages/")[2] for line in theirs[:_STACK]]
    return [f"    {line}" if len(line) <= _LINE else f"    …{line[-_LINE:]}" for line in short]


def _label(item: Difference) -> str:
    what = {"activation": item.io, "gradient": f"gradient of {item.io}"}.get(item.kind, item.kind)
    path = f" {item.path}" if item.path else ""
    return f"{item.name} {what}{path}"


def _suspects(suspects: list[Difference], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("further differences", no_wrap=True)
    heads = ("step", "mb", "ranks", "error", "expected")
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    cells = [_cells(item) for item in suspects]
    # Only the names are shortened to fit; rich would shorten numbers too.
    room = width - sum(2 + max(map(len, column)) for column in zip(heads, *cells, strict=True))
    for item, values in zip(suspects, cells, strict=True):
        style = "" if item.state == "diverged" else "dim"
        table.add_row(Text(_tail(_label(item), max(room, 12)), style=style), *values)
    return table


def _cells(item: Difference) -> tuple[str, ...]:
    microbatch = "" if item.microbatch is None else str(item.microbatch)
    return str(item.step), microbatch, _few(span(item.ranks)), _error(item.error), _error(item.tolerance)


def _tail(text: str, room: int) -> str:
    """The end of a name, where names differ. Room is counted in terminal cells: some letters take two."""
    if cell_len(text) <= room:
        return text
    text = text[-room + 1 :]
    while cell_len(text) > room - 1:
        text = text[1:]
    return f"…{text}"


def _few(text: str) -> str:
    return text if len(text) <= 10 else f"{text[:9]}…"


def _error(value: float) -> str:
    return "inf" if value == float("inf") else f"{value:.1e}"
