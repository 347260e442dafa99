"""Selections of steps (microbatches, layers) and of ranks.

A selection keeps ranges, never the numbers themselves, so that ``0-1000000000/1000`` costs nothing. The session asks it
once per recorded step for the next one; on the steps in between, the check is one integer comparison.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from msprobe_megatron.config.document import ConfigError, Context, Node
from msprobe_megatron.config.keys import Schema, ValueType, any_schema, list_schema

AXES = ("tp", "pp", "dp", "cp", "ep", "etp", "edp")
AFTER_START = "after_start"
ACCEPTED_NUMBERS = 'numbers from 0 up, ranges "a-b" or "a-b/stride", a list of these, or all'
_ACCEPTED_STEPS = (
    f'numbers from 0 up, ranges "a-b" or "a-b/stride", a list of these, all, none, or {{{AFTER_START}: [0, 4]}}'
)
ACCEPTED_RANKS = f"all, a list of ranks and ranges such as [0, 8-15], or a mapping over {', '.join(AXES)}"
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([0-9]{1,18}))?)?")
_LARGEST = 10**18 - 1


@dataclass(frozen=True, order=True)
class Span:
    """``first``, ``first + stride``, … up to and including ``last``; None is no end, and only allowed from 0."""

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


@dataclass
class _Start:
    """The step that a selection counts from, once the job has begun."""

    step: int = 0
    known: bool = False


@dataclass(frozen=True)
class StepSelection:
    """A set of numbers from 0 up: steps, and by the same grammar microbatches and layers.

    With ``after_start`` the spans count from the first step of the job, which `begin_at` tells; before that they count
    from 0.
    """

    spans: tuple[Span, ...] = (Span(0, None),)
    after_start: bool = False
    _start: _Start = field(default_factory=_Start, compare=False, repr=False)

    def __contains__(self, n: int) -> bool:
        return self.next_from(n) == n

    def next_from(self, n: int) -> int | None:
        """Return the smallest selected number that is not below ``n``, or None when there are no more."""
        start = self._start.step
        found = min(
            (next for span in self.spans if (next := span.next_from(max(n - start, 0))) is not None), default=None
        )
        return None if found is None else found + start

    def begin_at(self, step: int) -> None:
        """Count from this step, the first of the job, if that is asked for. Only the first call counts."""
        if self.after_start and not self._start.known:
            self._start.step, self._start.known = step, True

    def anew(self) -> "StepSelection":
        """The same selection for another job, which has not begun yet."""
        return replace(self, _start=_Start())

    def count(self, first: int, final: int | None) -> int | None:
        """How many numbers from ``first`` on to ``final`` are selected; None if there is no end.

        Numbers that stand in two ranges of different strides count twice.
        """
        total, start = 0, self._start.step
        for span in self.spans:
            begin = span.next_from(max(first - start, 0))
            ends = [span.last, None if final is None else final - start]
            end = min((n for n in ends if n is not None), default=None)
            if end is None:
                return None
            if begin is not None and begin <= end:
                total += (end - begin) // span.stride + 1
        return total

    def before(self, n: int) -> "StepSelection":
        """What is selected below ``n``, in absolute numbers."""
        start, spans = self._start.step, []
        for span in self.spans:
            last = n - start - 1 if span.last is None else min(span.last, n - start - 1)
            if last >= span.first:
                last -= (last - span.first) % span.stride
                spans.append(Span(span.first + start, last + start, 1 if last == span.first else span.stride))
        return StepSelection(tuple(spans))

    @property
    def is_finite(self) -> bool:
        """Whether there is a largest selected number."""
        return self.last is not None

    @property
    def last(self) -> int | None:
        """The largest selected number; None when there is no end."""
        lasts = [span.last for span in self.spans]
        if None in lasts:
            return None
        return max((last + self._start.step for last in lasts if last is not None), default=-1)

    def describe(self) -> str:
        """Return the selection in the grammar of the probe file: ``10, 20-22``."""
        text = ", ".join(span.describe() for span in self.spans) or "none"
        return f"{{{AFTER_START}: {_as_value(text)}}}" if self.after_start else text


@dataclass(frozen=True)
class RankSelection:
    """The ranks that record: all, some by global rank, or some by their parallel coordinates."""

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
    """Read a selection of numbers: one, a range, ``all``, a list of these, or text with commas."""
    if node.value == "all" and isinstance(node.value, str):
        return StepSelection()
    if isinstance(node.value, str):
        # The file accepts the comma-separated form of --msprobe-steps as well.
        items = [Node(part.strip(), node.path, node.context) for part in node.value.split(",")]
    elif isinstance(node.value, list | tuple):
        items = node.items()
    else:
        items = [node]
    if not items:
        raise node.error("selects nothing", accepted)
    return StepSelection(_merge([_span(item, accepted) for item in items]))


def parse_steps_or_none(node: Node) -> StepSelection:
    """Read ``steps``, which may be ``none``: nothing is recorded until `msprobe-megatron ctl` requests it."""
    if isinstance(node.value, str) and node.value == "none":
        return StepSelection(())
    if isinstance(node.value, Mapping):
        entries = node.entries((AFTER_START,))
        if AFTER_START not in entries:
            raise node.error("selects nothing", _ACCEPTED_STEPS)
        return replace(parse_selection(entries[AFTER_START]), after_start=True)
    return parse_selection(node, _ACCEPTED_STEPS)


def parse_steps(text: str, key: str = "--msprobe-steps", source: str = "command line") -> StepSelection:
    """Read a selection given on a command line."""
    return parse_selection(Node(text, key, Context(source)))


def parse_ranks(node: Node) -> RankSelection:
    """Read the ``ranks`` key: ``all``, ranks and ranges, or a mapping from axis to coordinates."""
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
    """Sort, and join adjacent ranges of stride 1: a long list of single steps becomes a few ranges."""
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


def _numbers_schema(*words: str) -> Schema:
    item = any_schema([{"type": "integer", "minimum": 0}, {"type": "string", "pattern": f"^{_RANGE.pattern}$"}])
    return any_schema(
        [
            {"enum": ["all", *words]},
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^ *[0-9]"},
            list_schema(item, 1),
        ]
    )


NUMBERS = ValueType(parse_selection, _numbers_schema(), StepSelection.describe)
STEPS = ValueType(
    parse_steps_or_none,
    any_schema(
        [
            _numbers_schema("none"),
            {
                "type": "object",
                "properties": {AFTER_START: _numbers_schema()},
                "additionalProperties": False,
                "required": [AFTER_START],
            },
        ]
    ),
    StepSelection.describe,
)
RANKS = ValueType(
    parse_ranks,
    any_schema(
        [
            _numbers_schema(),
            {
                "type": "object",
                "properties": dict.fromkeys(AXES, _numbers_schema()),
                "additionalProperties": False,
                "minProperties": 1,
            },
        ]
    ),
    RankSelection.describe,
)
