"""BENCHMARKS.md out of the tables that a directory holds: every target with its figure, met or not."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_megatron.lab.bench.profiles.targets import Verdict, verdicts
from msprobe_megatron.report.terminal.bench import machine_text, titled_tables
from msprobe_megatron.report.terminal.tables import size_text

ORDER = ("dump", "layers", "volume", "perturb", "perturb_all", "monitor", "counts", "device", "scaling", "compare")
TITLES = {
    "dump": "Dump (seed 000, first table)",
    "layers": "Cost by depth: 24 and 192 layers",
    "volume": "Volume and write speed of tensors (seeds 000 and 001)",
    "perturb": "Perturb (seed 002, LLaMA2's table)",
    "perturb_all": "Perturb on the seed's seven language models, small, a ResNet and a DiT (seed 002)",
    "monitor": "Monitor (seed 003)",
    "counts": "What can be counted",
    "device": "On a device",
    "scaling": "Scaling (seed 004)",
    "compare": "Compare",
}
_HEAD = """# Benchmarks

`bash scripts/bench_peer.sh` installs the published msprobe (mindstudio-probe 26.2.0, and 8.3.3 for the free benchmark)
beside the kit, runs every bench and writes this file; each table stands under the commands that made it, and
`msprobe-megatron bench WHAT` makes one of them on your own machine. Ratios are to no tool at all: CPU time of a
step over that of the steps without the kit beside it, in the same processes, taking turns, medians; `±` is the standard
error of a ratio, `least` the ratio of the least times, `spread` the distance between the quartiles of the times
themselves over their median. Lines named `plain_torch:` are a decoder in plain torch,
the only model that both tools can run; all others are the demo GPT of megatron-core.
"""
_SIZES = ("extra_bytes", "peak_bytes")
# What tells lines of one bench apart that belong into different tables.
_KINDS = ("training_ratio", "error", "share", "bytes_of_8_ranks", "seconds", "GB_a_second")


def document(folder: Path) -> str:
    """The whole text, out of all reports that the folder holds."""
    sections = _sections(folder)
    parts = [_HEAD, _targets(sections)]
    if sections:
        parts.append(machine_text(next(iter(sections.values()))[0]["machine"]))
    for name, reports in sections.items():
        lines = [line for report in reports for line in report["results"]]
        commands = ", ".join(f"`{report.get('command', f'msprobe-megatron bench {name}')}`" for report in reports)
        tables = [titled_tables(alike) for alike in _alike(lines)]
        parts += [f"## {TITLES[name]}", commands + _peers(reports), *tables, reports[0]["about"]]
        parts.append(f"Load of the machine at its end: {max(report['machine']['load'] for report in reports):.1f}.")
        parts += [f"Why missed, by profile: {text}" for report in reports for text in report.get("profiles", [])]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _sections(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Reports by section, in the order of the document; parts of one bench (`--only`) stand together."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
    # A part that was measured later, such as h1024 after h64, stands later.
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        report = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(report, dict) or "results" not in report:
            continue
        longest_first = sorted(ORDER, key=len, reverse=True)
        name = next((name for name in longest_first if f"{path.stem}_".startswith(f"{name}_")), None)
        if name is not None:
            found[name].append(report)
    return {name: reports for name, reports in found.items() if reports}


def _alike(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Lines that have the same kind of figures, so that no table is full of holes."""
    groups: dict[frozenset[str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(frozenset(key for key in _KINDS if line.get(key) is not None), []).append(line)
    return list(groups.values())


def _peers(reports: list[dict[str, Any]]) -> str:
    versions = sorted({report["peer"] for report in reports if report.get("peer")})
    return f"; PYTHON has mindstudio-probe {' and '.join(versions)}" if versions else ""


def _targets(sections: Mapping[str, list[dict[str, Any]]]) -> str:
    every = [
        (name, verdict)
        for name, reports in sections.items()
        for report in reports
        for verdict in verdicts(report["results"])
    ]
    met = sum(verdict.met for _, verdict in every)
    lines = ["## Asked and measured", "", f"{met} of {len(every)} are met.", ""]
    lines += ["| | measured | asked | |", "|---|---:|---:|---|"]
    for name, verdict in every:
        value, asked = (_figure(verdict, number) for number in (verdict.value, verdict.asked))
        state = "met" if verdict.met else "MISSED"
        known = f" ± {verdict.uncertainty:.2g}" if verdict.uncertainty else ""
        lines.append(f"| {name} {verdict.label} | {value}{known} | {verdict.sign} {asked} | {state} |")
    return "\n".join(lines)


def _figure(verdict: Verdict, number: float) -> str:
    return size_text(number) if verdict.figure in _SIZES else f"{number:.4g}"


if __name__ == "__main__":
    print(document(Path(sys.argv[1])), end="")
