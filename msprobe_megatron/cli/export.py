"""`msprobe-megatron export`: a run for other tools."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_megatron.cli.commands import OK

if TYPE_CHECKING:
    from msprobe_megatron.analysis.load.run import Run

HELP = (
    "write a run for other tools: CSV, TensorBoard, a Perfetto trace, msprobe's dump files, its trend and graph viewers"
)
EXAMPLE = "msprobe-megatron export probe_out --format csv --out tensors.csv"
FORMATS = {
    "csv": "tensors.csv",
    "free_benchmark": "free_benchmark",
    "monitor-csv": "monitor_output",
    "msprobe": "msprobe_dump",
    "tensorboard": "tensorboard",
    "trace": "trace.json",
    "trend-db": "msprobe.trend.db",
    "vis-db": "msprobe.vis.db",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("path", metavar="RUN", help="run directory")
    parser.add_argument("--format", choices=sorted(FORMATS), required=True, help="what to write")
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="file to write; for tensorboard, msprobe and free_benchmark a directory (default: by format)",
    )
    parser.add_argument("--by-rank", action="store_true", help="csv: one row per rank, shards not merged")
    parser.add_argument("--step", type=int, default=None, help="only this step")


def run(arguments: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from msprobe_megatron.analysis.page.table import open_view

    out = Path(arguments.out or FORMATS[arguments.format])
    if arguments.format == "msprobe":
        return _msprobe(arguments, out)
    if arguments.format == "free_benchmark":
        return _free_benchmark(arguments, out)
    if arguments.format == "monitor-csv":
        return _monitor_csv(arguments, out)
    if arguments.format == "trace":
        return _trace(arguments, out)
    view = open_view(_opened(arguments))
    if arguments.format == "csv":
        from msprobe_megatron.analysis.exports.rows import RANK_COLUMNS, WHOLE_COLUMNS, rank_rows, whole_rows
        from msprobe_megatron.report.files.csv_table import csv_chunks
        from msprobe_megatron.report.files.files import write_chunks

        columns, rows = (RANK_COLUMNS, rank_rows(view)) if arguments.by_rank else (WHOLE_COLUMNS, whole_rows(view))
        size = write_chunks(out, csv_chunks(columns, rows))
    elif arguments.format == "tensorboard":
        from msprobe_megatron.analysis.exports.rows import scalars, started
        from msprobe_megatron.report.files.files import write_chunks
        from msprobe_megatron.run_directory.encoders.tensorboard_events import event_chunks

        seconds = started(view)
        out = out / f"events.out.tfevents.{int(seconds)}.msprobe"
        size = write_chunks(out, event_chunks(scalars(view), seconds), make_folder=True)
    elif arguments.format == "trend-db":
        from msprobe_megatron.analysis.exports.trend import trend_rows
        from msprobe_megatron.report.files.databases import write_trend

        write_trend(out, trend_rows(view))
        size = out.stat().st_size
    else:
        from msprobe_megatron.analysis.exports.graph import graph_of
        from msprobe_megatron.report.files.databases import write_graph

        write_graph(out, graph_of(view))
        size = out.stat().st_size
    print(json.dumps({"file": str(out), "bytes": size}) if arguments.json else f"{out} ({size / 1e6:.1f} MB)")
    return OK


def _opened(arguments: argparse.Namespace) -> Run:
    from msprobe_megatron.analysis.load.run import RunError, open_run

    run = open_run(arguments.path)
    if arguments.step is None:
        return run
    if arguments.step not in run.steps:
        raise RunError(f"{run.path}: no rows of step {arguments.step}; recorded steps: {run.steps or 'none'}")
    run.files = [entry for entry in run.files if entry[0] == arguments.step]
    return run


def _free_benchmark(arguments: argparse.Namespace, out: Path) -> int:
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.files.csv_table import csv_chunks
    from msprobe_megatron.report.files.files import write_chunks
    from msprobe_megatron.report.msprobe.free_benchmark import COLUMNS, free_benchmark

    found, files = 0, []
    for path, rows in free_benchmark(open_run(arguments.path), arguments.step):
        write_chunks(out / path, csv_chunks(COLUMNS, rows), make_folder=True)
        found += len(rows)
        files.append(str(out / path))
    if arguments.json:
        print(json.dumps({"folder": str(out), "files": files, "rows": found}))
    else:
        print(f"{out}: {found} findings in {len(files)} files" if files else "no findings; no file written")
    return OK


def _trace(arguments: argparse.Namespace, out: Path) -> int:
    from msprobe_megatron.analysis.exports.trace import trace_events
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.files.files import write_whole

    events = list(trace_events(open_run(arguments.path)))
    size = write_whole(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
    if arguments.json:
        print(json.dumps({"file": str(out), "bytes": size, "events": len(events)}))
    else:
        print(f"{out} ({size / 1e6:.1f} MB, {len(events)} events); open it with https://ui.perfetto.dev")
    return OK


def _monitor_csv(arguments: argparse.Namespace, out: Path) -> int:
    from msprobe_megatron.analysis.load.run import open_run
    from msprobe_megatron.report.files.csv_table import csv_chunks
    from msprobe_megatron.report.files.files import write_chunks
    from msprobe_megatron.report.msprobe.monitor_csv import monitor_csv

    files, rows = [], 0
    for file in monitor_csv(open_run(arguments.path)):
        chosen = [row for row in file.rows if arguments.step in (None, row[2])]
        write_chunks(out / file.path, csv_chunks(file.columns, chosen), make_folder=True)
        files.append(str(out / file.path))
        rows += len(chosen)
    if arguments.json:
        print(json.dumps({"folder": str(out), "files": files, "rows": rows}))
    else:
        print(f"{out}: {rows} rows in {len(files)} files of msprobe's monitor")
    return OK


def _msprobe(arguments: argparse.Namespace, out: Path) -> int:
    from msprobe_megatron.report.msprobe.export import export_msprobe

    folders = export_msprobe(_opened(arguments), out)
    if arguments.json:
        print(json.dumps({"folder": str(out), "dumps": folders}))
    else:
        print(f"{out}: {len(folders)} dumps ({', '.join(folders[:3])}{' …' if len(folders) > 3 else ''})")
        print(f"  msprobe compare -tp {out}/{folders[0]}/dump.json -gp OTHER/{folders[0]}/dump.json -o result")
    return OK
