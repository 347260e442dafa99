"""What was found while the job ran: suspect operators, alerts and disagreements of ranks, in order of cause."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msprobe_megatron.analyse.anomalies import anomalies
from msprobe_megatron.analyse.load import Run
from msprobe_megatron.analyse.monitor_files import steps_of
from msprobe_megatron.analyse.suspects import suspects
from msprobe_megatron.analyse.view_findings import event_key

_ALERTS = 500
_SUSPECTS = 100


def alerts(run: Run) -> dict[str, Any]:
    """Alerts and disagreements of all ranks as one list, causes first; at most 500.

    Example::

        alerts(run)["alerts"][0]["text"]
    """
    found = anomalies(run)
    plain = [
        {
            "step": anomaly.event.get("step"),
            "ranks": anomaly.ranks,
            "rule": str(anomaly.event.get("rule", anomaly.event.get("event"))),
            "name": str(anomaly.event.get("name", "")),
            "text": anomaly.text,
            "key": event_key(anomaly.event),
        }
        for anomaly in found[:_ALERTS]
    ]
    notes = [f"{_ALERTS} of {len(found)} alerts are shown."] if len(found) > _ALERTS else []
    return {"alerts": plain, "notes": notes}


def examined(run: Run) -> dict[str, Any] | None:
    """Operators that perturb examined: how many looks, verdicts, and the suspects, worst first; None without perturb.

    Example::

        examined(run)["suspects"][0]["next"]
    """
    if not run.perturb:
        return None
    rows = run.perturb_rows()
    counts = rows.aggregate("json_extract_string(extra, '$.verdict') as verdict, count(*)", "verdict").fetchall()
    (operators,) = rows.aggregate("count(distinct name)").fetchall()[0]
    return {
        "steps": sorted({step for part in run.perturb for step in steps_of(part)}),
        "operators": int(operators),
        "verdicts": {str(verdict): int(count) for verdict, count in counts},
        "suspects": [asdict(suspect) for suspect in suspects(run)[:_SUSPECTS]],
    }


def compared(run: Run) -> list[dict[str, Any]]:
    """What `checks` compared among ranks: each group once, with how often and what was left out.

    Example::

        compared(run)[0]["group"]       # "tp"
    """
    found: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for _, facts in sorted(run.ranks.items()):
        checks = facts.get("ledger", {}).get("checks")
        for label, ranks in (checks or {}).get("groups", {}).items():
            entry = {"group": str(label), "ranks": list(ranks), "times": int(checks.get("compared") or 0)}
            entry["notes"] = [str(text) for text in (*checks.get("notes", ()), checks.get("fault") or "") if text]
            found.setdefault((str(label), tuple(ranks)), entry)
    return list(found.values())
