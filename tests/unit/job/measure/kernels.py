"""The compiled kernel at every level that this machine can run, and tensors of every kind."""

import math
from functools import partial

import torch

from msprobe_megatron.job.measure import aten, measurer, native, operator
from msprobe_megatron.job.measure.native.build import BuildError, built
from msprobe_megatron.job.measure.native.levels import levels
from msprobe_megatron.job.measure.native.library import open_library

INF, NAN = math.inf, math.nan
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FP8 = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, n)]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
UINTS = [getattr(torch, n) for n in ("uint16", "uint32", "uint64") if hasattr(torch, n)]
DTYPES = [*FLOATS, *FP8, *INTS, *UINTS]


def kernels():
    """Every level that can be built here; none without a compiler."""
    found = []
    for level in levels():
        try:
            found.append(open_library(str(built(level, 60.0)), level.name))
        except BuildError:
            continue
    return found


def values(shape, dtype, seed=0):
    """Numbers that the dtype can hold, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 20
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x)
    if not dtype.is_floating_point:
        x = x.abs().round() if dtype in (torch.uint8, torch.bool, *UINTS) else x.round()
    return x.to(dtype)


def layouts_of(x):
    """The tensor and views of it: turned, cut, spread, with a step, of one element."""
    yield "whole", x
    yield "turned", x.transpose(0, 2)
    yield "holes", x[:, 1:, ::2]
    yield "row", x[1]
    yield "spread", x[:, :1].expand(-1, 5, -1)
    yield "one", x[1, 1, 1]
    yield "empty", x[:0]


def as_on_a_device(monkeypatch):
    """Measure CPU tensors as those of a device without a kernel: by torch alone, with nothing read back."""
    implementation = operator.Implementation("torch: as on a device", False, partial(aten.finish, wide=True))
    monkeypatch.setattr(native, "kernel", lambda: None)
    monkeypatch.setattr(measurer, "prepare", lambda device, *, wide: implementation)
    monkeypatch.setattr(measurer, "measure_into_slot", operator._by_torch)
