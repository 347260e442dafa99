"""Packs of tensors: what is in the files is what was seen, though buffers are used again and tensors change."""

import json
import os
import struct
import sys
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from msprobe_megatron.job.record.slots import clone_to_host
from msprobe_megatron.job.record.tensors import HostBuffers, TensorPack, TensorPacks
from msprobe_megatron.job.record.writer import Writer
from msprobe_megatron.run_directory.directory import RunDirectory
from msprobe_megatron.run_directory.schema import IDENTITY_COLUMNS


def read(content):
    (length,) = struct.unpack("<Q", content[:8])
    index = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    return {key: (entry, data[slice(*entry["data_offsets"])]) for key, entry in index.items()}


class File:
    def __init__(self):
        self.content = b""

    def write(self, piece):
        self.content += bytes(piece)


class Directory:
    def __init__(self):
        self.files = {}

    def write_file(self, name, fill):
        file = File()
        fill(file)
        self.files[name] = file.content
        return len(file.content)


@pytest.fixture
def directory():
    return Directory()


ODD = [
    torch.arange(12.0).view(3, 4).t(),
    torch.tensor(7, dtype=torch.int64),
    torch.zeros(0, 3),
    torch.randn(5).bfloat16(),
    torch.tensor([True, False, True]),
    torch.randn(3, dtype=torch.complex64).conj(),
    torch.randn(2, 3).to(torch.float8_e4m3fn),
    torch.randn(4, 4)[::2, 1:],
    torch.nn.Parameter(torch.randn(3)),
    torch.full((300,), 3.5),  # larger than a pack
]


def bytes_of(x):
    return x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def test_every_kind_of_tensor_arrives_as_it_was(directory):
    packs = TensorPacks(clone_to_host, lambda pack: pack.write(directory, {"rank": 0}), pack_bytes=256)
    wanted = {}
    for x in ODD:
        wanted[packs.add(0, x)] = bytes_of(x)
        if x.is_floating_point() and x.dtype != torch.float8_e4m3fn:
            x.detach().mul_(0)  # what comes after the copy is not in it
    packs.finish()
    found = {key: data for content in directory.files.values() for key, (_, data) in read(content).items()}
    assert found == wanted and len(directory.files) == 2


def test_buffers_are_used_again_only_when_their_pack_is_written(directory):
    waiting = []
    packs = TensorPacks(clone_to_host, waiting.append, pack_bytes=1024)
    buffers = packs._buffers
    for round_ in range(3):
        for n in range(8):
            packs.add(round_, torch.full((64,), float(10 * round_ + n)))
        packs.finish()
        taken = [pack._buffer.data_ptr() for pack in waiting]
        assert len(set(taken)) == len(taken) == 2
        for pack in waiting:
            pack.write(directory, {"rank": 0})
            assert pack._buffer is None
        assert len(buffers._free) == 2  # the same two, round after round
        waiting.clear()
    values = {
        (name, key): np.frombuffer(data, np.float32)
        for name, content in directory.files.items()
        for key, (_, data) in read(content).items()
    }
    assert sorted(v[0] for v in values.values()) == [float(10 * r + n) for r in range(3) for n in range(8)]
    assert all((v == v[0]).all() for v in values.values())


def test_a_dropped_pack_gives_its_buffer_back():
    from msprobe_megatron.job.record.writer import WriterCounts

    buffers, counts = HostBuffers(256), WriterCounts()
    pack = TensorPack(0, 0, buffers=buffers)
    pack.add("0:0", torch.ones(4), pack.copied(torch.ones(4)))
    pack.drop(counts)
    assert len(buffers._free) == 1 and counts.tensors_dropped == 1


