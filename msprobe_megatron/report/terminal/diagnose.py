"""Terminal form of a diagnosis: one paragraph a finding, most important first."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from msprobe_megatron.analyse.diagnose import Diagnosis, Finding
from msprobe_megatron.report.terminal import console, span
from msprobe_megatron.report.terminal_compare import stack_lines

_STYLES = {
    "non_finite": "bold red",
    "replicas": "bold red",
    "skipped_step": "yellow",
    "alert": "yellow",
    "suspect": "red",
}


def print_diagnosis(result: Diagnosis, out: Console | None = None) -> None:
    """The answer to `msprobe-megatron diagnose RUN`."""
    out = out if out is not None else console()
    out.print(f"[bold]{escape(result.path)}[/bold]")
    found = f"{result.tensors:,} tensors, shards put together" if result.tensors else "no tensors were recorded"
    out.print(f"steps {span(result.steps)}: {found}" if result.steps else found)
    for finding in result.findings:
        _finding(out, finding)
    if not result.findings:
        words = "all numbers finite, all replicas equal, " if result.tensors else "nothing found, "
        out.print(f"{words}everything asked was recorded", style="green")


def _finding(out: Console, finding: Finding) -> None:
    out.print(Text(f"! {finding.text}", style=_STYLES.get(finding.what, "yellow")))
    site = finding.where.get("site")
    for line in stack_lines(site["stack"]) if site else ():
        out.print(Text(line, style="dim"))
    out.print(escape(f"  {finding.sure}; next: {finding.next}"))
