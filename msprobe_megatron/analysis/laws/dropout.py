"""Laws of dropout: it hits as many elements as configured, and other ones every time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked, at, moment
from msprobe_megatron.analysis.laws.scene import Row, Scene, Step
from msprobe_megatron.analysis.laws.wiring import forward_rows

_RATES = {"attention_dropout": "attention_dropout", "embedding_dropout": "hidden_dropout"}
_CHANCE = -12.0
"""Logarithm (base 10) of how likely equal numbers of zeros may be by chance."""


def dropped_out(scene: Scene) -> list[Breach]:
    """Dropout sets the share of elements to zero that the arguments say, and scales the others up."""
    rates = {module: scene.argument(name) for module, name in _RATES.items()}
    if None in rates.values():
        raise NotChecked("the training arguments")
    found: list[tuple[Row, str]] = []
    looked = 0
    for step in scene.steps:
        rows = forward_rows(step)
        for (rank, microbatch, vpp, name, io, path), row in rows.items():
            rate = rates.get(name.rpartition(".")[2])
            given = rows.get((rank, microbatch, vpp, name, "input", "input"))
            if io != "output" or path or rate is None or given is None or given.numel != row.numel:
                continue
            looked += 1
            rate, full = float(rate), given.numel - given.zeros
            if rate == 0:
                if not scene.same(row, given):
                    found.append((row, f"{name} changes what it is given, though its rate is 0"))
                continue
            share = (row.zeros - given.zeros) / max(full, 1)
            if abs(share - rate) > 6 * math.sqrt(rate * (1 - rate) / max(full, 1)) + 2 / max(full, 1):
                found.append((row, f"{name} sets {share:.4g} of its elements to zero, not {rate:g}"))
            elif row.absmax > given.absmax / (1 - rate) * (1 + 4 * row.epsilon + 1e-5):
                found.append((row, f"{name} scales by more than {1 / (1 - rate):.4g}"))
    if not looked:
        raise NotChecked("dropout as a module of its own: dump: {level: L0}")
    if not found:
        return []
    row, text = found[0]
    return [Breach(f"{text} ({moment(row)}, rank {row.rank}); {len(found)} in all", at(row, tensors=len(found)))]


def drawn_anew(scene: Scene) -> list[Breach]:
    """Microbatches and tensor-parallel ranks draw masks of their own: they do not all drop equally many elements."""
    found: list[tuple[Row, Row]] = []
    groups = [*_pairs(scene, _of_a_rank).values(), *_pairs(scene, _of_a_group).values()]
    for some in groups:
        chance = sum(math.log10(_equal(row)) for _, row in some)
        if chance < _CHANCE and all(first.zeros == row.zeros for first, row in some):
            found.append(some[0])
    looked = len(groups)
    if not looked:
        raise NotChecked("dropout as a module of its own, in two microbatches: dump: {level: L0}")
    if not found:
        return []
    first, row = found[0]
    if first.rank != row.rank:
        text = f"tensor-parallel ranks {first.rank} and {row.rank} draw the same dropout masks"
    else:
        text = f"every microbatch of rank {row.rank} draws the same dropout masks"
    where = at(row, ranks=sorted({first.rank, row.rank}), tensors=len(found))
    return [Breach(f"{text}: {row.name} sets {row.zeros} elements to zero each time ({moment(row)})", where)]


_Where = tuple[object, ...]


def _of_a_rank(scene: Scene, row: Row) -> tuple[_Where, _Where] | None:
    """All masks that a rank draws for one module, in all microbatches."""
    return (row.rank,), (row.rank, row.vpp, row.name)


def _of_a_group(scene: Scene, row: Row) -> tuple[_Where, _Where] | None:
    """The masks of one microbatch on the ranks of a tensor-parallel group, which hold different heads."""
    if not row.name.endswith("attention_dropout"):
        return None
    group = tuple(scene.at(row.rank, axis) for axis in ("pp", "dp", "cp"))
    return group, (*group, row.step, row.microbatch, row.vpp, row.name)


def _pairs(
    scene: Scene, place: Callable[[Scene, Row], tuple[_Where, _Where] | None]
) -> dict[_Where, list[tuple[Row, Row]]]:
    """By group: the first mask of every place, with each of the others."""
    found: dict[_Where, list[tuple[Row, Row]]] = defaultdict(list)
    firsts: dict[_Where, Row] = {}
    for step in scene.steps:
        for row in _masks(scene, step):
            where = place(scene, row)
            if where is not None:
                first = firsts.setdefault(where[1], row)
                if first is not row and first.shape == row.shape:
                    found[where[0]].append((first, row))
    return found


def _masks(scene: Scene, step: Step) -> list[Row]:
    """Outputs of dropout that is on."""
    rates = {module: scene.argument(name) for module, name in _RATES.items()}
    return [
        row
        for (*_, name, io, path), row in forward_rows(step).items()
        if io == "output" and not path and (rates.get(name.rpartition(".")[2]) or 0) > 0
    ]


def _equal(row: Row) -> float:
    """How likely two masks drop equally many elements, at the spread of the smallest usual rate; at most 1."""
    return min(1.0, 0.3 / math.sqrt(max(row.numel, 1) * 0.01))


LAWS = (
    Law(
        "dropout-rate",
        "dropout sets the configured share of elements to zero",
        "another rate, dropout that is on where it should be off, or off where it should be on",
        "dump: {level: L0}, and the training arguments",
        "nothing beyond the dump",
        dropped_out,
        "look at the rate of the module that is named, and whether it is in training mode",
    ),
    Law(
        "dropout-masks",
        "every microbatch, and every tensor-parallel rank where heads differ, draws masks of its own",
        "a random state that is set again for every microbatch, one seed on all tensor-parallel ranks",
        "dump: {level: L0}, and the training arguments",
        "nothing beyond the dump",
        drawn_anew,
        "look at who sets the state of the random generators, and at the seed of the tensor-parallel region",
    ),
)
