"""Rows of a step as the monitor would hand them to its watchers, from plain arrays."""

from __future__ import annotations

import numpy as np

from msprobe_megatron.config import Alert
from msprobe_megatron.job.features.alerts.feature import AlertRules
from msprobe_megatron.job.record.monitor_files import StepRows
from msprobe_megatron.run_directory.schema import Row


def row(name="decoder.layers.0", kind="activation", microbatch=0, io="output", numel=4, slot=0, seq=0, **more) -> Row:
    values = {"seq": seq, "microbatch": microbatch, "phase": "forward", "vpp": 0, "kind": kind, "name": name, "io": io}
    values |= {"path": "", "op": "Linear", "site": -1, "dtype": "float32", "shape": (numel,), "global_shape": None}
    return Row(**{**values, "shard": "", "numel": numel, "slot": slot, **more})


def step(number: int, *tensors) -> StepRows:
    """`tensors` are (row, array): figures are computed here, by NumPy, in float64."""
    rows, floats, counts = [], [], []
    for slot, (what, array) in enumerate(tensors):
        x = np.asarray(array, np.float64).reshape(-1)
        good = x[np.isfinite(x)]
        rows.append(what._replace(slot=slot, numel=len(x), seq=slot))
        some = good if len(good) else np.array([np.nan])
        floats.append([some.min(), some.max(), good.sum(), (good**2).sum(), np.abs(some).max()])
        counts.append([np.isnan(x).sum(), np.isposinf(x).sum(), np.isneginf(x).sum(), (x == 0).sum()])
    return StepRows(number, rows, np.array(floats).reshape(-1, 5), np.array(counts, np.int64).reshape(-1, 4))


class Told:
    """Alerts that remember what they told."""

    def __init__(self, *alerts: Alert) -> None:
        self.events: list[dict] = []
        self.faults: list[str] = []
        self.alerts = AlertRules(alerts, lambda alert, event: self.events.append(event), self.faults.append)

    def __call__(self, number: int, *tensors) -> list[dict]:
        """What was told of this step."""
        before = len(self.events)
        self.alerts.saw(step(number, *tensors))
        return self.events[before:]
