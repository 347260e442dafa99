"""How fast whole tensors come onto the disk: the kit's writer over a plain one, and where its time goes.

A row of the bench `volume`. What is measured is the path of the task `tensor`: copies into packs by the thread that
trains, packs into files by the writer thread, synced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_SPEED_BYTES, _SPEED_TENSOR = 384 << 20, 4 << 20
_SYNC = "sync of thread "


def speeds(out: Path, turns: int) -> dict[str, Any]:
    """The kit's writer and a plain sequential one on the same disk, taking turns: bytes a second, medians."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = _tensors()
    times: dict[str, list[float]] = {"ours": [], "plain": [], "held up": []}
    with tempfile.TemporaryDirectory(prefix="msprobe_speed_", dir=out) as folder, _kit(Path(folder) / "run") as write:
        for turn in range(turns + 1):
            # Each begins every other turn: who comes second finds the memory that the first has given back.
            plain = _plain(tensors, Path(folder) / "plain.bin") if turn % 2 else 0.0
            ours, held = write(tensors, turn)
            plain = plain or _plain(tensors, Path(folder) / "plain.bin")
            if turn:  # the first one is that of a job: its buffers are used again
                for name, seconds in (("ours", ours), ("plain", plain), ("held up", held)):
                    times[name].append(seconds)
    ours, plain, held = (statistics.median(times[name]) for name in ("ours", "plain", "held up"))
    return {
        "bytes": _SPEED_BYTES,
        "share": plain / ours,
        "ours_bytes_s": _SPEED_BYTES / ours,
        "plain_bytes_s": _SPEED_BYTES / plain,
        "training_thread_s": held,
    }


def why_slow(out: Path) -> str:
    """Where the time goes, by thread and by stage, beside that of the plain writer: one turn of each, in words."""
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = defaultdict(float)
    tensors = _tensors()
    with tempfile.TemporaryDirectory(prefix="msprobe_speed_", dir=out) as folder, _watched_sync(seconds):
        plain = _plain(tensors, Path(folder) / "plain.bin")
    own_sync = seconds.pop(_sync_here())
    with (
        tempfile.TemporaryDirectory(prefix="msprobe_speed_", dir=out) as folder,
        _watched(seconds),
        _kit(Path(folder) / "run") as write,
    ):
        write(tensors, 0)  # fills the buffers
        seconds.clear()
        ours, held = write(tensors, 1)
    sync = sum(part for name, part in seconds.items() if name.startswith(_SYNC) and name != _sync_here())
    rest = seconds["write"] - seconds["fill"] - sync
    training = {"copies": held - seconds["submit"], "waits for room": seconds["submit"]}
    writer = {"writes": seconds["fill"], "syncs": sync, "opens and renames": rest}
    writer["waits for packs"] = ours - seconds["write"]
    shares = [", ".join(f"{word} {part / ours:.0%}" for word, part in of.items()) for of in (training, writer)]
    return (
        f"of {ours:.2f} s the thread that trains {shares[0]}; the writer thread {shares[1]};"
        f" the plain writer takes {plain:.2f} s, its sync {own_sync / plain:.0%} of them"
    )


def _tensors() -> list[Any]:
    import torch

    return [torch.full((_SPEED_TENSOR // 4,), float(n)) for n in range(_SPEED_BYTES // _SPEED_TENSOR)]


@contextlib.contextmanager
def _watched(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of each stage of the kit's way to the disk."""
    from msprobe_megatron.job.record.tensors import TensorPack
    from msprobe_megatron.job.record.writer import Writer

    with (
        mock.patch.object(Writer, "submit", _timed(Writer.submit, seconds, "submit")),
        mock.patch.object(TensorPack, "begin", _timed(TensorPack.begin, seconds, "write")),
        mock.patch.object(Writer, "_finish", _timed(Writer._finish, seconds, "write")),
        mock.patch.object(TensorPack, "fill", _timed(TensorPack.fill, seconds, "fill")),
        _watched_sync(seconds),
    ):
        yield


def _sync_here() -> str:
    """By thread: making a directory syncs too, and is not the writer's work."""
    return f"{_SYNC}{threading.get_ident()}"


@contextlib.contextmanager
def _watched_sync(seconds: dict[str, float]) -> Iterator[None]:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        _timed(original, seconds, _sync_here())(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        yield


def _timed(function: Callable[..., Any], seconds: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - began

    return timed


def _plain(tensors: list[Any], path: Path) -> float:
    began = time.perf_counter()
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    path.unlink()
    return took


@contextlib.contextmanager
def _kit(path: Path) -> Iterator[Callable[[list[Any], int], tuple[float, float]]]:
    """A job's writer: seconds until all is on the disk, and seconds in which the thread that trains could not train."""
    from msprobe_megatron.job import devices
    from msprobe_megatron.job.record.tensors import TensorPacks
    from msprobe_megatron.job.record.writer import Writer
    from msprobe_megatron.run_directory.directory import RunDirectory
    from msprobe_megatron.run_directory.schema import IDENTITY_COLUMNS

    faults: list[BaseException] = []
    directory = RunDirectory.create(path)
    writer = Writer(directory, dict.fromkeys(IDENTITY_COLUMNS, 0), 4 * _SPEED_BYTES, faults.append)
    packs = TensorPacks(devices.select().to_host, writer.submit)

    def write(tensors: list[Any], step: int) -> tuple[float, float]:
        began = time.perf_counter()
        for tensor in tensors:
            packs.add(step, tensor)
        packs.finish()
        held = time.perf_counter() - began
        writer.flush()
        took = time.perf_counter() - began
        if faults:
            raise faults[0]
        shutil.rmtree(path / f"step_{step:06d}")
        return took, held

    try:
        yield write
    finally:
        writer.close()
        directory.close()
