"""How far figures of clean jobs are from what is usual, and how far those of broken ones: the defaults of `spike`.

`python -m tests.unit.job.features.alerts.evaluate FOLDER` trains all jobs below (some minutes; those that are in the
folder already are taken from there) and prints the two tables of docs/monitor.md. test_defaults.py holds what was
chosen.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.dataset as ds
import torch

from msprobe_megatron.config import Alert
from msprobe_megatron.job.features.alerts.feature import AlertRules
from msprobe_megatron.job.features.alerts.rules import ENOUGH
from msprobe_megatron.job.features.alerts.series import Steps
from msprobe_megatron.job.record.monitor_files import StepRows
from msprobe_megatron.run_directory.schema import COUNT_COLUMNS, FLOAT_COLUMNS, Row
from tests.jobs.compare.faults import named, weight
from tests.jobs.compare.layouts import MORE
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked
from tests.unit.job.features.alerts.steps import row
from tests.unit.job.features.checks.jobs import BEFORE, Now

STEPS, AT, WINDOW = 48, 40, 32
PROBE = "monitor: {update: true, clipped: true, microbatch_gradients: true}\n"
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_BALANCED = "--lr 3e-4 --moe-aux-loss-coeff 0.1"
# Name: layout, more flags. The rate of those that warm up rises from nothing over the first 24 steps.
CLEAN = {
    "single": ("single", "--lr 3e-4 --seed 1"),
    "fast": ("single", "--lr 3e-3 --seed 2"),
    "no_dropout": ("single", f"--lr 1e-3 --seed 3 {_NO_DROPOUT}"),
    "warm_up": ("single", "--lr 3e-3 --seed 4"),
    "bf16": ("bf16", "--lr 1e-3 --seed 5"),
    "tp2_sp": ("tp2_sp", "--lr 1e-3 --seed 6"),
    "pp2_vpp2": ("pp2_vpp2", "--lr 3e-4 --seed 7"),
    "dp2_distopt": ("dp2_distopt", "--lr 1e-3 --seed 8"),
    "cp2": ("cp2", "--lr 1e-3 --seed 9"),
    "moe": ("moe", f"{_BALANCED} --seed 10"),
    "moe_fast": ("moe", "--lr 1e-3 --moe-aux-loss-coeff 0.1 --seed 11"),
    "ep2": ("ep2", f"{_BALANCED} --seed 12"),
}
FAULTS = {
    "bad_batch": ("dp2", "--lr 3e-3"),
    "bucket_skipped": ("dp2", "--lr 1e-3"),
    "weight_bit": ("single", "--lr 1e-3"),
    "layer_x5": ("single", "--lr 1e-3"),
    "layer_x100": ("single", "--lr 1e-3"),
    "all_x5": ("single", "--lr 1e-3"),
    "rate_x10": ("single", "--lr 1e-3"),
}
_ROW = ("kind", "name", "io", "path", "phase", "vpp", "dtype", "microbatch")
_ROUTED = re.compile(r"(?:^|\.)(?:router|(?:local_)?experts)(?:\.|$)")


class Figure(NamedTuple):
    """One figure of one step: its group, by which factor (as a logarithm) and by how many deviations it is off."""

    group: str
    name: str
    step: int
    off: float
    deviations: float


_NOTHING = Figure("", "", 0, 0.0, 0.0)


def train(argv: list[str], job: str) -> list[float]:
    """Train in this rank, with the fault that the job is called after, if it is one."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    Now.step = 0
    if job in BEFORE:
        BEFORE[job](AT)
    built: list[Any] = []

    def set_rates(step: int) -> None:
        for group in built[1].param_groups:
            full = group.setdefault("full_lr", group["lr"])
            if job == "warm_up":
                group["lr"] = full * min(1.0, (step + 1) / 24)
            if job == "rate_x10" and step == AT:
                group["lr"] = full * 10

    def ready(chunks: Any, optimizer: Any) -> None:
        built.extend((chunks, optimizer))
        set_rates(0)

    def gradients(iteration: int) -> None:
        factor = {"layer_x5": 5.0, "all_x5": 5.0, "layer_x100": 100.0}.get(job)
        if factor is None or iteration - 1 != AT:
            return
        some = built[0] if job == "all_x5" else [named(built[0], "decoder.layers.2")]
        for module in some:
            for value in module.parameters():
                value.main_grad.mul_(factor)

    def after(step: Any) -> None:
        Now.step = step.iteration
        set_rates(step.iteration)
        if job == "weight_bit" and step.iteration == AT:
            # The highest bit of the exponent of one weight: 0.01 becomes 3e36.
            weight(built[0], "decoder.layers.1.mlp.linear_fc1.weight").data.view(-1).view(torch.int32)[3] ^= 1 << 30

    return run(argv, Callbacks(ready=ready, gradients=gradients, step=after)).losses


