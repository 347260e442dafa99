"""The rules of alerts: each judges the rows of a step and returns its hits.

A new rule is a class here, a line in `make_rule` and a name in the configuration. A rule sees columns and never the
training; what it keeps from step to step is bounded by the number of series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.config import Alert
from msprobe_megatron.config.expressions import parse_expression
from msprobe_megatron.job.features.alerts.series import Columns, Flags, Floats, Numbers, Steps, Usual
from msprobe_megatron.job.record.monitor_files import PerRows
from msprobe_megatron.run_directory.schema import Row

ENOUGH = 8
"""Steps of a series before it is judged against its history."""
# Default spike thresholds (ratio to the running median, minus 1), calibrated by the `evaluate` script beside the tests
# of the alerts; see docs/monitor.md.
_SPIKE, _SPIKE_OF_LOSS, _VANISH = 2.0, 0.25, 1e-3
# Clean jobs of small models reach 2.6 times the median, but stay within three deviations.
_SPIKE_OF_GRAD_NORM = 1.0
# The output of a module with few features may fall to a third while it learns.
_SPIKE_OF_ACTIVATION = 3.0
# An expert that gets a single token of a microbatch shows the size of that token's activation.
_SPIKE_OF_EXPERT = 9.0
# Adam scales a gradient that is zero but for rounding up to nearly the size of all others.
_SPIKE_OF_UPDATE = 6.0
# Clipping shrinks one gradient because others have grown.
_SPIKE_OF_CLIPPED = 9.0
_SPIKES = {"activation": _SPIKE_OF_ACTIVATION, "update": _SPIKE_OF_UPDATE, "grad_clipped": _SPIKE_OF_CLIPPED}
# There is one gradient norm per step, and thousands of tensors to raise a false alarm about.
_OF_THE_WHOLE_JOB = 0.4
# Routing changes from step to step, and with it the gradients of experts and router.
_SPIKE_OF_ROUTED = 29.0
_ROUTED = re.compile(r"(?:^|\.)(?:router|(?:local_)?experts)(?:\.|$)")
_MOSTLY_ZERO = 0.99
_REDUCED = ("grad_reduced", "grad_clipped")
_GRADIENTS = ("gradient", "grad_unreduced", *_REDUCED)
# Kinds of rows whose size can spike or vanish; token ids, times and verdicts have none.
_SIZED = ("activation", *_GRADIENTS, "update", "optimizer_state", "parameter", "loss")
_MOVING = ("activation", *_GRADIENTS, "update", "loss")
# Set by the training script; they may jump.
_SETTINGS = ("loss_scale", "lr", "learning_rate", "skipped")
_EXPERT = re.compile(r"((?:^|.*\.)(?:local_)?experts)\.(?:(?P<one>\d+)(?=\.|$)|linear_fc\d\.[a-z]+(?P<grouped>\d+)$)")
"""Experts that are modules of their own, and those of TransformerEngine's grouped layers with numbered weights."""


class Hit(NamedTuple):
    """A finding: the index of its row in the step, the value, and the text for the user."""

    row: int
    value: float
    text: str


class Step(NamedTuple):
    """The rows of a step as rules see them."""

    columns: Columns
    series: Numbers
    chosen: Flags
    """Rows that `names` and `kinds` of the rule select, and that have statistics."""


class Rule:
    """Base class: judges one step at a time."""

    kinds: tuple[str, ...] = ()
    """Kinds of rows that are judged by default."""
    spreads = False
    """True if the fault propagates to other tensors: the cool-down is then per rule, not per series."""

    def __init__(self, alert: Alert) -> None:
        self.alert = alert

    def judge(self, step: Step) -> list[Hit]:
        """The findings among the rows, in any order."""
        raise NotImplementedError


