"""Which tensors are alive when a step needs the most memory, by who made them: the profile of missed memory targets.

Follows storages through a dispatch mode, with and without the kit: what the kit allocates is seen, and also what it
only keeps alive. Tensors are those of torch; what Python and the writer's libraries hold is told by `profile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from msprobe_megatron.lab.bench.profiles.callers import caller

_LINES = 8


class Held(NamedTuple):
    """How many tensors of one maker, and their bytes."""

    number: int
    bytes: int


Peak = Mapping[str, Held]


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes by maker what is alive at the highest moment since `begin`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The weak reference keeps the address from being given to another storage, not its memory.
        self._alive: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._at_most = self._peak = 0
        self.at_peak: dict[str, Held] = {}

    def begin(self) -> None:
        """What is alive now is the first to count."""
        self._peak, self.at_peak = -1, {}
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the work, note what is new."""
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                self._note(x, func)
        return made

    def _note(self, x: torch.Tensor, func: Any) -> None:
        storage = x.untyped_storage()
        if storage._cdata in self._alive or not storage.nbytes():
            return
        maker, _ = caller(func.overloadpacket.__name__)
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), maker)  # type: ignore[no-untyped-call]
        self._at_most += storage.nbytes()
        if self._at_most > self._peak:
            self._look()

    def _look(self) -> None:
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        self._at_most = sum(size for _, size, _ in self._alive.values())
        if self._at_most <= self._peak:
            return
        self._peak, self.at_peak = self._at_most, {}
        for _, size, maker in self._alive.values():
            count, so_far = self.at_peak.get(maker, (0, 0))
            self.at_peak[maker] = Held(count + 1, so_far + size)


def beyond(kit: Peak, plain: Peak) -> list[tuple[str, Held]]:
    """What is alive at the peak with the kit and not at that of plain training, by maker, largest first.

    Example::

        >>> beyond({"a": Held(3, 30)}, {"a": Held(2, 20), "b": Held(1, 5)})
        [('a', Held(number=1, bytes=10))]
    """
    more = {}
    for maker, held in kit.items():
        before = plain.get(maker, Held(0, 0))
        more[maker] = Held(held.number - before.number, held.bytes - before.bytes)
    return sorted(((maker, held) for maker, held in more.items() if held.bytes > 0), key=lambda item: -item[1].bytes)


def tensors_text(kit: Peak, plain: Peak, measured: int | None = None) -> str:
    """Both peaks and what makes the difference, in words; ``measured`` is what the process was seen to need more."""
    both = [sum(held.bytes for held in peak.values()) for peak in (kit, plain)]
    more = beyond(kit, plain)
    listed = [f"`{maker}` {_mebibytes(held.bytes)} in {held.number}" for maker, held in more[:_LINES]]
    if len(more) > _LINES:
        listed.append(f"{len(more) - _LINES} others {_mebibytes(sum(held.bytes for _, held in more[_LINES:]))}")
    text = f"tensors alive at the peak are {_mebibytes(both[0])}, of plain training {_mebibytes(both[1])}"
    text += f"; beyond those of plain training {', '.join(listed)}" if listed else ""
    rest = (measured or 0) - (both[0] - both[1])
    if measured and rest > 0:
        text += (
            f"; the other {_mebibytes(rest)} of the {_mebibytes(measured)} measured are no tensor that is alive: freed"
            " memory that the heap keeps, copies in the writer's queue, other libraries"
        )
    return text


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
