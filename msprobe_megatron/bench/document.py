"""BENCHMARKS.md out of the tables that a directory holds: every target with its figure, met or not.

Example: ``python -m msprobe_megatron.bench.document bench_out > BENCHMARKS.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_megatron.report.bench import machine_text, markdown_table

ORDER = ("dump", "layers", "volume", "perturb", "monitor", "scaling", "compare")
TITLES = {
    "dump": "Dump (seed 000, first table)",
    "layers": "Cost by depth: 24 and 192 layers",
    "volume": "Volume and write speed of tensors (seeds 000 and 001)",
    "perturb": "Perturb (seed 002)",
    "monitor": "Monitor (seed 003)",
    "scaling": "Scaling (seed 004)",
    "compare": "Compare",
}
_HEAD = """# Benchmarks

Each table is the output of the command above it. `bash scripts/bench_peer.sh` installs the published msprobe
(mindstudio-probe 26.2.0, and 8.3.3 for the free benchmark) beside the kit, runs every bench in full and writes this
file; `msprobe-megatron bench WHAT` makes one of the tables on your own machine. Ratios are to no tool at all. Lines
named `plain_torch:` are a decoder in plain torch, the only model that both tools can run; all others are the demo GPT
of megatron-core.
"""


def document(folder: Path) -> str:
    """The whole text.

    Example: ``document(Path("bench_out"))``.
    """
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    reports = {name: report for name, report in reports.items() if name in ORDER and "results" in report}
    parts = [_HEAD, _targets(reports)]
    if reports:
        parts.append(machine_text(next(iter(reports.values()))["machine"]))
    for name in ORDER:
        if name not in reports:
            continue
        report = reports[name]
        command = report.get("command", f"msprobe-megatron bench {name}")
        parts += [f"## {TITLES[name]}", f"`{command}`", markdown_table(report["results"]), report["about"]]
        parts += [f"Load of the machine at its end: {report['machine']['load']:.1f}.", *_why(report)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _targets(reports: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["## Asked and measured", "", "| | measured | asked | |", "|---|---:|---:|---|"]
    for name in ORDER:
        for line in reports.get(name, {}).get("results", []):
            target = line.get("target")
            if target is None:
                continue
            # What is asked of a line is its ratio, or what it has instead of one.
            key = next((key for key in ("ratio", "GB_a_second", "share", "seconds", "error") if line.get(key)), None)
            if key is None:
                continue
            at_least, value = key in ("GB_a_second", "share"), line[key]
            met = value >= target if at_least else value <= target
            sign = "≥" if at_least else "≤"
            lines.append(
                f"| {name} {line['name']} | {value:.4g} | {sign} {target:.4g} | {'met' if met else 'MISSED'} |"
            )
    return "\n".join(lines)


def _why(report: Mapping[str, Any]) -> list[str]:
    """The profiles of the lines that missed their target."""
    return [f"Why missed, by profile: {text}" for text in report.get("profiles", [])]


if __name__ == "__main__":
    print(document(Path(sys.argv[1])), end="")
