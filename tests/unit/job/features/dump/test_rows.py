"""The compiled writer of rows and `DumpProbe` in Python write the same, and number it the same."""

import numpy as np
import pytest
import torch
from torch import nn

from msprobe_megatron.config import DumpConfig
from msprobe_megatron.job.clock import Clock
from msprobe_megatron.job.features.dump.probe import DumpProbe
from msprobe_megatron.job.measure import native
from msprobe_megatron.job.record.slots import VIEW_BYTES, SlotTable
from msprobe_megatron.job.sites.compiled import loader
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import Cut, Dim, Place, ShardSpec
from tests.unit.job.features.dump.row_writers import without_row_writer


def place(name, extra=None):
    spec = ShardSpec.unmergeable("none of its own")
    return Place("activation", name, "output", "", "Linear", 0, -1, lambda shape: spec, lambda axis: 1, None, extra)


def probe(compiled, **limits):
    native.load()
    clock = Clock()
    clock.start_step(3)
    made = DumpProbe(DumpConfig(), clock, SlotTable(torch.device("cpu"), **limits))
    if made._row_writer is None:
        pytest.skip(f"no compiled look: {loader.why_not()}")
    return made if compiled else without_row_writer(made)


def sightings():
    """Places and tensors, some of them again: another shape, dtype, version or class at a place that is known."""
    first, second, third = place("a"), place("b", '{"bytes": 8}'), place("c")
    x = torch.arange(24.0).reshape(4, 6)
    weight = nn.Parameter(torch.full((3, 3), 2.0))
    for at in (first, second, first, third):
        for tensor in (
            x,
            x,
            x.view(6, 4),
            x[:, ::2],
            x.t(),
            x.double(),
            x > 3,
            weight,
            torch.tensor(1.5),
            x.to_sparse(),
        ):
            yield at, tensor
        yield at, torch.view_as_complex(x.view(12, 2))
        yield at, torch.empty(0, 3)
        x.add_(1)
        yield at, x


def test_rows_and_figures_are_those_of_python():
    found = []
    for compiled in (True, False):
        one = probe(compiled)
        places = {}
        for step in range(2):
            for number, (at, tensor) in enumerate(sightings()):
                same = places.setdefault(at.name, at)
                one.see(same, tensor, None if number % 5 == 0 else number % 3, "forward" if step else "backward")
            batch = one.finish(complete=True, sites={})
            cells = [
                (row.seq, row.microbatch, row.phase, row.place.name, tuple(row.layout), row.dtype, row.slot, row.extra)
                for row in batch.rows
            ]
            figures = [part.tobytes() for part in batch.slots.wait()]
            found.append((compiled, cells, figures, one._clock.seq, one.unmeasured, one.late))
    ours, theirs = found[:2], found[2:]
    assert [one[1:] for one in ours] == [one[1:] for one in theirs]
    cells = ours[1][1]
    assert [row[0] for row in cells[:3]] == [len(cells), len(cells) + 1, len(cells) + 2]  # seq is the clock's
    assert {row[7] for row in cells} == {None, '{"bytes": 8}'}


def test_figures_are_right():
    one = probe(compiled=True)
    at, x = place("a"), torch.linspace(-1, 2, 300)[::3]
    for _ in range(2):
        one.see(at, x, 0, "forward")
    one.see(at, x, 0, "forward")
    batch = one.finish(complete=True, sites={})
    values = x.numpy().astype(np.float64)
    figures = batch.slots.wait()[0]
    assert [row.slot for row in batch.rows] == [0, 0, 0] and len(figures) == 1
    expected = [values.min(), values.max(), values.sum(), (values**2).sum(), np.abs(values).max()]
    assert figures[0].tolist() == pytest.approx(expected, rel=1e-13)


def test_no_room_is_no_row_and_counted_once():
    one = probe(compiled=True, rows_per_block=1, limit_bytes=2 * (9 * 8 + VIEW_BYTES))
    at = place("a")
    kept = [torch.full((2,), float(n)) for n in range(5)]
    for x in (*kept, *kept):
        one.see(at, x, 0, "forward")
    dropped = one.ledger()["no_room"]
    batch = one.finish(complete=True, sites={})
    assert len(batch.slots) == 2 and dropped == 6 and len(batch.rows) == 4


