"""The fused kernel behind ``msprobe::measure_into_slot`` and ``msprobe::measure_into_slots``. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from msprobe_megatron.job.measure.fused.launch import Stream, Table, real
from msprobe_megatron.job.measure.operator import STATISTICS, numbering_of

_TABLES_KEPT = 64

_streams: dict[tuple[str, int | None, int], Stream] = {}
_tables: dict[Any, Table] = {}


def _current_stream(device: torch.device) -> int:
    """A number for the stream that a launch goes to."""
    if device.type == "cuda":
        return int(torch._C._cuda_getCurrentRawStream(device.index or 0))
    if device.type == "cpu":
        return 0
    stream = torch.get_device_module(device.type).current_stream()
    return int(getattr(stream, f"{device.type}_stream", None) or stream.stream_id)


def _on(device: torch.device) -> Stream:
    key = (device.type, device.index, _current_stream(device))
    return _streams.get(key) or _streams.setdefault(key, Stream(device))


def _guarded(device: torch.device, work: Callable[[], None]) -> None:
    """Run with ``device`` as the current one: that is where Triton launches."""
    module = None if device.type == "cpu" else torch.get_device_module(device.type)
    if module is None or device.index is None or module.current_device() == device.index:
        work()
    else:
        with module.device(device.index):
            work()


def measure_into_slot(x: torch.Tensor, row: torch.Tensor, wide: bool, cells: int, numbering: int) -> None:
    """See `job.measure.operator.measure_into_slot`."""
    data, numbers = real(x, numbering_of(numbering))
    _guarded(x.device, lambda: _on(x.device).measure(data, row, wide=wide, cells=cells, numbering=numbers))


def measure_into_slots(tensors: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], wide: bool) -> None:
    """See `job.measure.operator.measure_into_slots`."""
    device = tensors[0].device
    targets = [row.data_ptr() for row in rows]
    key = (*((x.data_ptr(), x.numel(), x.dtype) for x in tensors), *targets, wide, _current_stream(device))

    def launch() -> None:
        table = _tables.get(key)
        if table is None:
            if len(_tables) >= _TABLES_KEPT:
                _tables.clear()
            table = _tables[key] = Table(tensors, targets, _on(device), wide=wide)
        table()

    _guarded(device, launch)


def tells_the_truth(device: torch.device, *, wide: bool) -> bool:
    """Say whether the kernel measures a small tensor of a device as it should; makes the host wait."""
    with torch.inference_mode(False), torch.no_grad():
        x = torch.arange(-3.0, 5.0, device=device)
        row = torch.zeros(5 + 4 if wide else 3 + 4, dtype=torch.int64, device=device)
        for _ in range(2):  # twice: the counter of finished programs must be back at zero
            measure_into_slot(x, row, wide, STATISTICS, -1)
        floats = row.view(torch.float64 if wide else torch.float32)[:5].tolist()
        counts = row[-4:].tolist()
    return floats == [-3.0, 4.0, 4.0, 44.0, 4.0] and counts == [0, 0, 0, 1]
