"""Terminal form of a running job: one screen with sparklines, alerts below."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from msprobe_megatron.analysis.load.live import Live

_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {"alert": "bold red", "fault": "bold red", "recorder": "cyan"}
WIDTH = 48
_MOST_LAYERS = 40


def sparkline(values: Sequence[float | None], width: int = WIDTH) -> str:
    """The last `width` values as bars from the smallest to the largest; a gap where there is none.

    Example::

        >>> sparkline([1, 2, None, 4])
        '▁▃ █'
    """
    shown = values[-width:]
    finite = [value for value in shown if value is not None and math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    marks = []
    for value in shown:
        if value is None:
            marks.append(" ")
        elif not math.isfinite(value):
            marks.append("!")
        else:
            share = (value - low) / (high - low) if high > low else 0.0
            marks.append(_BARS[min(int(share * len(_BARS)), len(_BARS) - 1)])
    return "".join(marks)


def screen(live: Live) -> RenderableType:
    """The whole view."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True, max_width=24)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, curve in [*live.losses.items(), *live.scalars.items()]:
        table.add_row(Text(str(name), style="bold"), figure(curve), sparkline(curve))
    for layer, curve in list(live.layers.items())[:_MOST_LAYERS]:
        table.add_row(Text(f"layer {layer}"), figure(curve), Text(sparkline(curve), style="green"))
    parts: list[RenderableType] = [_head(live), table]
    if len(live.layers) > _MOST_LAYERS:
        parts.append(Text(f"{len(live.layers) - _MOST_LAYERS} more layers: --json has them"))
    if not live.steps:
        parts.append(Text("no monitored step yet: the monitor writes every few seconds"))
    for event in live.events:
        ranks = event.get("ranks") or [event.get("rank")]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        text = f"{who}: {event.get('text', event.get('event'))}"
        parts.append(Text(f"! {text}", style=_STYLES.get(str(event.get("event")), "yellow")))
    if live.alerts:
        parts.append(Text(f"first cause: msprobe-megatron diagnose {live.path}"))
    return Group(*parts)


def figure(curve: Sequence[float | None]) -> str:
    """The last value that is not None.

    Example::

        >>> figure([1.0, 2.5, None])
        '2.5'
    """
    last = next((value for value in reversed(curve) if value is not None), None)
    return "" if last is None else f"{last:.5g}"


def _head(live: Live) -> Text:
    steps = f"step {live.steps[-1]}" if live.steps else "no step"
    age = f", written {live.age:.0f} s ago" if live.age is not None and not live.ended else ""
    age = ", the job has ended" if live.ended else age
    alerts = f", {live.alerts} alert{'' if live.alerts == 1 else 's'}" if live.alerts else ", no alerts"
    measure = f"; layers: norm of {live.measure}" if live.layers else ""
    style = "bold red" if live.alerts else "bold"
    return Text(f"{live.path}: {steps}, {live.ranks} of {live.world} ranks{age}{alerts}{measure}", style=style)
