"""The rules: each finds, among the rows of a step, those that it has something to say about.

A rule sees columns and never the training; what it keeps from step to step is bounded by the number of series.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_megatron.config import Alert
from msprobe_megatron.config.expressions import parse_expression
from msprobe_megatron.probes.alerts.history import Steps, Usual
from msprobe_megatron.probes.alerts.seen import Columns, Flags, Floats, Numbers
from msprobe_megatron.record.schema import Row

ENOUGH = 8
"""Steps of a series that must have been seen before it is judged against them."""
# By which factor more a figure must be off: chosen by `python -m tests.alerts.evaluate`, see docs/monitor.md.
_SPIKE, _SPIKE_OF_LOSS, _VANISH = 2.0, 0.25, 1e-3
# Clean jobs of little models have it up to 2.6 times the median, but within three deviations.
_SPIKE_OF_GRAD_NORM = 1.0
# A module of few features may give a third of what it gave while it learns.
_SPIKE_OF_ACTIVATION = 3.0
# An expert that gets one token of a microbatch shows what that token gives.
_SPIKE_OF_EXPERT = 9.0
# What is left of a gradient that is zero but for rounding is made as large as all others by Adam, or nearly so.
_SPIKE_OF_UPDATE = 6.0
# Clipping makes one gradient smaller because others have grown.
_SPIKE_OF_CLIPPED = 9.0
_SPIKES = {"activation": _SPIKE_OF_ACTIVATION, "update": _SPIKE_OF_UPDATE, "grad_clipped": _SPIKE_OF_CLIPPED}
# There is one norm of all gradients a step, and thousands of tensors to be wrong about.
_OF_THE_WHOLE_JOB = 0.4
# Which tokens a router sends where changes from step to step, and with it what experts and the router itself learn.
_SPIKE_OF_ROUTED = 29.0
_ROUTED = re.compile(r"(?:^|\.)(?:router|(?:local_)?experts)(?:\.|$)")
_MOSTLY_ZERO = 0.99
_REDUCED = ("grad_reduced", "grad_clipped")
_GRADIENTS = ("gradient", "grad_unreduced", *_REDUCED)
# Rows that have a size of their own to spike or vanish; token ids, times and verdicts have not.
_SIZED = ("activation", *_GRADIENTS, "update", "optimizer_state", "parameter", "loss")
_MOVING = ("activation", *_GRADIENTS, "update", "loss")
# They are set by the script and may jump.
_SETTINGS = ("loss_scale", "lr", "learning_rate", "skipped")
_EXPERT = re.compile(r"((?:^|.*\.)(?:local_)?experts)\.(?:(?P<one>\d+)(?=\.|$)|linear_fc\d\.[a-z]+(?P<grouped>\d+)$)")
"""Experts that are modules of their own, and those of TransformerEngine's grouped layers with numbered weights."""


class Hit(NamedTuple):
    """A row that a rule has something to say about: its index among the rows of the step, the figure, the words."""

    row: int
    value: float
    words: str


class Step(NamedTuple):
    """The rows of a step as rules see them."""

    columns: Columns
    series: Numbers
    chosen: Flags
    """Rows that `names` and `kinds` of the rule select, and that have figures."""


class Rule:
    """A rule that needs to know nothing of earlier steps.

    Example::

        hits = make_rule(Alert("limit", 1e4), histories={}).judge(step)
    """

    kinds: tuple[str, ...] = ()
    """Kinds of rows that are looked at where the probe file does not say."""
    spreads = False
    """Whether the fault goes on to other tensors, so that the cool-down is of the rule and not of a series."""

    def __init__(self, alert: Alert) -> None:
        self.alert = alert

    def judge(self, step: Step) -> list[Hit]:
        """The rows that are to be told of, in any order."""
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
        return [
            Hit(int(i), float(largest[i]), f"absolute value {largest[i]:.6g} is above {most:g}")
            for i in np.flatnonzero(step.chosen & (largest > most))
        ]