def test_many_places_do_not_mix():
    one = probe(compiled=True)
    x, y = torch.ones(2), torch.ones(3)
    places = [place(f"p{n}") for n in range(20_000)]
    for _ in range(2):
        for at in places:
            one.see(at, x if at.name.endswith("7") else y, 0, "forward")
    rows = list(one.finish(complete=True, sites={}).rows)
    assert [row.place for row in rows] == places * 2
    assert all(row.layout.shape == ((2,) if row.place.name.endswith("7") else (3,)) for row in rows)


def test_a_fault_of_the_caller_is_raised():
    one = probe(compiled=True)
    with pytest.raises(TypeError, match="missing 3 required"):
        one.see(place("a"))
    for no_place, no_tensor in ((None, torch.ones(2)), (place("a"), "no tensor")):
        with pytest.raises(AttributeError):
            one.see(no_place, no_tensor, 0, "forward")
    assert len(one.finish(complete=True, sites={}).rows) == 0


def test_keywords_are_taken_as_by_the_method_in_python():
    one = probe(compiled=True)
    one.see(place=place("a"), tensor=torch.ones(2), microbatch=3, phase="forward")
    assert [row.microbatch for row in one.finish(complete=True, sites={}).rows] == [3]


def test_nothing_is_written_on_a_page_that_is_closed():
    one = probe(compiled=True)
    at = place("a")
    one.see(at, torch.ones(2), 0, "forward")
    one._row_writer.new_page()
    one.see(at, torch.ones(3), 0, "forward")  # in Python, on the page that the probe has
    assert [row.layout.shape for row in one._page.rows] == [(2,), (3,)]


def test_places_of_a_deep_model_are_looked_up_in_its_first_step_alone():
    """As many as 192 layers have at level mix, and more: else each row of each step would find its layout anew."""
    looked_up = []

    class Asked(Place):
        def __getattribute__(self, name):
            if name == "layouts":
                looked_up.append(name)
            return super().__getattribute__(name)

    one, x = probe(True), torch.ones(2)
    spec = ShardSpec.unmergeable("none of its own")
    places = [
        Asked("activation", str(n), "output", "", "Linear", 0, -1, lambda shape: spec, lambda axis: 1, None, None)
        for n in range(60_000)
    ]
    for step in range(3):
        looked_up.clear()
        for at in places:
            one.see(at, x, 0, "forward")
        assert len(one.finish(complete=True, sites={}).rows) == len(places)
        assert bool(looked_up) == (step == 0)


@pytest.mark.parametrize(("digest", "sketch"), [(True, 0), (True, 16), (False, 0)])
def test_digests_and_sketches_are_those_of_python(digest, sketch):
    """Under the numbers of the whole tensor, with place and strides as they come; integers always have a digest."""
    found = []
    for compiled in (True, False):
        native.load()
        clock = Clock()
        clock.start_step(0)
        table = SlotTable(torch.device("cpu"), digest=True, sketch=sketch)
        one = DumpProbe(DumpConfig(digest=digest, sketch=sketch), clock, table, Coordinates(tp=1, tp_size=2))
        if one._row_writer is None:
            pytest.skip(f"no compiled look: {loader.why_not()}")
        one = one if compiled else without_row_writer(one)
        whole, cut = place("a", '{"bytes": 8}'), halved()
        for _ in range(2):
            for x in (
                torch.arange(24.0).reshape(4, 6),
                torch.arange(24.0).reshape(6, 4).t(),
                torch.arange(24).view(4, 6),
                torch.arange(24).view(6, 4).t(),
                torch.arange(24).view(4, 6) > 3,
            ):
                for at in (whole, cut, whole):
                    one.see(at, x, 0, "forward")
            one.see(cut, nn.Parameter(torch.ones(4, 6)), 0, "forward")
            batch = one.finish(complete=True, sites={})
            digests, sketches = batch.slots.numbered()
            found.append(
                [
                    (row.place.name, row.layout.shape, row.extra, int(digests[row.slot]), sketches[row.slot].tolist())
                    for row in batch.rows
                ]
            )
    ours, theirs = found[:2], found[2:]
    assert ours == theirs and len(ours[0]) == 16
    assert [row[3] != 0 for row in ours[0]] == [digest] * 6 + [True] * 9 + [digest]
    by_name = {(row[0], row[3]) for row in ours[0]}
    assert len(by_name) == (
        11 if digest else 8
    )  # a shard's digest is not that of a whole tensor; the same elements have the same


def halved():
    """The second half of the columns."""
    spec = ShardSpec((Dim("s"), Dim("h", (Cut("tp"),))))
    return Place(
        "activation", "half", "output", "", "Linear", 0, -1, lambda shape: spec, lambda axis: 2 if axis == "tp" else 1
    )
