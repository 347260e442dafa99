"""Alerts: rules judge the monitor's statistics one step late, in the writer thread; this module reports what they find.

`AlertRules` is a watcher of the monitor: it lets every rule judge a step, applies the cool-downs and reports the first
finding of each rule. `AlertsFeature` turns findings, those of the checks across ranks included, into an event, a line
on standard error, and the actions of the probe file. Nothing here blocks, and nothing here can fail a job.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from msprobe_megatron.config import Alert, AlertAction
from msprobe_megatron.config.name_patterns import name_matcher
from msprobe_megatron.job.features.alerts.rules import Hit, Rule, Step, make_rule
from msprobe_megatron.job.features.alerts.series import Columns, Flags, Numbers, SeriesNumbers, Steps
from msprobe_megatron.job.features.feature import Feature, JobContext
from msprobe_megatron.job.messages import warn
from msprobe_megatron.job.record.monitor_files import PerRows, StepRows
from msprobe_megatron.run_directory.safe_files import json_text
from msprobe_megatron.run_directory.schema import Row

MOST_COMMANDS = 4
"""Commands of alerts that may run at once; further ones are skipped, with a message."""
Keep = Callable[[str, int], None]
"""`keep(reason, step)`: has the flight recorder write what led to a step."""
Report = Callable[[Alert, dict[str, Any]], None]
"""`report(alert, event)`: writes the event, prints the line, runs the actions."""
# Inputs that are the same for every sample.
_NOT_SAMPLES = ("position_ids", "attention_mask")


class AlertsFeature(Feature):
    """The alerts that the probe file configures.

    Probe file::

        monitor:
          alerts:
            - nonfinite
            - {rule: limit, threshold: 1000, cooldown: 50}
    """

    name = "alerts"

    def __init__(self, job: JobContext, alerts: Sequence[Alert], keep: Keep | None) -> None:
        self._job, self._keep = job, keep
        self._on_alert = job.config.recorder is not None and "alert" in job.config.recorder.on
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._replica = next((alert for alert in alerts if alert.rule == "replica"), Alert("replica"))
        self._rules = [alert.rule for alert in alerts]
        self.fired: Counter[str] = Counter()
        self._off: list[str] = []
        if alerts:
            job.watchers.append(AlertRules(alerts, self.report, self._failed))

    def next_from(self, step: int) -> int | None:
        """No step of its own: alerts judge what the monitor and the checks have seen."""
        return None

    def describe(self) -> str:
        """Which rules are on."""
        return f"alerts: {', '.join(self._rules) or 'replica'}"

    def ledger(self) -> dict[str, Any]:
        """Which rules are configured, how often each fired, which failed."""
        return {"asked": self._rules, "fired": dict(self.fired), "off": self._off}

    def disagreement(self, event: dict[str, Any]) -> None:
        """Report a disagreement that a check across ranks has found."""
        self.report(self._replica, {"event": "alert", "rule": "replica", **event})

    def report(self, alert: Alert, event: dict[str, Any]) -> None:
        """Write the event, print the line, run the actions. Thread-safe."""
        event = {**event, "rank": self._job.where.rank}
        with self._lock:
            self.fired[alert.rule] += 1
        warn(f"ALERT {event['text']}", self._job.where.rank)
        self._job.directory.append_event(event)
        action = alert.action or AlertAction()
        if self._keep is not None and (self._on_alert or action.recorder):
            self._keep(f"alert {alert.rule}", int(event["step"]))
        if action.record:
            self._job.request(next=action.record, level=action.level)
        if action.command:
            self._run(alert, action.command, event)

    def _run(self, alert: Alert, command: Sequence[str], event: dict[str, Any]) -> None:
        arguments = [_filled(argument, event) for argument in command]
        with self._lock:
            self._running = [process for process in self._running if process.poll() is None]
            if len(self._running) >= MOST_COMMANDS:
                self._failed(
                    f"alert {alert.rule}: {arguments[0]} was not run: {MOST_COMMANDS} commands are still running"
                )
                return
            try:
                process = subprocess.Popen(  # noqa: S603 (the user's own list of arguments)
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, "MSPROBE_ALERT": json_text(event)},
                )
            except (OSError, ValueError) as error:
                self._failed(f"alert {alert.rule}: {arguments[0]} cannot be run: {error}")
                return
            self._running.append(process)

    def _failed(self, text: str) -> None:
        if len(self._off) < MOST_COMMANDS * 8:
            self._off.append(text)
        self._job.say(text, "alert_fault")


def _filled(argument: str, event: dict[str, Any]) -> str:
    for key in ("rule", "step", "rank", "name"):
        argument = argument.replace(f"{{{key}}}", str(event.get(key, "")))
    return argument


class AlertRules:
    """All rules of a job, as one watcher of the monitor. A rule that raises is switched off; the others continue."""

    def __init__(self, alerts: Sequence[Alert], report: Report, failed: Callable[[str], None]) -> None:
        self._report, self._failed = report, failed
        self._histories: dict[int, Steps] = {}
        self._rules = [_Watched(make_rule(alert, self._histories)) for alert in alerts]
        self._series = PerRows(SeriesNumbers().of)
        self._fixed_columns = PerRows[dict[str, Any]](lambda rows: {})
        self.fired: Counter[str] = Counter()

    def saw(self, rows: StepRows) -> None:
        """A watched step is over: judge it, report the first finding of each rule, add it to the histories."""
        if not rows.rows:
            return
        columns = Columns(rows, self._fixed_columns(rows.rows))
        series = self._series(rows.rows)
        for watched in list(self._rules):
            try:
                found = watched.first_new(columns, series)
                if found is not None:
                    self.fired[watched.rule.alert.rule] += 1
                    self._report(watched.rule.alert, _event(columns, watched.rule.alert, *found))
            except Exception as error:  # neither the other rules nor training notice
                self._rules.remove(watched)
                self._failed(
                    f"alert {watched.rule.alert.rule} is off after an internal error: {type(error).__name__}: {error}"
                )
        for history in self._histories.values():
            history.add(series, columns.sizes)


class _Watched:
    """A rule, the rows it judges, and the step at which it last reported each series."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._matchers = [name_matcher(text) for text in rule.alert.names]
        self._selected = PerRows(self._select)
        self._reported = np.zeros(0, np.int64)
        self._last_report = -(1 << 62)

    def first_new(self, columns: Columns, series: Numbers) -> tuple[Hit, int] | None:
        """The first row, in order of execution, that is not cooling down, and how many there are in all."""
        rows = columns.seen.rows
        hits = self.rule.judge(Step(columns, series, self._selected(rows) & columns.measured))
        if not hits:
            return None
        hits.sort(key=lambda hit: rows[hit.row].seq)
        step, places = columns.seen.step, np.array([series[hit.row] for hit in hits])
        self._room(int(places.max()) + 1)
        quiet = (
            (places >= 0) & (self._reported[places] >= 0) & (step - self._reported[places] <= self.rule.alert.cooldown)
        )
        self._reported[places[(places >= 0) & ~quiet]] = step
        first = next((hit for hit, still in zip(hits, quiet, strict=True) if not still), None)
        if first is None or (self.rule.spreads and 0 <= step - self._last_report <= self.rule.alert.cooldown):
            return None
        self._last_report = step
        return first, len(hits)

    def _select(self, rows: Sequence[Row]) -> Flags:
        return np.fromiter(map(self._wants, rows), bool, len(rows))

    def _wants(self, row: Row) -> bool:
        kinds = self.rule.alert.kinds or self.rule.kinds
        if kinds and row.kind not in kinds:
            return False
        return not self._matchers or any(matches(row.name) for matches in self._matchers)

    def _room(self, series: int) -> None:
        if series > len(self._reported):
            more = max(series, 2 * len(self._reported), 1) - len(self._reported)
            self._reported = np.concatenate((self._reported, np.full(more, -1, np.int64)))