def test_large_packs_are_begun_early_and_hold_what_they_should(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr("os.posix_fadvise", lambda file, first, length, advice: begun.append((first, length)))
    kept = [torch.full((5 << 20,), n, dtype=torch.uint8) for n in range(5)]
    folder = RunDirectory.create(tmp_path / "run")
    packs = TensorPacks(clone_to_host, lambda pack: pack.write(folder, {"rank": 0}), pack_bytes=64 << 20)
    keys = [packs.add(3, x) for x in kept]
    packs.finish()
    folder.close()
    saved = load_file(tmp_path / "run/step_000003/rank_00000/tensors.safetensors")
    assert all(torch.equal(saved[key], x) for key, x in zip(keys, kept, strict=True))
    # Twice two tensors; the last is left to the sync.
    (first, some), (second, more) = begun
    assert first == 0 and second == some and more == 10 << 20


def test_a_system_without_large_pages_has_small_ones(monkeypatch):
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    buffer = HostBuffers(1 << 12).take()
    assert buffer.shape == (1 << 12,) and buffer.fill_(7).sum() == 7 << 12


class Syncs:
    """What is brought to the disk, in order: names of files, and `folder`; fails at the file of a number."""

    def __init__(self, monkeypatch, fail_at=None):
        self.seen, self._fail_at, self._fsync = [], fail_at, os.fsync
        monkeypatch.setattr("os.fsync", self)

    def __call__(self, descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if ".safetensors" in name:
            self.seen.append(name.split(".")[1])
            if len([one for one in self.seen if one != "folder"]) == self._fail_at:
                raise OSError(28, "No space left on device")
        elif name.startswith("rank_"):
            self.seen.append("folder")
        self._fsync(descriptor)


def written_at_once(tmp_path, count):
    """Packs of one tensor each that all wait when the writer comes to them."""
    faults = []
    directory = RunDirectory.create(tmp_path / "run")
    writer = Writer(directory, dict.fromkeys(IDENTITY_COLUMNS, 0), 1 << 20, faults.append)
    waiting = []
    packs = TensorPacks(clone_to_host, waiting.append, pack_bytes=64)
    keys = [packs.add(0, torch.full((16,), float(n))) for n in range(count)]
    packs.finish()
    with writer._changed:
        for pack in waiting:
            assert writer.submit(pack)
    assert writer.flush(60)
    writer.close()
    directory.close()
    return keys, writer.counts, faults


def test_packs_that_wait_go_to_the_disk_together(tmp_path, monkeypatch):
    syncs = Syncs(monkeypatch)
    keys, counts, faults = written_at_once(tmp_path, 11)
    assert not faults and counts.tensors_written == 11 and counts.tensors_dropped == 0
    folder = tmp_path / "run/step_000000/rank_00000"
    assert syncs.seen.count("folder") == 2 and syncs.seen[8] == syncs.seen[-1] == "folder"
    assert len(syncs.seen) == 13 and len(set(syncs.seen)) == 12
    found = {key: x for file in sorted(folder.glob("*.safetensors")) for key, x in load_file(file).items()}
    assert len(list(folder.iterdir())) == 11, "no temporary file stays"
    assert {key: float(x[0]) for key, x in found.items()} == {key: float(n) for n, key in enumerate(keys)}


def test_a_fault_on_the_way_to_the_disk_leaves_whole_files_or_none(tmp_path, monkeypatch):
    Syncs(monkeypatch, fail_at=10)
    opened = len(os.listdir("/proc/self/fd"))
    keys, counts, faults = written_at_once(tmp_path, 11)
    assert [fault.errno for fault in faults] == [28]
    assert (counts.tensors_written, counts.tensors_dropped) == (8, 3)
    files = sorted((tmp_path / "run/step_000000/rank_00000").iterdir())
    first = [float(load_file(file)[key][0]) for file, key in zip(files, keys, strict=False)]
    assert first == [float(n) for n in range(8)]
    assert len(files) == 8 and len(os.listdir("/proc/self/fd")) == opened


def test_threads_that_add_at_once_have_keys_and_places_of_their_own():
    """Eight threads fill packs while another hands them over: each tensor is found whole under its key."""
    packs_of_step = []
    packs = TensorPacks(clone_to_host, packs_of_step.append, pack_bytes=4096)
    keys, errors = {}, []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def fill(number):
        try:
            for i in range(60):
                x = torch.full((33,), float(number * 1000 + i))
                key = packs.add(0, x)
                assert key not in keys
                keys[key] = x
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    packs.finish()
    assert errors == []
    found = {key: copy.wait().clone() for pack in packs_of_step for key, _, _, copy in pack.copies}
    assert sorted(found) == sorted(keys) and len(keys) == 480
    assert all(torch.equal(found[key], x) for key, x in keys.items())
