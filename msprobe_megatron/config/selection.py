"""Which steps (microbatches, layers) and which ranks the probe looks at.

A selection keeps ranges, never the numbers themselves, so that ``0-1000000000/1000`` costs nothing; the
session asks it once a step for the next step to wake up at, and everything in between is one integer
comparison.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.node import Context, Node

AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")
ACCEPTED_NUMBERS = 'numbers from 0 up, ranges "a-b" or "a-b/stride", a list of these, or all'
ACCEPTED_RANKS = f"all, a list of ranks and ranges such as [0, 8-15], or a mapping over {', '.join(AXES)}"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([0-9]{1,18}))?)?")
_LARGEST = 10**18 - 1


@dataclass(frozen=True, order=True)
class Span:
    """``first``, ``first + stride``, … up to ``last``, which is one of them; None is no end, only from 0."""

    first: int
    last: int | None
    stride: int = 1

    def next_from(self, n: int) -> int | None:
        """Return the smallest number of the span that is not below ``n``."""
        found = self.first if n <= self.first else n + (self.first - n) % self.stride
        return found if self.last is None or found <= self.last else None

    def describe(self) -> str:
        """Return the span as it is written in a probe file."""
        if self.last is None:
            return "all"
        if self.last == self.first:
            return str(self.first)
        return f"{self.first}-{self.last}" + (f"/{self.stride}" if self.stride > 1 else "")


@dataclass(frozen=True)
class StepSelection:
    """A set of numbers from 0 up: steps, and by the same grammar microbatches and layers.

    Example::

        steps = parse_steps("10,20-22,100-1000/100")
        21 in steps            # True
        steps.next_from(23)    # 100
        steps.next_from(1001)  # None
    """

    spans: tuple[Span, ...] = (Span(0, None),)

    def __contains__(self, n: int) -> bool:
        return self.next_from(n) == n

    def next_from(self, n: int) -> int | None:
        """Return the smallest selected number that is not below ``n``, or None when there are no more."""
        return min((found for span in self.spans if (found := span.next_from(n)) is not None), default=None)

    @property
    def is_finite(self) -> bool:
        """Whether there is a largest selected number."""
        return self.last is not None

    @property
    def last(self) -> int | None:
        """The largest selected number; None when there is no end."""
        lasts = [span.last for span in self.spans]
        return None if None in lasts else max((last for last in lasts if last is not None), default=-1)

    def describe(self) -> str:
        """Return the selection in the grammar of the probe file: ``10, 20-22``."""
        return ", ".join(span.describe() for span in self.spans) or "none"


@dataclass(frozen=True)
class RankSelection:
    """Which ranks record: all, some by global rank, or some by their coordinates.

    Example::

        config.ranks.check(world_size=4, sizes={"tp": 2, "pp": 2, ...})
        config.ranks.selects(3, {"tp": 1, "pp": 1, ...})
    """

    ranks: StepSelection = field(default_factory=StepSelection)
    axes: tuple[tuple[str, StepSelection], ...] = ()
    context: Context = field(default=Context("ranks"), compare=False, repr=False)

    def selects(self, rank: int, coordinates: Mapping[str, int]) -> bool:
        """Return whether the rank at these coordinates records."""
        for axis, _ in self.axes:
            if axis not in coordinates:
                raise self._no_axis(axis, coordinates)
        return rank in self.ranks and all(coordinates[axis] in chosen for axis, chosen in self.axes)

    def check(self, world_size: int, sizes: Mapping[str, int]) -> None:
        """Raise ``ConfigError`` for a rank or coordinate that a world of these sizes does not have."""
        self._check_reach("ranks", self.ranks, world_size, "world size")
        for axis, chosen in self.axes:
            if axis not in sizes:
                raise self._no_axis(axis, sizes)
            self._check_reach(f"ranks.{axis}", chosen, sizes[axis], f"{axis} size")

    def describe(self) -> str:
        """Return the selection in the grammar of the probe file: ``0, 8-15`` or ``{tp: 0}``."""
        if not self.axes:
            return self.ranks.describe()
        axes = (f"{axis}: {_as_value(chosen.describe())}" for axis, chosen in self.axes)
        return "{" + ", ".join(axes) + "}"

    def _check_reach(self, path: str, chosen: StepSelection, size: int, what: str) -> None:
        last = chosen.last
        if last is not None and last >= size:
            raise self.context.error(path, f"{last} does not exist", f"0..{size - 1} ({what} {size})")

    def _no_axis(self, axis: str, known: Iterable[str]) -> ConfigError:
        return self.context.error(f"ranks.{axis}", "this job has no such axis", ", ".join(known))


def _as_value(text: str) -> str:
    return f"[{text}]" if "," in text else text


def parse_selection(node: Node, accepted: str = ACCEPTED_NUMBERS) -> StepSelection:
    """Read a selection of numbers: one, a range, ``all``, a list of these, or text with commas.

    Example: ``[10, "20-22", "100-1000/100"]``, ``all``, ``7``, ``0,5-7``.
    """
    if node.value == "all" and isinstance(node.value, str):
        return StepSelection()
    if isinstance(node.value, str):
        # What is written after --msprobe-steps may be written in the file as well.
        items = [Node(part.strip(), node.path, node.context) for part in node.value.split(",")]
    elif isinstance(node.value, list | tuple):
        items = node.items()
    else:
        items = [node]
    if not items:
        raise node.error("selects nothing", accepted)
    return StepSelection(_merge([_span(item, accepted) for item in items]))


def parse_steps_or_none(node: Node) -> StepSelection:
    """Read ``steps``, which may be ``none``: the job then waits for an order (`msprobe-megatron ctl`).

    Example: ``none``, ``[10, "20-22"]``.
    """
    if isinstance(node.value, str) and node.value == "none":
        return StepSelection(())
    return parse_selection(node, f"{ACCEPTED_NUMBERS}, or none")


def parse_steps(text: str, key: str = "--msprobe-steps", source: str = "command line") -> StepSelection:
    """Read a selection given on a command line.

    Example: ``parse_steps("0,5-7").describe() == "0, 5-7"``.
    """
    return parse_selection(Node(text, key, Context(source)))


def parse_ranks(node: Node) -> RankSelection:
    """Read the ``ranks`` key: ``all``, ranks and ranges, or a mapping from axis to coordinates.

    Example: ``[0, "8-15"]``, ``{tp: 0, dp: [0, 1]}``.
    """
    if not isinstance(node.value, Mapping):
        return RankSelection(parse_selection(node, ACCEPTED_RANKS), context=node.context)
    axes = node.entries(AXES)
    if not axes:
        raise node.error("selects nothing", ACCEPTED_RANKS)
    return RankSelection(
        axes=tuple((axis, parse_selection(axes[axis])) for axis in AXES if axis in axes), context=node.context
    )


def _span(node: Node, accepted: str) -> Span:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise node.error("is not a number or a range", accepted)
    if isinstance(value, int):
        if not 0 <= value <= _LARGEST:
            raise node.error("is out of range", accepted)
        return Span(value, value)
    match = _RANGE.fullmatch(value)
    if match is None:
        raise node.error("is not a number or a range", accepted)
    first = int(match[1])
    last = int(match[2] or first)
    stride = int(match[3] or 1)
    if last < first:
        raise node.error("is a range that ends before it begins", accepted)
    if stride == 0:
        raise node.error("is a range with stride 0", accepted)
    last -= (last - first) % stride
    return Span(first, last, 1 if last == first else stride)


def _merge(spans: list[Span]) -> tuple[Span, ...]:
    """Sort, and join neighbours of stride 1: a long list of single steps becomes few ranges."""
    merged: list[Span] = []
    for span in sorted(set(spans), key=lambda span: (span.first, span.last or 0, span.stride)):
        before = merged[-1] if merged else Span(0, None)
        if before.last is None or span.last is None or not before.stride == span.stride == 1:
            merged.append(span)
        elif span.first <= before.last + 1:
            merged[-1] = Span(before.first, max(before.last, span.last))
        else:
            merged.append(span)
    return tuple(merged)