class NonFinite(Rule):
    """A NaN or an Inf."""

    spreads = True

    def judge(self, step: Step) -> list[Hit]:
        """Every row that counts one."""
        columns = step.columns
        bad = columns["n_nan"] + columns["n_inf"]
        return [
            Hit(int(i), float(bad[i]), f"{_non_finite(columns, i)} of {columns['numel'][i]:.0f} elements")
            for i in np.flatnonzero(step.chosen & (bad > 0))
        ]


class Limit(Rule):
    """An absolute value above the threshold."""

    kinds = (*_SIZED, "comm")

    def judge(self, step: Step) -> list[Hit]:
        """Every row whose largest absolute value is above it."""
        largest, most = step.columns["absmax"], self.alert.threshold or 0.0
        chosen = step.chosen if self.alert.names else step.chosen & _magnitudes(step.columns)
        return [
            Hit(int(i), float(largest[i]), f"absolute value {largest[i]:.6g} is above {most:g}")
            for i in np.flatnonzero(chosen & (largest > most))
        ]


class Custom(Rule):
    """The expression of the probe file holds. `norm > 1e3` is about tensors: not about bytes of memory, not token ids.

    Times, memory and samples are judged where `names` or `kinds` are given or the expression looks at names or kinds;
    integers and settings where rows are chosen by name or by dtype.
    """

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)
        self._expression = parse_expression(alert.expression)
        columns = set(self._expression.columns)
        if not (alert.names or columns & {"kind", "name"}):
            self.kinds = (*_SIZED, "comm", "scalar", "routing")
        self._every_dtype = bool(alert.names or columns & {"name", "dtype"})

    def judge(self, step: Step) -> list[Hit]:
        """Every row for which the expression holds."""
        with np.errstate(all="ignore"):
            holds = np.broadcast_to(np.asarray(self._expression.holds(step.columns), bool), step.chosen.shape)
        if not self._every_dtype:
            holds = holds & _magnitudes(step.columns)
        names = [name for name in self._expression.columns if step.columns[name].dtype != object]
        hits = []
        for i in np.flatnonzero(step.chosen & holds):
            values = ", ".join(f"{name} {step.columns[name][i]:.6g}" for name in names)
            value = float(step.columns[names[0]][i]) if names else 1.0
            hits.append(Hit(int(i), value, f"{self.alert.expression} ({values})"))
        return hits


class Spike(Rule):
    """A root mean square far above or below what is usual for the series, by ratio and by robust deviations."""

    kinds = _MOVING

    def __init__(self, alert: Alert, history: Steps) -> None:
        super().__init__(alert)
        self._history = history
        self._bounds = PerRows(self._bounds_of)

    def judge(self, step: Step) -> list[Hit]:
        """Every row whose size is further from the median, on the scale of logarithms, than both bounds."""
        columns = step.columns
        chosen = every = np.flatnonzero(step.chosen & _magnitudes(columns))
        logs, (ratios, shares) = columns.sizes, self._bounds(columns.seen.rows)
        low, high = self._history.bounds(step.series[chosen])
        with np.errstate(invalid="ignore"):
            far = np.maximum(np.abs(logs[chosen] - low), np.abs(logs[chosen] - high)) > ratios[chosen]
            chosen = chosen[far & np.isfinite(logs[chosen])]
            usual, logs = self._history.usual(step.series[chosen]), logs[chosen]
            # From few steps the deviation is itself uncertain, and there are thousands of series to be wrong about.
            deviations = self.alert.deviations * shares[chosen] * (1 + 2 * ENOUGH / np.maximum(usual.steps, 1))
            bound = np.maximum(ratios[chosen], deviations * usual.deviation)
            # A microbatch may leave a rank little: targets that are all in another rank's part of the vocabulary.
            lower = self._one_sided(columns, chosen) & (logs < usual.median)
            bound = np.where(lower, np.maximum(bound, -np.log(_VANISH)), bound)
            off = np.abs(logs - usual.median)
            odd = np.flatnonzero((usual.steps >= _enough(self._history)) & (off > bound))
        if len(odd):
            noise = self._of_their_kind(step, every, chosen[odd]) * np.minimum(ENOUGH / usual.steps[odd], 1)
            odd = odd[off[odd] > deviations[odd] * noise]
        return [_against_usual(int(chosen[i]), float(logs[i]), usual, int(i)) for i in odd]

    def _of_their_kind(self, step: Step, every: Numbers, rows: Numbers) -> Floats:
        """Usual deviation over all series of each row's kind: from few steps, a series' own may be small by chance."""
        kinds, found = step.columns["kind"], np.zeros(len(rows))
        for kind in set(kinds[rows]) - {"loss"}:
            like = self._history.usual(step.series[every[kinds[every] == kind]])
            found[kinds[rows] == kind] = np.median(like.deviation[like.steps >= _enough(self._history)])
        return found

    def _one_sided(self, columns: Columns, chosen: Numbers) -> Flags:
        """Gradients of single microbatches, where the probe file sets no threshold."""
        kind, path = columns["kind"][chosen], columns["path"][chosen]
        single = (kind == "gradient") | ((kind == "grad_unreduced") & (path == "microbatch"))
        return np.asarray(single & (self.alert.threshold is None), bool)

    def _bounds_of(self, rows: Sequence[Row]) -> tuple[Floats, Floats]:
        """Threshold of each row, as a logarithm; the share of `deviations` that it must exceed besides."""
        threshold = self.alert.threshold
        ratios = [threshold if threshold is not None else _default_ratio(row) for row in rows]
        shares = [_OF_THE_WHOLE_JOB if row.kind == "loss" and row.name == "grad_norm" else 1.0 for row in rows]
        return np.log1p(np.array(ratios, np.float64)), np.array(shares, np.float64)


