"""What a step costs over the steps without the kit beside it: the machine of one minute is not that of the next.

A machine that others use, too, changes its pace by ten percent within half a minute, which is more than what is to be
measured. Steps that follow each other have nearly the same machine: each is compared with the few steps without the
kit that are nearest to it, and the median of these comparisons is the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

_NEAREST = 4
_OF_MEDIAN = 0.93
"""Of values that spread as the normal distribution does: error of the median over quartiles' distance / √number."""


class Step(NamedTuple):
    """A measured step, or several as one: the variant, CPU seconds of the process and of the thread that trains."""

    name: str
    took: float
    trained: float


class Cost(NamedTuple):
    """Medians: of the ratio of both times, and of the seconds that are added to the thread that trains.

    `uncertainty` is the standard error of `ratio`: another run may well differ by twice as much.
    """

    ratio: float
    training_ratio: float
    added_s: float
    uncertainty: float


def cost(steps: Sequence[Step], name: str, plain: str) -> Cost:
    """What variant `name` costs over `plain`; `steps` are in the order in which they were made.

    Example::

        >>> cost([Step("plain", 1.0, 1.0), Step("L0", 1.5, 1.25)], "L0", "plain")
        Cost(ratio=1.5, training_ratio=1.25, added_s=0.25, uncertainty=0.0)
    """
    middle = statistics.median
    base = [at for at, step in enumerate(steps) if step.name == plain]
    ratios, training, added = [], [], []
    for at, step in enumerate(steps):
        if step.name != name:
            continue
        near = [steps[other] for _, other in sorted((abs(other - at), other) for other in base)[:_NEAREST]]
        took, trained = middle(one.took for one in near), middle(one.trained for one in near)
        ratios.append(step.took / took)
        training.append(step.trained / trained)
        added.append(step.trained - trained)
    return Cost(
        middle(ratios), middle(training), middle(added), _OF_MEDIAN * _between_quartiles(ratios) / len(ratios) ** 0.5
    )


def spread(times: Sequence[float]) -> float:
    """Distance between the quartiles over the median; 0 for a single value."""
    return _between_quartiles(times) / statistics.median(times)


def _between_quartiles(values: Sequence[float]) -> float:
    if len(values) < 2:  # noqa: PLR2004
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
