"""A law: its name, what it needs recorded, what that costs, which faults break it, and the function that checks it.

    def check(scene: Scene) -> list[Breach]: ...

A check returns the breaches it found, in the order of cause as far as it knows it; it raises `NotChecked` when the run
does not hold what is needed. Checks are pure functions of the recorded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msprobe_megatron.analysis.laws.scene import Row, Scene


class NotChecked(Exception):
    """The run does not hold what the law needs; the text completes "not checked: needs …"."""


@dataclass(frozen=True)
class Breach:
    """One place where a law does not hold."""

    text: str
    where: dict[str, Any] = field(default_factory=dict)
    sure: str = "certain"
    """`certain`, `likely` or `possible`; `note` where healthy jobs may do it on purpose: said, and no finding."""


Check = Callable[[Scene], list[Breach]]


@dataclass(frozen=True)
class Law:
    """One law. `needs` names the settings of the probe file that record what it reads."""

    name: str
    says: str
    finds: str
    needs: str
    cost: str
    check: Check
    next: str = ""
    """What to do when it is broken."""


def at(row: Row, *, ranks: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """The place of a row, for `--json`."""
    return {
        "step": row.step,
        "microbatch": row.microbatch,
        "phase": row.phase,
        "kind": row.kind,
        "name": row.name,
        "io": row.io,
        "path": row.path,
        "ranks": ranks if ranks is not None else [row.rank],
        **more,
    }


def moment(row: Row) -> str:
    """When a row was recorded, in words."""
    at_microbatch = "" if row.microbatch is None else f", microbatch {row.microbatch}"
    return f"step {row.step}{at_microbatch}"


def label(row: Row) -> str:
    """Which tensor a row is, in words."""
    what = {"activation": row.io, "gradient": f"gradient of {row.io}"}.get(row.kind, row.kind)
    return f"{row.name} {what}{' ' + row.path if row.path else ''}"
