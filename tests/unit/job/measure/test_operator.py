"""One operator on every device: what it writes, which implementation serves whom, and what it costs to ask."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure import native, operator
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.measure.stats import Stats
from msprobe_megatron.job.record.slots import SlotTable
from tests.unit.job.measure.kernels import DTYPES, as_on_a_device, layouts_of, values
from tests.unit.job.measure.oracle import assert_stats

CPU = torch.device("cpu")
NUMBERING = ((40, ((0, 1, 60), (1, 2, 300))), (10, ((0, 4, 0),)), (1, ((0, 5, 5),)))


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def kernel(request, monkeypatch):
    if native.load() is None:
        pytest.skip(native.why_not())
    if not request.param:
        monkeypatch.setattr(native, "kernel", lambda: None)


def sealed(table):
    found = table.seal()
    floats, counts = found.wait()
    return floats, counts, found.numbered()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrow_rows_hold_what_wide_rows_hold(kernel, dtype):
    for _, x in layouts_of(values((3, 4, 5), dtype)):
        rows = []
        for wide in (torch.float64, torch.float32):
            table = SlotTable(CPU, float_dtype=wide, sketch=6)
            measurer = Measurer(table, digest=True, sketch=6)
            assert measurer(x, table.take(), NUMBERING if x.shape == (3, 4, 5) else None)
            rows.append(sealed(table))
        (floats, counts, numbers), (narrow, same, also) = rows
        assert np.array_equal(narrow[0], floats[0].astype(np.float32))
        assert np.array_equal(counts, same) and np.array_equal(numbers[0], also[0])
        assert np.allclose(numbers[1], also[1], rtol=1e-6, atol=1e-4)  # of sums whose terms cancel
        assert_stats(Stats(*floats[0].tolist(), *counts[0].tolist()), x)


def test_a_device_without_a_kernel_writes_the_same_rows(monkeypatch):
    x = values((40, 30), torch.bfloat16)
    x[3, 4] = torch.nan
    rows = []
    for on_device in (False, True):
        with monkeypatch.context() as patch:
            if on_device:
                as_on_a_device(patch)
            table = SlotTable(CPU, digest=True, sketch=4)
            measurer = Measurer(table, digest=True, sketch=4)
            empty, filled, _ = (table.take() for _ in range(3))
            assert measurer(x[:0], empty) and measurer(x, filled)
            rows.append(sealed(table))
    (floats, counts, numbers), (found, also, numbered) = rows
    assert np.allclose(floats, found, rtol=1e-6, equal_nan=True) and np.array_equal(counts, also)
    assert np.isnan(found[2]).all() and (also[2] == -1).all()
    assert np.array_equal(numbers[0][:2], numbered[0][:2]) and np.allclose(numbers[1], numbered[1], atol=1e-4)


def test_numberings_have_numbers():
    assert operator.number_of(None) == -1 and operator.numbering_of(-1) is None
    number = operator.number_of(NUMBERING)
    copy = tuple((step, tuple(tuple(cut) for cut in cuts)) for step, cuts in NUMBERING)
    assert copy is not NUMBERING and operator.number_of(copy) == number >= 0
    assert operator.numbering_of(number) == NUMBERING


def test_many_on_the_host(kernel):
    tensors = [values((n,), torch.float32, n) for n in (1, 300, 7)]
    rows = [torch.zeros(7, dtype=torch.int64) for _ in tensors]
    operator.measure_into_slots(tensors, rows, False)
    for x, row in zip(tensors, rows, strict=True):
        assert_stats(Stats(*row.view(torch.float32)[:5].tolist(), *row[3:].tolist()), x)


def test_a_host_tensor_of_a_device_table_is_not_copied_there(kernel):
    table = SlotTable(CPU, float_dtype=torch.float32, digest=True, sketch=3)
    table.device = torch.device("meta")  # as far as the measurer knows
    measurer = Measurer.__new__(Measurer)
    measurer._slots, measurer.compiled, measurer._on_device = table, None, True
    measurer.wide, measurer.cells = False, 3
    x = values((5, 6), torch.float32)
    other, mine, late = table.take(), table.take(), table.take()
    assert measurer(x, mine) and measurer(x, late)
    table.invalidate(late)
    assert torch.isnan(table.floats(mine)).all(), "written to the device"
    floats, counts, numbers = sealed(table)
    assert_stats(Stats(*floats[mine].tolist(), *counts[mine].tolist()), x)
    for blank in (other, late):
        assert np.isnan(floats[blank]).all() and (counts[blank] == -1).all()
    assert numbers[0][mine] and not numbers[0][other]
    again = table.take()
    assert again == other and np.isnan(sealed(table)[0]).all()


def answers(code, **environment):
    """What a process says that registers for a device of its own; the attempt is made once a process."""
    start = (
        "import json, sys, torch\n"
        "from msprobe_megatron.job.measure import operator\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "device, has = torch.device('npu'), torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "registered = lambda name: has(f'msprobe::{name}', 'PrivateUse1')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_what_a_backend_registers_stays():
    code = (
        "library = torch.library.Library('msprobe', 'FRAGMENT')\n"
        "library.impl('measure_into_slot', lambda *args: None, 'PrivateUse1')\n"
        "found = operator.prepare(device, wide=False)\n"
        "print(json.dumps([found.name, found.together, found.finish is None, 'triton' in sys.modules]))"
    )
    assert answers(code) == ["registered", False, True, False]


def test_without_triton_torch_measures():
    code = (
        "found = operator.prepare(device, wide=False)\n"
        "print(json.dumps([found.name, found.together, found.finish is None, registered('measure_into_slot'),"
        " registered('measure_into_slots'), 'triton' in sys.modules]))"
    )
    found = answers(code, MSPROBE_TRITON="0")
    assert found == ["torch: MSPROBE_TRITON=0", False, False, True, False, False]


def test_triton_is_not_imported_before_it_is_needed():
    code = (
        "import sys, torch, msprobe_megatron\n"
        "before = 'triton' in sys.modules\n"
        "from msprobe_megatron.job.measure import measurer, many\n"
        "from msprobe_megatron.job.record.slots import SlotTable\n"
        "measurer.Measurer(SlotTable(torch.device('cpu')))\n"
        "print(before, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
