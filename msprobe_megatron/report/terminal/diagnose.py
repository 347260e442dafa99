"""Terminal form of a diagnosis: one paragraph per finding, most important first."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from msprobe_megatron.analysis.diagnose.diagnose import Diagnosis, Finding
from msprobe_megatron.report.terminal.compare import stack_lines
from msprobe_megatron.report.terminal.tables import console, span

_STYLES = {
    "non_finite": "bold red",
    "replicas": "bold red",
    "law": "bold red",
    "skipped_step": "yellow",
    "alert": "yellow",
    "suspect": "red",
}


def print_diagnosis(result: Diagnosis, out: Console | None = None) -> None:
    """Print the result of `msprobe-megatron diagnose RUN`."""
    out = out if out is not None else console()
    out.print(f"[bold]{escape(result.path)}[/bold]")
    found = f"{result.tensors:,} tensors, shards merged" if result.tensors else "no tensors were recorded"
    out.print(f"steps {span(result.steps)}: {found}" if result.steps else found)
    for finding in result.findings:
        _finding(out, finding)
    if not result.findings:
        finite = "loss and gradients finite" if result.notes else "all values finite"
        checked = f"{finite}, all replicas equal, " if result.tensors else "no problem found, "
        out.print(f"{checked}everything requested was recorded", style="green")
    for note in result.notes:
        out.print(Text(f"note: {note.text}", style="dim"))
    _laws(out, result.laws)


def _laws(out: Console, laws: dict[str, str]) -> None:
    """How many laws hold, and which could not be checked; `--json` says what each of those needs."""
    if not laws:
        return
    held = sum(state == "holds" for state in laws.values())
    missing = [name for name, state in laws.items() if state.startswith("not checked")]
    text = f"{held} of {len(laws)} laws hold" + (f"; not checked: {', '.join(missing)}" if missing else "")
    out.print(Text(text, style="dim"))


def _finding(out: Console, finding: Finding) -> None:
    out.print(Text(f"! {finding.text}", style=_STYLES.get(finding.what, "yellow")))
    site = finding.where.get("site")
    for line in stack_lines(site["stack"]) if site else ():
        out.print(Text(line, style="dim"))
    out.print(escape(f"  {finding.sure}; next: {finding.next}"))
