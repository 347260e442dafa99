"""md5 and crc32 of tensors, computed by the writer: training starts a copy of the bytes and goes on.

Copies are handed over in packs, so that the writer's queue bounds the memory that they take. The queue keeps the order:
all hashes of a step are there when its rows are written. A pack that the queue drops leaves its rows without a hash.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from msprobe_megatron.job.record.tensors import PACK_BYTES
from msprobe_megatron.job.record.writer import Batch, WriterCounts

if TYPE_CHECKING:
    from msprobe_megatron.job.devices.base import HostCopy
    from msprobe_megatron.run_directory.directory import RunDirectory

Hashes = dict[int, str]
"""By slot, the JSON object with the hash of its tensor."""


class HashPack(Batch):
    """Bytes on their way to the host; to the writer a batch without a file."""

    def __init__(self, kind: str, hash_of: Callable[[torch.Tensor], str]) -> None:
        self._kind, self._hash = kind, hash_of
        self._copies: list[tuple[Hashes, int, HostCopy]] = []
        self.held_bytes = 0

    @property
    def nbytes(self) -> int:
        """Memory that it holds while it is queued."""
        return self.held_bytes

    def add(self, hashes: Hashes, slot: int, copy: HostCopy, size: int) -> None:
        """Hash this copy into the slot's place."""
        self._copies.append((hashes, slot, copy))
        self.held_bytes += size

    def write(self, directory: RunDirectory, identity: Mapping[str, int]) -> int:
        """Compute the hashes; waits for copies that have not arrived yet."""
        copies, self._copies = self._copies, []
        for hashes, slot, copy in copies:
            hashes[slot] = json.dumps({self._kind: self._hash(copy.wait())})
        return 0

    def drop(self, counts: WriterCounts) -> None:
        """Add the lost tensors."""
        counts.tensors_dropped += len(self._copies)


class HashPacks:
    """The packs of a running step; full ones go to ``submit``. Tensors may come from several threads of the host.

    ``kind`` names what ``hash_of`` computes.
    """

    def __init__(
        self,
        kind: str,
        hash_of: Callable[[torch.Tensor], str],
        to_host: Callable[[torch.Tensor], HostCopy],
        submit: Callable[[HashPack], object],
        pack_bytes: int = PACK_BYTES,
    ) -> None:
        self._new_pack = partial(HashPack, kind, hash_of)
        self._to_host, self._submit, self._limit = to_host, submit, pack_bytes
        self._pack: HashPack | None = None
        self._filling = threading.RLock()

    def add(self, hashes: Hashes, slot: int, data: torch.Tensor) -> None:
        """Start to copy these bytes; their hash will be in ``hashes`` before the rows of the step are written."""
        with torch.inference_mode(False), torch.no_grad():
            copy = self._to_host(data)
        with self._filling:
            if self._pack is not None and self._pack.held_bytes + data.numel() > self._limit:
                self.finish()
            if self._pack is None:
                self._pack = self._new_pack()
            self._pack.add(hashes, slot, copy, data.numel())

    def finish(self) -> None:
        """Submit what is left."""
        with self._filling:
            pack, self._pack = self._pack, None
        if pack is not None:
            self._submit(pack)