class Vanish(Rule):
    """A root mean square that collapsed, or a tensor that is all of a sudden nothing but zeros."""

    kinds = ("activation", *_GRADIENTS)

    def __init__(self, alert: Alert, history: Steps) -> None:
        super().__init__(alert)
        self._history, self._zeros = history, Steps(history.window)
        self._ratio = float(np.log(_VANISH if alert.threshold is None else alert.threshold))
        self._experts = PerRows(_expert_rows)

    def judge(self, step: Step) -> list[Hit]:
        """Every row whose size is below the share of the median that the threshold gives, or whose zeros jumped."""
        columns = step.columns
        # An expert may well get no token of a microbatch; `dead_expert` reports one that gets none at all.
        idle = self._experts(columns.seen.rows) & (columns["n_zero"] >= columns["numel"])
        chosen = np.flatnonzero(step.chosen & (columns["numel"] > 0) & columns.floating & ~idle)
        bad, logs, share = columns["n_nan"] + columns["n_inf"], columns.sizes, columns["zeros"]
        _, high = self._history.bounds(step.series[chosen])
        with np.errstate(invalid="ignore"):
            small = chosen[(logs[chosen] - high < self._ratio) & (bad[chosen] == 0)]
        usual, empty = self._history.usual(step.series[small]), chosen[share[chosen] > _MOSTLY_ZERO]
        zeros, enough = self._zeros.usual(step.series[empty]), _enough(self._history)
        self._zeros.add(step.series[chosen], share[chosen])
        with np.errstate(invalid="ignore"):
            collapsed = (usual.steps >= enough) & (logs[small] - usual.median < self._ratio)
            emptied = (zeros.steps >= enough) & (zeros.median < _MOSTLY_ZERO / 2)
        hits = [_against_usual(int(small[i]), float(logs[small[i]]), usual, int(i)) for i in np.flatnonzero(collapsed)]
        collapsed_rows = {hit.row for hit in hits}
        for i in np.flatnonzero(emptied):
            if int(empty[i]) not in collapsed_rows:
                text = f"{share[empty[i]]:.1%} of the elements are zero, usually {zeros.median[i]:.1%}"
                hits.append(Hit(int(empty[i]), float(share[empty[i]]), text))
        return hits


