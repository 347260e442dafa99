"""The compiled hot path on a device: the rows of the Python one, a launch for each tensor, and nothing of the job's."""

import pytest

from tests.unit.job.features.dump.row_writers import without_row_writer

CASES = {
    "statistics": {},
    "digest": {"digest": True},
    "sketch": {"digest": True, "sketch": 8},
}


def see_all(options: dict) -> dict:
    """See tensors of all kinds twice, by the compiled writer and by Python; rows, figures and what the device did."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from msprobe_megatron.config import DumpConfig
    from msprobe_megatron.hosts.rehearsal import simulated_device
    from msprobe_megatron.job.clock import Clock
    from msprobe_megatron.job.devices import select
    from msprobe_megatron.job.features.dump.probe import DumpProbe
    from msprobe_megatron.job.measure import native
    from msprobe_megatron.job.record.slots import SlotTable
    from msprobe_megatron.topology.coordinates import Coordinates
    from tests.unit.job.features.dump.test_rows import halved, place

    native.load()

    class Watching(TorchDispatchMode):
        seen: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    found = {}
    base = torch.arange(24.0).npu()
    tensors = [
        base,
        base.view(4, 6),
        base.view(4, 6).t(),
        base.view(4, 6)[:, ::2],
        base.double(),
        base.bfloat16(),
        base.to(torch.float8_e4m3fn),
        base.long(),
        base > 3,
        torch.empty(0, 3, device="npu"),
        base.view(4, 6).clone().requires_grad_(),
        torch.nn.Parameter(base.view(4, 6) * 2),
        torch.complex(base[:12], base[12:]),
        torch.arange(5.0),
        base[:1].expand(7),
    ]
    versions = [x._version for x in tensors]
    for compiled in (True, False):
        clock = Clock()
        clock.start_step(0)
        table = SlotTable.on(select("npu"), 64 << 20, digest=True, sketch=options.get("sketch", 0))
        one = DumpProbe(DumpConfig(**options), clock, table, Coordinates(tp=1, tp_size=2))
        assert one.ledger()["look"] == "compiled"
        one = one if compiled else without_row_writer(one)
        watching = Watching()
        watching.seen = []
        places = [place("a", '{"bytes": 8}'), halved()]
        for at in places:  # room for slots, plans and tables of the kernel
            for x in tensors:
                one.see(at, x, 0, "forward")
        one.finish(complete=True, sites={})
        with simulated_device.Trace() as trace:
            for at in places * 2:
                with watching:
                    for x in tensors:
                        one.see(at, x, 0, "forward")
        batch = one.finish(complete=True, sites={})
        figures, counts = batch.slots.wait()
        digests, cells = batch.slots.numbered()
        rows = [
            [row.place.name, list(row.layout.shape), row.dtype, row.extra, *figures[row.slot].tolist()]
            + [*counts[row.slot].tolist(), int(digests[row.slot]), *cells[row.slot].tolist()]
            for row in batch.rows
        ]
        found["compiled" if compiled else "python"] = {
            "rows": [[repr(cell) for cell in row] for row in rows],
            "launches": trace.counts["launches"],
            "waits": len(trace.waits),
            "slots": len({row.slot for row in batch.rows}),
            "seen by the job": watching.seen if compiled else [],
        }
    found["changed"] = versions != [x._version for x in tensors]
    return found


@pytest.fixture(scope="module")
def found(device):
    """What `see_all` saw, for each of the cases."""
    return {name: device.run(see_all, options)[0] for name, options in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_rows_and_figures_are_those_of_python(found, case):
    compiled, python = found[case]["compiled"], found[case]["python"]
    assert compiled["rows"] == python["rows"]
    assert len(compiled["rows"]) == 60
    assert not found[case]["changed"]


@pytest.mark.parametrize("case", CASES)
def test_a_tensor_is_one_launch_and_no_wait(found, case):
    """Each slot but that of the host's tensor is one launch, whatever is measured."""
    compiled = found[case]["compiled"]
    assert compiled["launches"] == compiled["slots"] - 1
    assert compiled["waits"] == 0


def test_a_mode_of_the_job_does_not_see_what_is_measured(found):
    """But for the host's tensor and the complex one, which Python measures."""
    seen = found["statistics"]["compiled"]["seen by the job"]
    assert seen.count("msprobe.measure_into_slot.default") == 2


def measure_large(planted: int) -> list[list]:
    """Of large tensors: what, elements, bytes per element, launches, added memory beyond the slots, waits."""
    import torch

    from msprobe_megatron.hosts.rehearsal import simulated_device
    from msprobe_megatron.job.devices import select
    from msprobe_megatron.job.measure import native
    from msprobe_megatron.job.measure.measurer import Measurer
    from msprobe_megatron.job.record.slots import SlotTable

    native.load()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"digest": True}, {"digest": True, "sketch": 64}):
            x = torch.ones(1 << 20, dtype=dtype, device="npu")
            table = SlotTable.on(select("npu"), 64 << 20, **options)
            measure = Measurer(table, **options)
            measure(x, table.take())
            torch.npu.reset_peak_memory_stats()
            before = torch.npu.memory_allocated()
            with simulated_device.Trace() as trace:
                if planted:
                    x + 0
                measure(x, table.take())
            memory = torch.npu.max_memory_allocated() - before
            numbers = [trace.counts["bytes"] / x.nbytes, trace.counts["launches"], memory, trace.counts["syncs"]]
            found.append([str(dtype), *numbers])
    return found


@pytest.mark.parametrize("planted", [0, 1])
def test_a_large_tensor_is_read_once_and_nothing_is_made_of_it(device, planted):
    """With a second operation planted, the same ceilings are exceeded."""
    [found] = device.run(measure_large, planted)
    assert len(found) == 6
    for _, read, launches, memory, waits in found:
        within = [read <= 1.125, launches <= 1, memory <= 4 << 20]  # 4.5 bytes for an element of 4
        assert waits == 0
        assert all(within) if not planted else not any(within[:2]), found
