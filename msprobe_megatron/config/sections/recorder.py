"""The ``recorder`` section: the flight recorder."""

from dataclasses import dataclass
from typing import Literal, get_args

from msprobe_megatron.config.keys import integer, key, other_settings, section, some_of

Trigger = Literal["nonfinite", "alert", "signal"]
TRIGGERS: tuple[str, ...] = get_args(Trigger)


@dataclass(frozen=True)
class RecorderConfig:
    """The ``recorder`` section: the most recent steps are kept in memory and written when something happens.

    They are always written when an exception ends the training.
    """

    keep_steps: int = key(4, integer(1, 10_000), "number of most recent steps kept in memory", "8")
    on: tuple[Trigger, ...] = key(
        ("nonfinite", "alert", "signal"),
        some_of(TRIGGERS),
        "events on which they are written, besides an exception",
        "[nonfinite, signal]",
    )
    times: int = key(8, integer(1), "how many times they are written, at most", "2")

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        first = f"last {self.keep_steps} steps, written on {', '.join(self.on)}"
        return ", ".join([first, *other_settings(self, "keep_steps", "on")])


RECORDER = section(RecorderConfig)