def _event(columns: Columns, alert: Alert, hit: Hit, hits: int) -> dict[str, Any]:
    rows = columns.seen
    row = rows.rows[hit.row]
    label = f"{row.name}{' ' + row.io if row.io else ''}{' ' + row.path if row.path else ''} ({row.kind})"
    if hit.row in columns.token_sums:
        label = f"{row.name} per token ({row.kind})"
    at = "" if row.microbatch is None else f", microbatch {row.microbatch}"
    others = f"; {hits - 1} more tensor{'' if hits == 2 else 's'}" if hits > 1 else ""  # noqa: PLR2004
    event = {
        "event": "alert",
        "rule": alert.rule,
        "step": rows.step,
        **{name: getattr(row, name) for name in ("kind", "name", "io", "path", "microbatch", "phase", "vpp", "seq")},
        "value": hit.value,
        "others": hits - 1,
        "text": f"{alert.rule}: {label}: {hit.text} (step {rows.step}{at}, {row.phase}{others})",
    }
    data = _data_of(rows, row.microbatch)
    if data:
        event["data"] = data
    return event


def _data_of(rows: StepRows, microbatch: int | None) -> dict[str, Any]:
    """Digests of the inputs of a microbatch, which identify its samples."""
    found: dict[str, Any] = {}
    for row in rows.rows:
        if row.kind == "data" and row.microbatch == microbatch is not None and not row.name.endswith(_NOT_SAMPLES):
            digest = row.digest
            if digest is None and rows.digests is not None and row.slot >= 0:
                digest = int(rows.digests[row.slot])
            if digest is not None:
                found[f"{row.name}{'.' + row.path if row.path else ''}"] = f"{digest:016x}"
    return found
