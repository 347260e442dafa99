"""Slots: filled on the device, sealed in one copy a block, used again, never beyond the limit."""

import math
import threading

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure.stats import measure_into
from msprobe_megatron.job.record.slots import VIEW_BYTES, SlotTable

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32]


def fill(table: SlotTable, slot: int, value: int) -> None:
    table.floats(slot).copy_(torch.arange(5) + value)
    table.counts(slot).copy_(torch.arange(4) + 100 * value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [0, 1, 3, 4, 5, 11])
def test_what_is_written_is_what_arrives(dtype: torch.dtype, slots: int) -> None:
    table = SlotTable(CPU, 4, float_dtype=dtype)
    for k in range(slots):
        slot = table.take()
        assert slot == k
        assert (table.floats(slot).dtype, table.counts(slot).dtype) == (dtype, torch.int64)
        fill(table, slot, k)
    sealed = table.seal()
    floats, counts = sealed.wait()
    assert len(sealed) == slots
    assert (floats.dtype, counts.dtype) == (np.dtype(np.float64), np.dtype(np.int64))
    assert np.array_equal(floats, np.arange(5.0) + np.arange(slots)[:, None])
    assert np.array_equal(counts, np.arange(4) + 100 * np.arange(slots)[:, None])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sealed_figures_survive_the_next_steps(dtype: torch.dtype) -> None:
    table = SlotTable(CPU, 3, float_dtype=dtype)
    sealed = []
    for step in range(4):
        for _ in range(7 - step):
            fill(table, table.take(), step)
        sealed.append(table.seal())
    for step, figures in enumerate(sealed):
        floats, counts = figures.wait()
        assert floats.shape == (7 - step, 5) and counts.shape == (7 - step, 4)
        assert (floats[:, 0] == step).all() and (counts[:, 0] == 100 * step).all()


def test_blocks_are_used_again() -> None:
    table = SlotTable(CPU, 4)
    for _ in range(9):
        table.take()
    memory, first = table.nbytes, table.floats(0).data_ptr()
    table.seal()
    for _ in range(9):
        table.take()
    assert table.nbytes == memory and table.floats(0).data_ptr() == first


def test_an_unfilled_slot_does_not_show_an_earlier_step() -> None:
    table = SlotTable(CPU, 4)
    fill(table, table.take(), 1)
    table.seal()
    table.take()
    floats, counts = table.seal().wait()
    assert np.isnan(floats).all() and (counts == -1).all()


def test_one_copy_a_block_and_only_of_what_is_used() -> None:
    copied: list[tuple[int, ...]] = []

    class Copy:
        def __init__(self, tensor: torch.Tensor) -> None:
            copied.append(tuple(tensor.shape))
            self.tensor, self.waited = tensor.clone(), False

        def wait(self) -> torch.Tensor:
            return self.tensor

    table = SlotTable(CPU, 4, to_host=Copy)
    for _ in range(10):
        table.take()
    table.seal()
    assert [shape[0] for shape in copied] == [4, 4, 2]
    copied.clear()
    table.take()
    table.seal()
    table.seal()
    assert [shape[0] for shape in copied] == [1]


def test_growth_stops_at_the_limit_and_drops_are_counted() -> None:
    slot_bytes = 9 * 8 + VIEW_BYTES
    table = SlotTable(CPU, 4, limit_bytes=10 * slot_bytes)
    taken = [table.take() for _ in range(12)]
    assert taken == [0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1]
    assert table.dropped == 4
    assert table.nbytes <= 10 * slot_bytes
    assert len(table.seal()) == 8
    assert [table.take() for _ in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert table.dropped == 5


def test_a_small_limit_makes_small_blocks() -> None:
    table = SlotTable(CPU, 1024, limit_bytes=3 * (9 * 8 + VIEW_BYTES) + 5)
    assert [table.take() for _ in range(5)] == [0, 1, 2, -1, -1]


@pytest.mark.parametrize("rows, limit", [(0, 1 << 20), (16, 10)])
def test_a_table_without_room_is_refused(rows: int, limit: int) -> None:
    with pytest.raises(ValueError, match="no room for a slot; accepted"):
        SlotTable(CPU, rows, limit_bytes=limit)
    with pytest.raises(ValueError, match="float16"):
        SlotTable(CPU, float_dtype=torch.float16)


def test_threads_get_slots_of_their_own() -> None:
    table = SlotTable(CPU, 16)
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for _ in range(2000):
            mine.append(table.take())

    threads = [threading.Thread(target=work, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sum(taken, [])) == list(range(8000))
    assert len(table.seal()) == 8000


def test_table_made_in_inference_mode_is_writable_outside() -> None:
    table = SlotTable(CPU, 4)
    with torch.inference_mode():
        slot = table.take()
        fill(table, slot, 1)
    fill(table, slot, 2)
    with torch.inference_mode():
        floats, _ = table.seal().wait()
    assert floats[0, 0] == 2
    fill(table, table.take(), 3)
    assert table.seal().wait()[0][0, 0] == 3


def test_figures_of_a_tensor_go_through_the_table() -> None:
    table = SlotTable(CPU)
    x = torch.tensor([1.0, -4.0, 0.0, math.nan], requires_grad=True)
    slot = table.take()
    assert measure_into(x, table.floats(slot), table.counts(slot))
    floats, counts = table.seal().wait()
    assert floats.tolist() == [[-4.0, 1.0, -3.0, 17.0, 4.0]]
    assert counts.tolist() == [[1, 0, 0, 1]]
