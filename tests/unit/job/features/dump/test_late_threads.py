"""A thread of the host that is still measuring when the step ends: its row belongs to no step any more."""

import json
import threading

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.job.record.slots import SlotTable
from tests.jobs.integrations.rows import faults, rows
from tests.unit.job.features.dump.row_writers import without_row_writer


def armed(folder, section, part):
    """A small net under the kit, and the probe of the part that is looked at."""
    (folder / "probe.yaml").write_text(f"output: {folder}/out\n{section}\n")
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, folder / "probe.yaml")
    return model, optimizer, session, next(one for one in session.features.all if one.name == part)._probe


class Tight(SlotTable):
    """A table of blocks of one slot, whose allocation of more can be made slow."""

    slow = None

    def __init__(self, device, rows_per_block=1, **options):
        super().__init__(device, 1, **options)

    def grow(self, slot):
        return self.more(slot) if self.slow is None else self.slow(slot)

    def more(self, slot):
        return super().grow(slot)


@pytest.mark.parametrize(
    ("section", "part", "compiled"),
    [
        ("dump: {level: L0}", "dump", False),
        ("dump: {level: L0}", "dump", True),
        ("monitor: {every: 1, activations: true}", "monitor", False),
    ],
)
def test_a_measurement_that_ends_after_its_step(tmp_path, monkeypatch, section, part, compiled):
    if compiled:
        # Python runs inside the compiled row where a slot needs more room: here, with every one.
        monkeypatch.setattr("msprobe_megatron.job.features.dump.feature.SlotTable", Tight)
    model, optimizer, session, probe = armed(tmp_path, section, part)
    measured, step_over = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def __call__(self, tensor, *rest):
            done = self.real(tensor, *rest)
            if threading.current_thread() is thread and not step_over.is_set():
                measured.set()
                step_over.wait(30)
            return done

    if compiled:
        if probe._row_writer is None:
            pytest.skip("no compiled look")
        probe._slots.slow = Slow(probe._slots.more)
    else:
        probe._measure = Slow(probe._measure)
        if part == "dump":
            without_row_writer(probe)
    thread = threading.Thread(target=model[0], args=(torch.ones(32, 64),))
    for step in range(2):
        model(torch.full((32, 64), 0.5)).sum().backward()
        if step == 0:
            thread.start()
            assert measured.wait(30)
        optimizer.step()
        step_over.set()
        thread.join(30)
    session.close()
    assert faults(tmp_path / "out") == ([], [])
    ledger = json.loads((tmp_path / "out/ranks/rank_00000.json").read_text())["ledger"]
    assert ledger.get(part, ledger)["late"] == 1
    if part == "dump":  # the second step holds its own rows and no other's
        seen = [row for row in rows(tmp_path / "out", 1) if row["kind"] == "activation" and row["io"] == "input"]
        assert sorted(row["name"] for row in seen) == ["0", "1", "model"]


@pytest.mark.parametrize(
    ("section", "part"), [("dump: {level: L0}", "dump"), ("monitor: {every: 1, activations: true}", "monitor")]
)
@pytest.mark.parametrize("when", ["before the slots are sealed", "after"])
def test_a_measurement_made_while_its_step_is_closed(tmp_path, section, part, when):
    """The step's page is over and its slots are not, or the other way round: the row is no step's."""
    model, optimizer, session, probe = armed(tmp_path, section, part)
    seal, places = probe._slots.seal, []
    see = probe.see
    probe.see = lambda place, *rest: (places.append(place), see(place, *rest))[1]

    def between():
        thread = threading.Thread(target=see, args=(places[0], torch.ones(32, 64), 0, "forward"))
        thread.start()
        thread.join(30)

    def sealing():
        if when != "after":
            between()
        sealed = seal()
        if when == "after":
            between()
        return sealed

    for step in range(3):
        model(torch.full((32, 64), 0.5)).sum().backward()
        assert places or step
        probe._slots.seal = sealing if step == 0 else seal
        optimizer.step()
    session.close()
    assert faults(tmp_path / "out") == ([], [])
    ledger = json.loads((tmp_path / "out/ranks/rank_00000.json").read_text())["ledger"]
    assert ledger.get(part, ledger)["late"] == 1
    if part == "dump":
        counts = [len(rows(tmp_path / "out", step)) for step in range(3)]
        assert counts[0] == counts[1] == counts[2] > 0
