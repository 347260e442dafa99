"""A timeline for Perfetto and chrome://tracing: the steps of every rank, what they carried, and the alerts.

Made of what the monitor records: seconds of each step and between steps, memory, samples, losses, collectives and their
sizes. It records no clock time of microbatches and collectives, so that these are numbers of a step, not slices. Clocks
of ranks are not compared: each begins at 0 with its first watched step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import duckdb

from msprobe_megatron.analysis.load.loss_units import log_losses
from msprobe_megatron.analysis.load.run import Run, RunError
from msprobe_megatron.run_directory.directory import read_events

_MICRO = 1e6
_STEPS, _JOB = 1, 1 << 20
"""Thread of the steps; process of what belongs to the whole job."""
_BYTES = ("host_bytes", "device_bytes")


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
    """The events of the trace, in the format of Chrome; raises RunError if no times were recorded."""
    if not run.monitor:
        raise RunError(f"{run.path}: no times were recorded; accepted: a run with a monitor section")
    connection = duckdb.connect()
    connection.register("watched", run.monitor_rows(connection))
    found = connection.execute(
        """select rank, step, name, max(sum) from watched where kind = 'throughput'
        group by rank, step, name order by rank, step"""
    ).fetchall()
    numbers: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for rank, step, name, value in found:
        numbers[int(rank)][int(step)][str(name)] = float(value)
    comm = _collectives(connection)
    ends: dict[tuple[int, int], float] = {}
    for rank, steps in numbers.items():
        yield from _names(run, rank)
        for step, start, end in _times(steps):
            ends[rank, step] = end
            told = {**steps[step], **comm.get((rank, step), {})}
            here = {"pid": rank, "tid": _STEPS}
            yield {
                "ph": "X",
                "name": f"step {step}",
                "ts": start,
                "dur": end - start,
                "args": told,
                "cat": "step",
                **here,
            }
            for name in _BYTES:
                if name in steps[step]:
                    yield {"ph": "C", "name": name, "ts": end, "args": {"bytes": steps[step][name]}, **here}
    first = min(numbers, default=0)
    yield {"ph": "M", "name": "process_name", "pid": _JOB, "args": {"name": "whole job"}}
    for name, points in log_losses(connection, "watched").items():
        for step, value in points:
            if math.isfinite(value) and (first, step) in ends:
                yield {"ph": "C", "name": name, "ts": ends[first, step], "args": {"loss": value}, "pid": _JOB, "tid": 0}
    for event in read_events(run.path):
        rank, step = event.get("rank"), event.get("step")
        if isinstance(rank, int) and isinstance(step, int) and (rank, step) in ends:
            text = str(event.get("text", event.get("event")))
            place: dict[str, Any] = {"pid": rank, "tid": _STEPS, "ts": ends[rank, step]}
            yield {
                "ph": "i",
                "s": "p",
                "name": str(event.get("event")),
                "cat": "event",
                "args": {"text": text},
                **place,
            }


def _times(steps: dict[int, dict[str, float]]) -> Iterator[tuple[int, float, float]]:
    """Step, begin and end in microseconds; `interval_seconds` is the average since the step watched before."""
    end, before = 0.0, None
    for step, values in sorted(steps.items()):
        seconds = values.get("seconds", 0.0)
        passed = values.get("interval_seconds", seconds) * (1 if before is None else step - before)
        end += max(passed, seconds) if before is not None else seconds
        before = step
        yield step, (end - seconds) * _MICRO, end * _MICRO


def _collectives(connection: duckdb.DuckDBPyConnection) -> dict[tuple[int, int], dict[str, Any]]:
    """How many collectives of each name a rank called in a step, and the elements that went into them."""
    rows = connection.execute(
        """select rank, step, name, count(*), sum(numel) from watched where kind = 'comm' and io = 'input'
        group by rank, step, name order by rank, step, name"""
    ).fetchall()
    found: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    for rank, step, name, calls, numel in rows:
        found[int(rank), int(step)][f"comm {name}"] = {"calls": int(calls), "elements": int(numel)}
    return found


def _names(run: Run, rank: int) -> Iterator[dict[str, Any]]:
    place = run.ranks.get(rank, {}).get("coordinates", {})
    axes = " ".join(f"{axis}{place[axis]}" for axis in run.sizes if run.sizes[axis] > 1 and axis in place)
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} {axes}".strip()}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": _STEPS, "args": {"name": "steps"}}
