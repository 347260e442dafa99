"""Each tensor is measured once: the output of one module is the input of the next.

Used by a probe before it measures: call ``lookup`` first, and ``remember`` after filling a slot. The cache is for one
step; it holds no tensor and keeps no storage alive.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any

import torch

_SWEEP = 2
_SWEEP_BYTES = 32 << 10

_Key = tuple[Hashable, ...]
_Storage: Any = torch.UntypedStorage


class SeenTensors:
    """Maps a tensor whose memory has not changed to the slot that holds its statistics.

    Same tensor means: same storage, offset, shape, strides, dtype and version counter. A weak reference keeps
    the identity of a storage from being given to another one, though not its memory. Version counters do not
    tell of everything. The owner must call ``invalidate``

    - after a collective that writes in place, and after kernels that write through raw pointers (fused
      gradient accumulation, multi-tensor optimizers);
    - after writing through ``.data``, whose tensors have a counter of their own: Megatron's optimizers copy
      new weights that way, so the optimizer step is always such a moment.
    """

    def __init__(self) -> None:
        # Threads of the host may run the model at once. A weak reference that two of them free is a crash; reading
        # needs no lock.
        self._changing = threading.RLock()
        self._slots: dict[_Key | None, int] = {}
        # With the weak reference, a bare number; first those that were not looked at for the longest time.
        self._storages: OrderedDict[int, tuple[int, list[_Key]]] = OrderedDict()
        self.get = self._slots.get
        """The slot remembered under a key of `key_of`, or None."""

    def __len__(self) -> int:
        return len(self._slots)

    def __del__(self) -> None:
        self._forget_all()  # no other reference is left; in a fork the lock may be held for ever

    def lookup(self, x: torch.Tensor) -> int | None:
        """Return the slot remembered for ``x`` as it is now, or None."""
        return self.get(key_of(x))

    def remember(self, x: torch.Tensor, slot: int) -> None:
        """Keep ``slot`` for ``x`` until its memory changes; not for inference tensors, which have no version."""
        self.put(key_of(x), x, slot)

    def put(self, key: _Key | None, x: torch.Tensor, slot: int) -> None:
        """Keep ``slot`` for ``x`` under the key that `key_of` gave for it just now."""
        if key is None:
            return
        cdata: Any = key[0]
        with self._changing:
            held = self._storages.get(cdata)
            if held is None:
                self._sweep(_SWEEP + x.nbytes // _SWEEP_BYTES)
                held = self._storages[cdata] = (_weak(x.untyped_storage()), [])
            held[1].append(key)
            self._slots[key] = slot

    def invalidate(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Forget whatever shares memory with ``tensors``; None forgets everything."""
        if tensors is None:
            self.forget_all()
            return
        for tensor in tensors:
            if key_of(tensor) is None:
                # Unknown memory may be anyone's.
                self.forget_all()
                return
            with self._changing:
                self._drop(tensor.untyped_storage()._cdata)

    def forget_all(self) -> None:
        """Forget everything: slots of a finished step mean nothing in the next."""
        with self._changing:
            self._forget_all()

    def _forget_all(self) -> None:
        self._slots.clear()
        for weak, _ in self._storages.values():
            _release(weak)
        self._storages.clear()

    def _drop(self, storage: int) -> None:
        held = self._storages.pop(storage, None)
        if held is None:
            return
        _release(held[0])
        for key in held[1]:
            self._slots.pop(key, None)

    def _sweep(self, count: int) -> None:
        """Let go of storages that were freed, looking at so many; more for a large tensor, which takes longer anyway.

        The few bytes that a weak reference leaves of a storage lie between the data of tensors: until they go, the
        allocator cannot join what is free on either side of them.
        """
        storages = self._storages
        for _ in range(min(count, len(storages))):
            storage = next(iter(storages))
            if _expired(storages[storage][0]):
                self._drop(storage)
            else:
                storages.move_to_end(storage)


def key_of(x: torch.Tensor, more: Hashable = None) -> _Key | None:
    """Identity of a tensor's memory and of what is seen in it, or None for what has no memory of its own.

    ``more`` is for a caller whose results depend on more than the tensor (its numbering in a digest).
    """
    try:
        return (
            x.untyped_storage()._cdata,
            x.storage_offset(),
            x.shape,
            x.stride(),
            x.dtype,
            x._version,
            # Lazy conjugates and negatives share everything else with what they are taken of.
            x.is_conj(),
            x.is_neg(),
            more,
        )
    except RuntimeError:  # sparse, nested and wrapped tensors: no storage; inference tensors: no version
        return None


# Bare weak references: an object around each would cost as much as all the rest of `put`.
def _weak(storage: Any) -> int:
    return int(storage._weak_ref())


def _expired(weak: int) -> bool:
    return bool(_Storage._expired(weak))


def _release(weak: int) -> None:
    _Storage._free_weak_ref(weak)
