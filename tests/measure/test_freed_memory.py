"""What is remembered of freed tensors does not lie between the living ones: the heap stays as large as without."""

import ctypes

import pytest
import torch

from msprobe_megatron import native
from msprobe_megatron.measure.looks import looks
from msprobe_megatron.measure.measurer import Measurer
from msprobe_megatron.measure.once import SeenTensors
from msprobe_megatron.record.slots import SlotTable
from tests.forked import run_forked

_M_MMAP_THRESHOLD = -3
_TENSORS, _STEP, _SMALL = 30, 1 << 20, 20000
MIB = 1 << 20


class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h hblkhd us f uordblks fordblks keep".split()]


def heap_bytes():
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Figures
    return library.mallinfo2().arena


def remembering(kind):
    table = SlotTable(torch.device("cpu"))
    native.load()
    if kind == "compiled":
        new = looks(Measurer(table), table.take)
        if new is None:
            pytest.skip(f"no compiled look: {native.why_no_look()}")
        look = new()
        return look, look.see
    seen, measure = SeenTensors(), Measurer(table)

    def see(x):
        slot = table.take()
        measure(x, slot)
        seen.remember(x, slot)

    return seen, see


def growth(kind):
    """Bytes that the heap grows by when ever larger tensors are made, seen and freed; each fits where those before lay."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 * MIB)  # all of them from the heap, from the first on
    keep, see = remembering(kind) if kind != "nothing" else (None, lambda x: None)
    # Small holes that the heap has already are filled, as they are after some steps of a job.
    living = [torch.ones(8) for _ in range(_SMALL)]
    see(living[0])
    before = heap_bytes()
    for n in range(1, _TENSORS + 1):
        see(torch.ones(n * _STEP // 4))
    return heap_bytes() - before, keep is not None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("kind", ["compiled", "python"])
def test_freed_tensors_leave_nothing_between_the_living(kind):
    ((without, _),) = run_forked(1, growth, "nothing")
    ((seen, _),) = run_forked(1, growth, kind)
    together = sum(range(_TENSORS + 1)) * _STEP  # 130 MiB: if none could be joined with the next
    assert without < 2 * _TENSORS * _STEP < together / 10
    assert seen - without < 3 * _TENSORS * _STEP
