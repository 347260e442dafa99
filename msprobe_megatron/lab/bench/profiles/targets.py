"""What was asked of the lines of a table, and whether they meet it.

`target` is asked of a line's ratio, or of the figure it has instead of one; `asked` holds what is asked of further
figures of the same line, always as an upper limit. The document, the profiles and the pictures all ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What `target` is about: the first of these that a line has.
_FIGURES = ("ratio", "GB_a_second", "share", "seconds", "error")
_AT_LEAST = ("GB_a_second", "share")
_UNITS = {
    "microseconds": " µs a row",
    "extra_bytes": " added memory",
    "peak_bytes": " peak memory",
    "memory_ratio": " memory ratio",
    "host_synchronisations": " host synchronisations",
    "collectives": " collectives",
    "seconds": " seconds",
    "GB_a_second": " GB/s",
    "share": " of the plain speed",
    "error": " error",
    "launches_per_tensor": " launches a tensor",
    "launches_per_step": " launches a step",
    "host_us_per_row": " µs of the host a row",
    "syncs_per_step": " waits of the host a step",
    "bytes_per_element": " bytes an element",
}


@dataclass(frozen=True)
class Verdict:
    """One figure of one line beside what was asked of it."""

    name: str
    figure: str
    value: float
    asked: float
    uncertainty: float | None = None
    """Standard error of the value, where it was measured often enough to have one."""

    @property
    def met(self) -> bool:
        """Whether it is."""
        if self.figure in _AT_LEAST:
            return self.value >= self.asked
        return (abs(self.value) if self.figure == "error" else self.value) <= self.asked

    @property
    def label(self) -> str:
        """The line's name, and which of its figures it is where that is not the ratio of times."""
        return self.name + _UNITS.get(self.figure, "")

    @property
    def sign(self) -> str:
        """Whether it is a lower or an upper limit."""
        return "≥" if self.figure in _AT_LEAST else "≤"


def verdicts(lines: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Every figure of which something was asked.

    Example::

        >>> verdicts([{"name": "h64:L0", "ratio": 1.7, "target": 1.5}])[0].met
        False
    """
    found = []
    for line in lines:
        name, target = str(line["name"]), line.get("target")
        figure = next((key for key in _FIGURES if line.get(key) is not None), None)
        if target is not None and figure is not None:
            found.append(Verdict(name, figure, line[figure], target, line.get("uncertainty")))
        for key, limit in (line.get("asked") or {}).items():
            if line.get(key) is not None:
                found.append(Verdict(name, key, line[key], limit))
    return found
