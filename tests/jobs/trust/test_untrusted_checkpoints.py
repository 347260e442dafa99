"""Checkpoints from strangers: damaged files, and indices that claim what no file holds; nothing of them is ever run.

A fixed number of inputs in CI; `scripts/fuzz.sh` goes on with new ones for as long as it is told to.
"""

import os
import pickle
import random
import resource
import shutil
import zipfile

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from msprobe_megatron.cli import main
from tests.jobs.trust.damage import CASES, damage, tried
from tests.jobs.trust.jobs import flags
from tests.support.forked import run_forked
from tests.unit.analysis.checkpoints.jobs import train_and_save

pytestmark = pytest.mark.trust
FORMS = ("legacy", "torch_dist")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each form, both of the same small job."""
    root = tmp_path_factory.mktemp("checkpoints")
    for form in FORMS:
        (root / form).mkdir()
        run_forked(1, train_and_save, flags(1), str(root / form), form)
    return root


def answer(argv, capsys):
    code = main(argv)
    printed = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in printed.err and "\x1b" not in printed.out + printed.err
    if code == 2:
        assert printed.err.startswith("msprobe-megatron: ")
    return code, printed


@pytest.mark.parametrize("form", FORMS)
def test_damaged_checkpoints(saved, tmp_path, capsys, form):
    source = random.Random(f"{form} {os.environ.get('MSPROBE_FUZZ_SEED', '0')}")
    codes = []
    for case in range(CASES // 3):
        copy = tmp_path / str(case)
        shutil.copytree(saved / form, copy)
        files = sorted(path for path in copy.rglob("*") if path.is_file())
        inside = [path for path in files if path.suffix == ".pt"]
        if inside and case % 2:
            damage_inside(inside[0], source)
        else:
            damage(source.choice(files), source)
        before = sorted(copy.rglob("*"))
        codes.append(answer(["ckpt-diff", str(saved / form), str(copy), *(["--trust"] * (case % 3 == 0))], capsys)[0])
        assert sorted(copy.rglob("*")) == before
        shutil.rmtree(copy)
    tried(CASES // 3)
    assert 2 in codes, "nothing was ever damaged enough"


def damage_inside(path, source):
    """Damage the pickle in a file of torch.save, whose checksums would otherwise stop every reader at the door."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in held if name.endswith("data.pkl"))
    data = bytearray(held[name])
    for _ in range(source.randint(1, 8)):
        at = source.randrange(len(data))
        change = source.choice(["byte", "cut", "twice"])
        if change == "byte":
            data[at] = source.randrange(256)
        elif change == "cut":
            del data[at : at + source.randint(1, 4)]
        else:
            data[at:at] = data[at : at + source.randint(1, 40)]
    held[name] = bytes(data)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in held.items():
            archive.writestr(name, content)


# Claims: an index that is well made, and wrong.


def index(shape, *, key="decoder.layers.mlp.linear_fc1.weight", path="__0_0.distcp", offset=0, length=1000):
    size = torch.Size(shape)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    entry = dcp.TensorStorageMetadata(dcp.TensorProperties(), size, [chunk])
    where = torch.distributed.checkpoint.filesystem._StorageInfo(path, offset, length)
    place = dcp.MetadataIndex(key, torch.Size([0] * len(shape)))
    return dcp.Metadata({key: entry}, storage_data={place: where})


def laughs(levels=60):
    """A key of 2**60 parts in a few hundred bytes."""
    # Made by hand: Python itself would compute the hash of such a key.
    body = b"\x80\x02}"
    body += b"(X\x01\x00\x00\x00atq\x00"
    for number in range(levels):
        body += b"h%ch%c\x86q%c" % (number, number, number + 1)
    return body + b"K\x01s."


CLAIMS = {
    "layers that nobody has": lambda: pickle.dumps(index((1 << 40, 2))),
    "elements that nobody has": lambda: pickle.dumps(index((2, 1 << 50))),
    "layers of nothing": lambda: pickle.dumps(index((1 << 40, 0))),
    "a part that lies before its file": lambda: pickle.dumps(index((2, 2), offset=-5)),
    "a part of no length": lambda: pickle.dumps(index((2, 2), length=-1)),
    "a file elsewhere": lambda: pickle.dumps(index((2, 2), path="../../etc/passwd")),
    "the directory above": lambda: pickle.dumps(index((2, 2), path="..")),
    "a name with NUL": lambda: pickle.dumps(index((2, 2), path="a\0b")),
    "a name that steers": lambda: pickle.dumps(index((2, 2), path="\x1b]0;owned\x07/x")),
    "a name that is a format": lambda: pickle.dumps(index((2, 2), key="x.layers.{0.__class__}{:>9999999999}.w")),
    "a name that is markup": lambda: pickle.dumps(index((2, 2), key="[/bold][link=x]\x1b[2J")),
    "a name of 4 KiB": lambda: pickle.dumps(index((2, 2), key="layers." * 600)),
    "a key of 2**60 parts": laughs,
    "lists in lists": lambda: b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "a number of a megabyte": lambda: b"\x80\x02\x8b" + (1 << 20).to_bytes(4, "little") + b"\x7f" * (1 << 20) + b".",
    "bytes that are not there": lambda: b"\x80\x04\x8e" + (1 << 61).to_bytes(8, "little") + b"abc.",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_an_index_that_claims_too_much(saved, tmp_path, capsys, name):
    """Our own error or an answer, at once, and no memory for what is only claimed."""
    copy = tmp_path / "copy"
    shutil.copytree(saved / "torch_dist", copy)
    (at,) = copy.rglob(".metadata")
    at.write_bytes(CLAIMS[name]())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, printed = answer(["ckpt-diff", str(copy), str(copy)], capsys)
    assert code in (1, 2), printed.out
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    tried(1)


def repeated():
    return {"model": {"w": torch.zeros(1).expand(1 << 40)}}


def shared():
    inner = {"w": torch.zeros(1)}
    for _ in range(60):
        inner = {"a": inner, "b": inner}
    return {"model": inner}


def meta():
    return {"model": {"w": torch.zeros(1 << 40, device="meta")}}


def sparse():
    return {
        "model": {
            "w": torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.zeros(0), (1 << 40,), check_invariants=False)
        }
    }


@pytest.mark.parametrize("make", [repeated, shared, meta, sparse])
def test_a_file_that_claims_too_much(saved, tmp_path, capsys, make):
    copy = tmp_path / "copy"
    shutil.copytree(saved / "legacy", copy)
    (at,) = copy.rglob("model_optim_rng.pt")
    torch.save(make(), at)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, printed = answer(["ckpt-diff", str(copy), str(copy)], capsys)
    assert code == 2 and "model_optim_rng.pt" in printed.err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    tried(1)


@pytest.mark.parametrize("text", ["../legacy", "/etc", "²", "9" * 400, "release\x1b[2J", "\udcff", ""])
def test_the_latest_iteration_is_no_path(saved, tmp_path, capsys, text):
    copy = tmp_path / "copy"
    shutil.copytree(saved / "legacy", copy)
    (copy / "latest_checkpointed_iteration.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert answer(["ckpt-diff", str(copy), str(saved / "legacy")], capsys)[0] == 2
    tried(1)
