"""Terminal form of a page's verdict: headline, findings, next command; at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from msprobe_megatron.report.terminal.tables import console

_STYLES = {"good": "bold green", "bad": "bold red", "note": "bold yellow"}


def print_verdict(verdict: Mapping[str, Any], out: Console | None = None) -> None:
    """Print the verdict of `msprobe-megatron report RUN`."""
    out = out if out is not None else console()
    out.print(Text(verdict["headline"], style=_STYLES[verdict["tone"]]))
    for finding in verdict["findings"]:
        _indented(out, Text.assemble((f"{finding['title']}: ", _STYLES[finding["tone"]]), finding["text"]), 2)
        for label, value in finding["facts"]:
            _indented(out, Text.assemble((f"{label}: ", "dim"), value), 4)
        if finding["command"]:
            # Not wrapped: it is there to be copied.
            out.print(Text.assemble(("    next: ", "dim"), finding["command"]), soft_wrap=True)
        if finding["then"]:
            _indented(out, Text.assemble(("then: ", "dim"), finding["then"]), 4)


def _indented(out: Console, text: Text, left: int) -> None:
    for line in [text] if out.soft_wrap else text.wrap(out, out.width - left):
        line.rstrip()
        out.print(Text(" " * left) + line)
