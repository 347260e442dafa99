"""Terminal form of a comparison of log-probs: the verdict, estimates, a histogram, the worst tokens."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from msprobe_megatron.analysis.align.logprobs import LogProbs
from msprobe_megatron.report.terminal.tables import console

_BAR = 40


def print_logprobs(result: LogProbs, out: Console | None = None) -> None:
    """Print the result of `msprobe-megatron logprobs A B`."""
    out = out if out is not None else console()
    verdict = Text("agree", style="bold green") if result.agree else Text("differ", style="bold red")
    out.print(verdict, escape(f"{result.left} | {result.right}"))
    rest = f"; {result.only_left} samples only in A, {result.only_right} only in B"
    out.print(
        f"{result.samples} samples, {result.tokens} tokens{rest if result.only_left or result.only_right else ''}"
    )
    for cause in result.causes:
        out.print(Text(f"cause: {cause['text']} [{cause['id']}]", style="bold"))
        if cause["next"]:
            out.print(Text(f"  next: {cause['next']}", style="cyan"))
    if not result.tokens:
        return
    out.print(
        f"difference of log-probs: median {result.median:.2g}, mean {result.mean:.2g}, 99 % {result.p99:.2g},"
        f" largest {result.largest:.2g}; {100 * result.beyond:.2g} % beyond {result.expected:.2g}"
    )
    out.print(f"KL estimates: k1 {result.k1:.2g}, k3 {result.k3:.2g}")
    if result.routing:
        parts = [
            f"{name.replace('_', ' ')}: {v['tokens']} tokens, mean {v['mean']:.2g}"
            for name, v in result.routing.items()
        ]
        out.print("; ".join(parts))
    most = max((entry["tokens"] for entry in result.histogram), default=0) or 1
    for entry in result.histogram:
        out.print(f"  from {entry['from']:<7g} {entry['tokens']:>7} {'#' * round(_BAR * entry['tokens'] / most)}")
    out.print(_worst(result))


def _worst(result: LogProbs) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worst tokens", "position", "token", "A", "B", "difference"):
        table.add_column(name, justify="left" if name == "worst tokens" else "right", no_wrap=True)
    for item in result.worst:
        values = (f"{item[key]:.4f}" for key in ("left", "right", "difference"))
        table.add_row(escape(item["where"]), str(item["position"]), str(item["token"]), *values)
    return table