def run_of(root: Path, job: str, layout: str, more: str, probe: str = PROBE) -> Path:
    """The run directory of a job, trained if it is not there."""
    out = root / job
    if not out.exists():
        config = root / "probe.yaml"
        config.write_text(probe)
        known = {**LAYOUTS, **MORE}[layout]
        flags = flags_of("single", dropout=True) + known.flags.split() + more.split()
        flags += ["--train-iters", str(STEPS), "--msprobe-config", str(config), "--msprobe-output", str(out)]
        run_forked(known.world, train, [*flags, "--no-check-for-nan-in-loss-and-grad"], job, timeout=1200)
    return out


def figures(run: Path) -> Iterator[Figure]:
    """Every figure that is judged, against the steps before it."""
    columns = ["step", "rank", "kind", "name", "io", "path", "phase", "vpp", "dtype"]
    columns += ["sumsq", "numel", "n_nan", "n_posinf", "n_neginf"]
    rows = ds.dataset(run / "monitor", format="parquet").to_table(columns=columns).to_pylist()
    by_rank: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in rows:
        if _group(line):
            by_rank[line["rank"]][line["step"]].append(line)
    for steps in by_rank.values():
        history, numbers = Steps(WINDOW), {}
        for step in sorted(steps):
            key = ("kind", "name", "io", "path", "phase", "vpp")
            now = steps[step]
            series = np.array([numbers.setdefault(tuple(line[k] for k in key), len(numbers)) for line in now])
            with np.errstate(divide="ignore"):
                logs = np.array([_log(line) for line in now])
            usual = history.usual(series)
            off = logs - usual.median
            for i in np.flatnonzero((usual.steps >= ENOUGH) & np.isfinite(off)):
                wide = usual.deviation[i] * (1 + 2 * ENOUGH / usual.steps[i])
                deviations = abs(off[i]) / wide if wide else np.inf
                yield Figure(_group(now[i]), now[i]["name"], step, float(off[i]), float(deviations))
            history.add(series, logs)


def _log(row: dict[str, Any]) -> float:
    if row["n_nan"] or row["n_posinf"] or row["n_neginf"] or not row["numel"]:
        return np.nan
    return float(np.log(row["sumsq"] / row["numel"]) / 2)


def _group(row: dict[str, Any]) -> str:
    """What has one bound; nothing for rows that are not judged."""
    kind = row["kind"]
    if kind not in ("loss", "activation", "gradient", "grad_unreduced", "grad_reduced", "grad_clipped", "update"):
        return ""
    if "float" not in (row["dtype"] or "") or row["name"] in ("loss_scale", "lr", "learning_rate", "skipped"):
        return ""
    if kind == "loss":
        return "grad norm" if row["name"] == "grad_norm" else "loss"
    if kind == "update" and row["io"] != "change":
        return ""
    if kind != "activation" and _ROUTED.search(row["name"]):
        return f"{kind}, routed"
    return f"{kind}, microbatch" if kind == "gradient" or row["path"] == "microbatch" else kind


