"""The watcher of alerts: lets every rule look at a step, keeps to the cool-downs, and tells what was found.

Runs in the writer thread. A rule that fails is switched off and said so; neither training nor another rule notices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from msprobe_megatron.config import Alert
from msprobe_megatron.probes.alerts.history import Steps
from msprobe_megatron.probes.alerts.rules import Hit, Rule, Step, make_rule
from msprobe_megatron.probes.alerts.seen import Columns, Flags, Numbers, SeriesNumbers
from msprobe_megatron.record.schema import Row
from msprobe_megatron.record.watching import StepRows

# Inputs that are the same for every sample.
_NOT_SAMPLES = ("position_ids", "attention_mask")
Raise = Callable[[Alert, dict[str, Any]], None]
"""`raise_alert(alert, event)`: writes the event, prints the line, acts."""


class Alerts:
    """All rules of a job.

    Example::

        job.watchers.append(Alerts(config.monitor.alerts, tell, failed))
    """

    def __init__(self, alerts: Sequence[Alert], tell: Raise, failed: Callable[[str], None]) -> None:
        self._tell, self._failed = tell, failed
        self._histories: dict[int, Steps] = {}
        self._rules = [_Watched(make_rule(alert, self._histories)) for alert in alerts]
        self._numbers = SeriesNumbers()
        self._last: Columns | None = None
        self.fired: Counter[str] = Counter()

    def saw(self, rows: StepRows) -> None:
        """A watched step is over: judge it, tell of the first of each rule, remember its norms."""
        if not rows.rows:
            return
        columns = self._last = Columns(rows, self._last)
        series = self._numbers.of(rows.rows)
        for watched in list(self._rules):
            try:
                found = watched.news(columns, series)
                if found is not None:
                    self.fired[watched.rule.alert.rule] += 1
                    self._tell(watched.rule.alert, _event(rows, watched.rule.alert, *found))
            except Exception as error:  # one rule's fault is not that of the others, nor of training
                self._rules.remove(watched)
                self._failed(f"alert {watched.rule.alert.rule} is off after a fault: {type(error).__name__}: {error}")
        if self._histories:
            for history in self._histories.values():
                history.add(series, columns.sizes)


class _Watched:
    """A rule, the rows it wants, and when it spoke last of each series."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._matchers = [_matcher(text) for text in rule.alert.names]
        self._wanted: tuple[Sequence[Row], Flags] | None = None
        self._spoke = np.zeros(0, np.int64)
        self._spoke_last = -(1 << 62)

    def news(self, columns: Columns, series: Numbers) -> tuple[Hit, int] | None:
        """The first row, in order of execution, that is not cooling down, and how many there are in all."""
        rows = columns.seen.rows
        hits = self.rule.judge(Step(columns, series, self._selected(rows) & columns.measured))
        if not hits:
            return None
        hits.sort(key=lambda hit: rows[hit.row].seq)
        step, places = columns.seen.step, np.array([series[hit.row] for hit in hits])
        self._room(int(places.max()) + 1)
        quiet = (places >= 0) & (self._spoke[places] >= 0) & (step - self._spoke[places] <= self.rule.alert.cooldown)
        self._spoke[places[(places >= 0) & ~quiet]] = step
        first = next((hit for hit, still in zip(hits, quiet, strict=True) if not still), None)
        if first is None or (self.rule.spreads and 0 <= step - self._spoke_last <= self.rule.alert.cooldown):
            return None
        self._spoke_last = step
        return first, len(hits)

    def _selected(self, rows: Sequence[Row]) -> Flags:
        if self._wanted is None or self._wanted[0] is not rows:
            wanted = np.fromiter(map(self._wants, rows), bool, len(rows))
            self._wanted = (rows, wanted)
        return self._wanted[1]

    def _wants(self, row: Row) -> bool:
        kinds = self.rule.alert.kinds or self.rule.kinds
        if kinds and row.kind not in kinds:
            return False
        return not self._matchers or any(matches(row.name) for matches in self._matchers)

    def _room(self, series: int) -> None:
        if series > len(self._spoke):
            more = max(series, 2 * len(self._spoke), 1) - len(self._spoke)
            self._spoke = np.concatenate((self._spoke, np.full(more, -1, np.int64)))


def _event(rows: StepRows, alert: Alert, hit: Hit, hits: int) -> dict[str, Any]:
    row = rows.rows[hit.row]
    label = f"{row.name}{' ' + row.io if row.io else ''}{' ' + row.path if row.path else ''} ({row.kind})"
    at = "" if row.microbatch is None else f", microbatch {row.microbatch}"
    others = f"; {hits - 1} more tensor{'' if hits == 2 else 's'}" if hits > 1 else ""  # noqa: PLR2004
    event = {
        "event": "alert",
        "rule": alert.rule,
        "step": rows.step,
        **{name: getattr(row, name) for name in ("kind", "name", "io", "path", "microbatch", "phase", "vpp", "seq")},
        "value": hit.value,
        "others": hits - 1,
        "text": f"{alert.rule}: {label}: {hit.words} (step {rows.step}{at}, {row.phase}{others})",
    }
    data = _data_of(rows, row.microbatch)
    if data:
        event["data"] = data
    return event


def _data_of(rows: StepRows, microbatch: int | None) -> dict[str, Any]:
    """What is known of the samples of a microbatch: digests of its inputs."""
    found: dict[str, Any] = {}
    for row in rows.rows:
        if row.kind == "data" and row.microbatch == microbatch is not None and not row.name.endswith(_NOT_SAMPLES):
            digest = row.digest
            if digest is None and rows.digests is not None and row.slot >= 0:
                digest = int(rows.digests[row.slot])
            if digest is not None:
                found[f"{row.name}{'.' + row.path if row.path else ''}"] = f"{digest:016x}"
    return found


def _matcher(text: str) -> Callable[[str], bool]:
    """`/regex/` searches, anything else is a substring."""
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        pattern = re.compile(text[1:-1])
        return lambda name: pattern.search(name) is not None
    return lambda name: text in name
