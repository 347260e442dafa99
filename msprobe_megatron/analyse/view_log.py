"""The log of a run: events in the order they were written, the ledger of each rank, patches."""

from __future__ import annotations

from typing import Any

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.record.events import read_events

_EVENTS = 2000
_RANKS = 64


def events(run: Run) -> dict[str, Any]:
    """Alerts, faults and drops in the order they were written; at most 2,000.

    Example::

        events(run)["events"][0]["text"]
    """
    found = read_events(run.path)
    plain = [
        {
            "event": str(event.get("event", "")),
            "rank": event.get("rank"),
            "step": event.get("step"),
            "time": event.get("time"),
            "text": str(event.get("text", "")),
        }
        for event in found[:_EVENTS]
    ]
    notes = [f"{_EVENTS} of {len(found)} events are shown."] if len(found) > _EVENTS else []
    return {"events": plain, "notes": notes}


def ledgers(run: Run) -> dict[str, Any]:
    """What each rank was asked, bound, saw and wrote, and its patches; ranks that are alike are put together.

    Example::

        ledgers(run)["groups"][0]["ranks"]
    """
    groups: dict[str, dict[str, Any]] = {}
    for rank, facts in sorted(run.ranks.items()):
        ledger = facts.get("ledger", {})
        own = ("patches", "written")  # shown apart
        plain = {name: value for name, value in ledger.items() if name not in own and value not in (None, [], {})}
        # Sizes of compressed files differ between ranks that did the same.
        sizes = ("bytes_written", "bytes_dropped")
        plain["written"] = {name: n for name, n in ledger.get("written", {}).items() if name not in sizes}
        plain["closed"] = facts.get("closed", False)
        groups.setdefault(repr(plain), {"ranks": [], "ledger": plain})["ranks"].append(rank)
    patches: dict[str, dict[str, Any]] = {}
    for facts in run.ranks.values():
        for patch in facts.get("ledger", {}).get("patches", []):
            entry = patches.setdefault(str(patch.get("id")), {**patch, "fired": 0})
            entry["fired"] += int(patch.get("fired") or 0)
    shown = list(groups.values())[:_RANKS]
    notes = [f"{_RANKS} of {len(groups)} different ledgers are shown."] if len(groups) > _RANKS else []
    return {"groups": shown, "patches": list(patches.values()), "notes": notes}