def told(run: Path, *rules: str) -> list[dict[str, Any]]:
    """What rules with their defaults say of a run: its rows once more, as they came."""
    columns = ["step", "rank", "seq", *_ROW, "numel", "shape", *FLOAT_COLUMNS, *COUNT_COLUMNS]
    table = ds.dataset(run / "monitor", format="parquet").to_table(columns=columns)
    events: list[dict[str, Any]] = []
    for rank in sorted(set(table["rank"].to_pylist())):
        rows = sorted(table.filter(ds.field("rank") == rank).to_pylist(), key=lambda row: (row["step"], row["seq"]))
        alerts = AlertRules([Alert(rule) for rule in rules], lambda alert, event: events.append(event), print)
        for step, of_step in itertools.groupby(rows, key=lambda row: row["step"]):
            now = list(of_step)
            what = [row_of(slot, row) for slot, row in enumerate(now)]
            floats = [[np.nan if row[c] is None else row[c] for c in FLOAT_COLUMNS] for row in now]
            counts = [[-1 if row[c] is None else row[c] for c in COUNT_COLUMNS] for row in now]
            alerts.saw(StepRows(step, what, np.array(floats, np.float64), np.array(counts, np.int64)))
    return events


def row_of(slot: int, found: dict[str, Any]) -> Row:
    """A row as the monitor handed it to its watchers."""
    return row(slot=slot, numel=found["numel"] or 0, **{key: found[key] for key in ("seq", *_ROW)})


def clean_table(found: dict[str, list[Figure]]) -> str:
    """How far clean figures are off, by group: deviations, and the largest factors up and down among those that far."""
    lines = ["| clean figures | judged | largest deviation | factor up / down at most | of those beyond 4 | 8 | 10 |"]
    lines.append("|---|---|---|---|---|---|---|")
    for group in sorted(found):
        off = np.array([figure.off for figure in found[group]])
        deviations = np.nan_to_num(np.array([figure.deviations for figure in found[group]]), posinf=0)
        parts = [_factors(off[deviations > least]) for least in (-1, 4, 8, 10)]
        lines.append(f"| {group} | {len(off):,} | {deviations.max():.1f} | {' | '.join(parts)} |")
    return "\n".join(lines)


def _factors(off: Any) -> str:
    return f"{np.exp(off.max(initial=0)):.3g} / {np.exp((-off).max(initial=0)):.3g}" if len(off) else ""


def fault_line(job: str, found: list[Figure], events: list[dict[str, Any]]) -> str:
    """What is furthest off in the first broken step, and what was told of it and of the steps before."""
    first = [figure for figure in found if figure.step == AT]
    most = {}
    for figure in first:
        if np.isfinite(figure.deviations) and figure.deviations > most.get(figure.group, _NOTHING).deviations:
            most[figure.group] = figure
    furthest = sorted(most.values(), key=lambda figure: -figure.deviations)[:3]
    words = ", ".join(f"{f.group} ×{np.exp(f.off):.3g} ({f.deviations:.0f})" for f in furthest)
    now = [event for event in events if event["step"] == AT]
    rules = ", ".join(dict.fromkeys(f"{event['rule']}: {event['name']} ({event['kind']})" for event in now))
    return f"| {job} | {words} | {rules or 'nothing'} | {sum(event['step'] < AT for event in events)} |"


def main(root: Path) -> None:
    """Train, measure, print."""
    root.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[Figure]] = defaultdict(list)
    false: dict[str, int] = {}
    for job, (layout, more) in CLEAN.items():
        run = run_of(root, job, layout, more)
        for figure in figures(run):
            groups[figure.group].append(figure)
        false[job] = len(told(run, "spike", "vanish"))
        print(f"{job}: {false[job]} alerts", file=sys.stderr, flush=True)
    print(clean_table(groups))
    print(f"\nalerts of {len(CLEAN)} clean jobs: {sum(false.values())}\n")
    print("| fault, first step | furthest off: factor (deviations) | told | told before |\n|---|---|---|---|")
    for job, (layout, more) in FAULTS.items():
        run = run_of(root, job, layout, more)
        print(fault_line(job, list(figures(run)), told(run, "nonfinite", "spike", "vanish")), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "evaluated"))
