"""Streams and events of a device that finishes everything at once: waiting is free, time is host time."""

from __future__ import annotations

import time
from typing import Any

import torch

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import CPU, constant, substitute


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time: everything before this line has run."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._time - self._time) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Everything has finished."""
        return True


class Stream:
    """Stands for `torch.cuda.Stream`; also the context manager `torch.cuda.stream(s)` returns."""

    device = CPU
    device_index = 0
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Everything has finished."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def install() -> None:
    """Replace streams, events, `synchronize`, `record_stream` and the nvtx marks."""
    only = Stream()
    cuda = (torch.cuda,)
    for name in ("current_stream", "default_stream", "stream"):
        substitute(cuda, name, constant(only))
    for name in ("set_stream", "synchronize"):
        substitute(cuda, name, constant(None))
    for name, new in (("Stream", Stream), ("Event", Event)):
        setattr(torch.cuda, name, new)
    substitute((torch.Tensor,), "record_stream", constant(None))
    for name in ("range_push", "range_pop", "mark"):
        substitute((torch.cuda.nvtx,), name, constant(0))