class DeadExpert(Rule):
    """An expert that no token reached: its reduced gradients are zero, or, where there are none, its activations."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)
        self._experts = PerRows(_rows_by_expert)

    def judge(self, step: Step) -> list[Hit]:
        """The first row of every expert whose rows are all zero or empty in this step."""
        experts = self._experts(step.columns.seen.rows)
        if not experts:
            return []
        zero = (step.columns["n_zero"] >= step.columns["numel"]) | (step.columns["numel"] == 0)
        hits = []
        for name, rows in experts.items():
            # A reduced gradient accounts for the tokens of all ranks; an activation only for this rank's.
            reduced, others = ([i for i in some if step.chosen[i]] for some in rows)
            evidence = reduced or others
            if evidence and all(zero[i] for i in evidence):
                hits.append(Hit(evidence[0], 0.0, f"no token reached {name} in this step"))
        return hits


class Replica(Rule):
    """Reported by the checks across ranks and not by rows."""

    def judge(self, step: Step) -> list[Hit]:
        """No row: one rank does not know what others hold."""
        return []


def _magnitudes(columns: Columns) -> Flags:
    """Rows whose numbers have a size: not token ids, positions, masks, numbers of tokens and settings."""
    sized = columns.floating & ~np.isin(columns["name"], _SETTINGS)
    sized[columns.token_counts] = False
    return np.asarray(sized, bool)


def make_rule(alert: Alert, histories: dict[int, Steps]) -> Rule:
    """The rule of an alert in the probe file; rules with the same window share a history of norms."""
    if alert.rule in ("spike", "vanish"):
        history = histories.setdefault(alert.window, Steps(alert.window))
        return (Spike if alert.rule == "spike" else Vanish)(alert, history)
    simple: dict[str, Callable[[Alert], Rule]] = {
        "nonfinite": NonFinite,
        "limit": Limit,
        "custom": Custom,
        "dead_expert": DeadExpert,
        "replica": Replica,
    }
    return simple[alert.rule](alert)


def _expert_rows(rows: Sequence[Row]) -> Flags:
    """Which rows belong to an expert."""
    return np.array([_EXPERT.match(row.name) is not None for row in rows], bool)


def _rows_by_expert(rows: Sequence[Row]) -> dict[str, tuple[list[int], list[int]]]:
    """Rows of each expert: reduced gradients, and everything else that depends on its tokens."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for i, row in enumerate(rows):
        match = _EXPERT.match(row.name) if row.kind in ("activation", *_GRADIENTS) else None
        if match is not None:
            name = f"{match[1]}.{match['one'] or match['grouped']}"
            found.setdefault(name, ([], []))[row.kind not in _REDUCED].append(i)
    return found


def _default_ratio(row: Row) -> float:
    """Default spike threshold of a row; a loss need not double to be a bad sign."""
    if row.kind == "loss":
        return _SPIKE_OF_GRAD_NORM if row.name == "grad_norm" else _SPIKE_OF_LOSS
    if row.kind in (*_GRADIENTS, "update") and _ROUTED.search(row.name):
        return _SPIKE_OF_ROUTED
    if row.kind == "activation" and _EXPERT.match(row.name):
        return _SPIKE_OF_EXPERT
    return _SPIKES.get(row.kind, _SPIKE)


def _enough(history: Steps) -> int:
    return min(ENOUGH, history.window)


def _against_usual(row: int, log: float, usual: Usual, i: int) -> Hit:
    size, median = float(np.exp(log)), float(np.exp(usual.median[i]))
    times = size / median if median else float("inf")
    text = (
        f"root mean square {size:.4g} is {times:.3g} times the median {median:.4g} of the last {usual.steps[i]} steps"
    )
    return Hit(row, size, text)


def _non_finite(columns: Columns, i: Any) -> str:
    labels = (("n_nan", "NaN"), ("n_posinf", "+Inf"), ("n_neginf", "-Inf"))
    return ", ".join(f"{columns[column][i]:.0f} {label}" for column, label in labels if columns[column][i] > 0)
