"""Alerts of one session: what they say and what they do, put together.

Rules find something in the writer thread, checks in a thread of their own; both come here. An alert is one event and
one line on standard error, then what the probe file lets it do. Nothing of this waits, nothing of it can fail a job.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msprobe_megatron.config import Alert, AlertAction
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.probes.alerts.watch import Alerts
from msprobe_megatron.record.json_text import json_text

MOST_COMMANDS = 4
"""Commands of alerts that may run at once; what comes beyond is not run, and said so."""
Keep = Callable[[str, int], None]
"""`keep(reason, step)`: has the flight recorder written out."""


class Alerting(Part):
    """The alerts that the probe file asks for.

    Example::

        alerting = Alerting(job, config.monitor.alerts, keep=recorder.keep)
        alerting.tell(Alert("replica"), {"event": "alert", "rule": "replica", "step": 7, "text": "…"})
    """

    name = "alerts"

    def __init__(self, job: Job, alerts: Sequence[Alert], keep: Keep | None) -> None:
        self._job, self._keep = job, keep
        self._on_alert = job.config.recorder is not None and "alert" in job.config.recorder.on
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._replica = next((alert for alert in alerts if alert.rule == "replica"), Alert("replica"))
        self._asked = [alert.rule for alert in alerts]
        self.fired: Counter[str] = Counter()
        self._off: list[str] = []
        if alerts:
            job.watchers.append(Alerts(alerts, self.tell, self._failed))

    def next_from(self, step: int) -> int | None:
        """No step of its own: alerts look at what the monitor and the checks have seen."""
        return None

    def describe(self) -> str:
        """Which rules are on."""
        return f"alerts: {', '.join(self._asked) or 'replica'}"

    def ledger(self) -> dict[str, Any]:
        """Which rules were asked, how often each fired, which failed."""
        return {"asked": self._asked, "fired": dict(self.fired), "off": self._off}

    def disagreement(self, event: dict[str, Any]) -> None:
        """A check across ranks found that they disagree."""
        self.tell(self._replica, {"event": "alert", "rule": "replica", **event})

    def tell(self, alert: Alert, event: dict[str, Any]) -> None:
        """Write the event, print the line, act. From any thread."""
        event = {**event, "rank": self._job.where.rank}
        with self._lock:
            self.fired[alert.rule] += 1
        self._print(f"ALERT {event['text']}")
        self._job.directory.append_event(event)
        action = alert.action or AlertAction()
        if self._keep is not None and (self._on_alert or action.recorder):
            self._keep(f"alert {alert.rule}", int(event["step"]))
        if action.record:
            self._job.request(next=action.record, level=action.level)
        if action.command:
            self._run(alert, action.command, event)

    def _run(self, alert: Alert, command: Sequence[str], event: dict[str, Any]) -> None:
        words = [_filled(word, event) for word in command]
        with self._lock:
            self._running = [process for process in self._running if process.poll() is None]
            if len(self._running) >= MOST_COMMANDS:
                self._failed(f"alert {alert.rule}: {words[0]} was not run: {MOST_COMMANDS} commands are still running")
                return
            try:
                process = subprocess.Popen(  # noqa: S603 (the user's own list of arguments)
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, "MSPROBE_ALERT": json_text(event)},
                )
            except (OSError, ValueError) as error:
                self._failed(f"alert {alert.rule}: {words[0]} cannot be run: {error}")
                return
            self._running.append(process)

    def _failed(self, text: str) -> None:
        if len(self._off) < MOST_COMMANDS * 8:
            self._off.append(text)
        self._job.say(text, "alert_fault")

    def _print(self, text: str) -> None:
        # A log that is closed or full is no reason to stop a job.
        with contextlib.suppress(OSError, ValueError):
            print(f"msprobe [rank {self._job.where.rank}]: {text}", file=sys.stderr, flush=True)


def _filled(word: str, event: dict[str, Any]) -> str:
    for key in ("rule", "step", "rank", "name"):
        word = word.replace(f"{{{key}}}", str(event.get(key, "")))
    return word