class Custom(Rule):
    """What the expression of the probe file says."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)
        self._expression = parse_expression(alert.expression)

    def judge(self, step: Step) -> list[Hit]:
        """Every row of which the expression holds."""
        with np.errstate(all="ignore"):
            holds = np.broadcast_to(np.asarray(self._expression.holds(step.columns), bool), step.chosen.shape)
        names = [name for name in self._expression.columns if step.columns[name].dtype != object]
        hits = []
        for i in np.flatnonzero(step.chosen & holds):
            figures = ", ".join(f"{name} {step.columns[name][i]:.6g}" for name in names)
            value = float(step.columns[names[0]][i]) if names else 1.0
            hits.append(Hit(int(i), value, f"{self.alert.expression} ({figures})"))
        return hits


class Spike(Rule):
    """A root mean square far above or below what is usual for the series, by ratio and by robust deviations."""

    kinds = _MOVING

    def __init__(self, alert: Alert, history: Steps) -> None:
        super().__init__(alert)
        self._history = history
        self._known: tuple[Sequence[Row], Floats, Floats] | None = None

    def judge(self, step: Step) -> list[Hit]:
        """Every row whose size is further from the median, on the scale of logarithms, than both bounds."""
        columns = step.columns
        chosen = every = np.flatnonzero(step.chosen & columns.floating & ~np.isin(columns["name"], _SETTINGS))
        logs, (ratios, shares) = columns.sizes, self._bounds(columns.seen.rows)
        low, high = self._history.bounds(step.series[chosen])
        with np.errstate(invalid="ignore"):
            far = np.maximum(np.abs(logs[chosen] - low), np.abs(logs[chosen] - high)) > ratios[chosen]
            chosen = chosen[far & np.isfinite(logs[chosen])]
            usual, logs = self._history.usual(step.series[chosen]), logs[chosen]
            # Of few steps the deviation is itself uncertain, and there are thousands of series to be wrong about.
            deviations = self.alert.deviations * shares[chosen] * (1 + 2 * ENOUGH / np.maximum(usual.steps, 1))
            bound = np.maximum(ratios[chosen], deviations * usual.deviation)
            # Of one microbatch a rank may see little: targets that are all in another rank's part of the vocabulary.
            lower = self._one_sided(columns, chosen) & (logs < usual.median)
            bound = np.where(lower, np.maximum(bound, -np.log(_VANISH)), bound)
            off = np.abs(logs - usual.median)
            odd = np.flatnonzero((usual.steps >= _enough(self._history)) & (off > bound))
        if len(odd):
            noise = self._of_their_kind(step, every, chosen[odd]) * np.minimum(ENOUGH / usual.steps[odd], 1)
            odd = odd[off[odd] > deviations[odd] * noise]
        return [_against_usual(int(chosen[i]), float(logs[i]), usual, int(i)) for i in odd]

    def _of_their_kind(self, step: Step, every: Numbers, rows: Numbers) -> Floats:
        """Usual deviation of the series of each row's kind: of a few steps, one's own may be small by chance."""
        kinds, found = step.columns["kind"], np.zeros(len(rows))
        for kind in set(kinds[rows]) - {"loss"}:
            like = self._history.usual(step.series[every[kinds[every] == kind]])
            found[kinds[rows] == kind] = np.median(like.deviation[like.steps >= _enough(self._history)])
        return found

    def _one_sided(self, columns: Columns, chosen: Numbers) -> Flags:
        """Gradients of single microbatches, where the probe file does not say how far is far."""
        kind, path = columns["kind"][chosen], columns["path"][chosen]
        single = (kind == "gradient") | ((kind == "grad_unreduced") & (path == "microbatch"))
        return np.asarray(single & (self.alert.threshold is None), bool)

    def _bounds(self, rows: Sequence[Row]) -> tuple[Floats, Floats]:
        """How far is far for each row, as a logarithm; by what share of `deviations` it must be off besides."""
        if self._known is None or self._known[0] is not rows:
            asked = self.alert.threshold
            ratios = [asked if asked is not None else _usual_ratio(row) for row in rows]
            shares = [_OF_THE_WHOLE_JOB if row.kind == "loss" and row.name == "grad_norm" else 1.0 for row in rows]
            self._known = (rows, np.log1p(np.array(ratios, np.float64)), np.array(shares, np.float64))
        return self._known[1], self._known[2]


class Vanish(Rule):
    """A root mean square that collapsed, or a tensor that is all of a sudden nothing but zeros."""

    kinds = ("activation", *_GRADIENTS)

    def __init__(self, alert: Alert, history: Steps) -> None:
        super().__init__(alert)
        self._history, self._zeros = history, Steps(history.window)
        self._ratio = float(np.log(_VANISH if alert.threshold is None else alert.threshold))
        self._known: tuple[Sequence[Row], Flags] | None = None

    def judge(self, step: Step) -> list[Hit]:
        """Every row whose size is below the share of the median that the threshold gives, or whose zeros jumped."""
        columns = step.columns
        # An expert may well get no token of a microbatch; that it gets none at all is for `dead_expert` to tell.
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
        told = {hit.row for hit in hits}
        for i in np.flatnonzero(emptied):
            if int(empty[i]) not in told:
                words = f"{share[empty[i]]:.1%} of the elements are zero, usually {zeros.median[i]:.1%}"
                hits.append(Hit(int(empty[i]), float(share[empty[i]]), words))
        return hits

    def _experts(self, rows: Sequence[Row]) -> Flags:
        """Which rows are those of an expert."""
        if self._known is None or self._known[0] is not rows:
            self._known = (rows, np.array([_EXPERT.match(row.name) is not None for row in rows], bool))
        return self._known[1]


class DeadExpert(Rule):
    """An expert that no token reached: its reduced gradients are zero, or, where there are none, its activations."""

    def __init__(self, alert: Alert) -> None:
        super().__init__(alert)
        self._known: tuple[Sequence[Row], dict[str, tuple[list[int], list[int]]]] | None = None

    def judge(self, step: Step) -> list[Hit]:
        """The first row of every expert of which all that is known in this step is zero or empty."""
        experts = self._experts(step.columns.seen.rows)
        if not experts:
            return []
        zero = (step.columns["n_zero"] >= step.columns["numel"]) | (step.columns["numel"] == 0)
        hits = []
        for name, rows in experts.items():
            # What ranks of the same expert have added up knows of all tokens; an activation only of this rank's.
            reduced, others = ([i for i in some if step.chosen[i]] for some in rows)
            evidence = reduced or others
            if evidence and all(zero[i] for i in evidence):
                hits.append(Hit(evidence[0], 0.0, f"no token reached {name} in this step"))
        return hits

    def _experts(self, rows: Sequence[Row]) -> dict[str, tuple[list[int], list[int]]]:
        """Rows of each expert: reduced gradients, and all else that tokens leave traces in."""
        if self._known is None or self._known[0] is not rows:
            found: dict[str, tuple[list[int], list[int]]] = {}
            for i, row in enumerate(rows):
                match = _EXPERT.match(row.name) if row.kind in ("activation", *_GRADIENTS) else None
                if match is not None:
                    name = f"{match[1]}.{match['one'] or match['grouped']}"
                    found.setdefault(name, ([], []))[row.kind not in _REDUCED].append(i)
            self._known = (rows, found)
        return self._known[1]


class Replica(Rule):
    """Told by the checks across ranks and not by rows."""

    def judge(self, step: Step) -> list[Hit]:
        """Nothing: rows of one rank do not say what others hold."""
        return []


def make_rule(alert: Alert, histories: dict[int, Steps]) -> Rule:
    """The rule that an alert of the probe file asks for; rules with the same window share a history of norms.

    Example::

        make_rule(Alert("spike", 0.5), histories := {})
    """
    if alert.rule in ("spike", "vanish"):
        history = histories.setdefault(alert.window, Steps(alert.window))
        return (Spike if alert.rule == "spike" else Vanish)(alert, history)
    simple: dict[str, Callable[[Alert], Rule]] = {
        **{"nonfinite": NonFinite, "limit": Limit, "custom": Custom},
        **{"dead_expert": DeadExpert, "replica": Replica},
    }
    return simple[alert.rule](alert)


def _usual_ratio(row: Row) -> float:
    """By how much a row must be off to be a spike; a loss need not double to be a bad sign."""
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
    words = (
        f"root mean square {size:.4g} is {times:.3g} times the median {median:.4g} of the last {usual.steps[i]} steps"
    )
    return Hit(row, size, words)


def _non_finite(columns: Columns, i: Any) -> str:
    words = (("n_nan", "NaN"), ("n_posinf", "+Inf"), ("n_neginf", "-Inf"))
    return ", ".join(f"{columns[column][i]:.0f} {word}" for column, word in words if columns[column][i] > 0)
