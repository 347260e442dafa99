"""Tasks of the dump, in a plain training loop: tensors, structure, the origin of what is not finite; and its limits."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.analysis.load.run import RunError, open_run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor
from msprobe_megatron.config import Overrides, from_document


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def train(out, dump, steps=1, bad_step=None, dtype=torch.float32, **document):
    """A run of a few steps; the tensors that its modules gave are returned by name."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = from_document({"dump": dump, **document}, "test", Overrides(output=str(out)))
    session = attach(net, optimizer, config, step=0)
    kept = {}
    for step in range(steps):
        x = torch.randn(5, 8, dtype=dtype)
        if step == bad_step:
            with torch.no_grad():
                net.second.weight[0, 0] = float("nan")
        kept[step, "input"] = x.clone()
        y = net(x)
        kept[step, "output"] = y.detach().clone()
        optimizer.zero_grad()
        y.float().sum().backward()
        optimizer.step()
    session.close()
    assert session.faults == []
    return kept, session


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_tensors_are_the_tensors(tmp_path, dtype):
    kept, session = train(tmp_path / "run", {"task": "tensor"}, steps=2, dtype=dtype)
    run = open_run(tmp_path / "run")
    rows = run.rows(step=1).filter("kind = 'activation'").project("name, io, tensor, dtype").fetchall()
    found = {(name, io): read_tensor(run, 1, 0, key) for name, io, key, _ in rows}
    for name, io, want in (("model", "output", "output"), ("first", "input", "input"), ("second", "output", "output")):
        saved = found[name, io]
        assert saved.dtype == {"float32": "F32", "bfloat16": "BF16"}[str(dtype)[6:]]
        assert torch.equal(torch.from_numpy(saved.numpy().copy()).to(dtype), kept[1, want])
    assert all(row[3] == str(dtype)[6:] for row in rows)
    # Output of one module, input of the next: one tensor, saved once.
    keys = {(name, io): key for name, io, key, _ in rows}
    assert keys["first", "output"] == keys["act", "input"] != keys["act", "output"]
    assert session.writer.counts.tensors_written == 2 * len(set(keys.values()) | _other_keys(run))
    assert session.writer.counts.tensors_dropped == 0


def _other_keys(run):
    return {key for (key,) in run.rows(step=1).filter("kind <> 'activation'").project("tensor").fetchall()}


def test_files_are_safetensors_that_others_can_read(tmp_path):
    train(tmp_path / "run", {"task": "tensor"})
    run = open_run(tmp_path / "run")
    name, key = run.rows(step=0).filter("kind = 'parameter'").project("name, tensor").order("name").fetchall()[0]
    assert name == "first.bias"
    with safe_open(tmp_path / "run/step_000000/rank_00000/tensors.safetensors", "pt") as file:
        torch.manual_seed(0)
        assert torch.equal(file.get_tensor(key), Net().first.bias)


def test_reading_one_tensor_reads_only_its_bytes(tmp_path):
    train(tmp_path / "run", {"task": "tensor"})
    run, path = open_run(tmp_path / "run"), tmp_path / "run/step_000000/rank_00000/tensors.safetensors"
    rows = run.rows(step=0).filter("tensor is not null").project("tensor, sum").fetchall()
    key, total = min(rows, key=lambda row: tuple(map(int, row[0].split(":"))))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    index = json.loads(path.read_bytes()[8 : 8 + length])
    end = 8 + length + index[key]["data_offsets"][1]
    path.write_bytes(path.read_bytes()[:end])  # the rest is gone, the first tensor is there
    assert read_tensor(run, 0, 0, key).numpy().sum() == pytest.approx(total, abs=1e-4)
    other = max((k for k, _ in rows), key=lambda k: tuple(map(int, k.split(":"))))
    with pytest.raises(RunError, match="bytes"):
        read_tensor(run, 0, 0, other)
    for wrong in ("x", "0:99999", "7:0"):
        with pytest.raises(RunError, match="tensor"):
            read_tensor(run, 0, 0, wrong)


def test_large_steps_go_to_several_packs(tmp_path, monkeypatch):
    monkeypatch.setattr("msprobe_megatron.job.features.dump.feature.PACK_BYTES", 1024)
    train(tmp_path / "run", {"task": "tensor", "list": ["first", "second"]})
    run = open_run(tmp_path / "run")
    files = sorted((tmp_path / "run/step_000000/rank_00000").glob("tensors*.safetensors"))
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 3000
    for name, key, total in run.rows(step=0).filter("tensor is not null").project("name, tensor, sum").fetchall():
        assert read_tensor(run, 0, 0, key).numpy().sum() == pytest.approx(total, abs=1e-3), name


def test_disk_limit_drops_and_counts(tmp_path, capfd):
    _, session = train(tmp_path / "run", {"task": "tensor"}, steps=6, limits={"disk": "30KiB"})
    counts = session.writer.counts
    assert counts.tensors_written > 0 and counts.tensors_dropped > 0
    assert counts.bytes_written <= 30 * 1024
    assert "limits.disk" in capfd.readouterr().err
    assert '"drop"' in (tmp_path / "run/events.jsonl").read_text()
    assert session.ledger()["written"]["tensors_dropped"] == counts.tensors_dropped


def test_structure_has_names_and_no_figures(tmp_path):
    train(tmp_path / "run", {"task": "structure"})
    rows = open_run(tmp_path / "run").rows(step=0)
    assert rows.filter("sum is not null or n_nan is not null or tensor is not null").fetchall() == []
    names = {name for (name,) in rows.project("name").distinct().fetchall()}
    assert {"model", "first", "act", "second", "first.weight"} <= names
    sites = json.loads((tmp_path / "run/step_000000/rank_00000/sites.json").read_text())
    assert all(module["stack"] for module in sites["modules"])


def test_nonfinite_keeps_the_origin_with_its_inputs(tmp_path):
    train(tmp_path / "run", {"task": "nonfinite"}, steps=3, bad_step=1)
    run = open_run(tmp_path / "run")
    kept = run.rows(step=1).order("seq").project("name, kind, io, n_nan").fetchall()
    assert [row[:3] for row in kept] == [("second", "activation", "input"), ("second", "activation", "output")]
    assert kept[0][3] == 0 and kept[1][3] == 5
    assert run.rows(step=0).fetchall() == []


@pytest.mark.parametrize(("digest", "width"), [("md5", 32), ("crc32", 8)])
def test_hashes_of_the_bytes(tmp_path, digest, width):
    import hashlib
    import zlib

    kept, _ = train(tmp_path / "run", {"digest": digest})
    where = "name = 'model' and io = 'output' and kind = 'activation'"
    (extra,) = open_run(tmp_path / "run").rows(step=0).filter(where).project("extra").fetchall()[0]
    raw = kept[0, "output"].numpy().tobytes()
    want = hashlib.md5(raw).hexdigest() if digest == "md5" else f"{zlib.crc32(raw):08x}"
    assert json.loads(extra) == {digest: want} and len(want) == width


@pytest.mark.parametrize("forward", [False, True])
def test_a_step_cut_short_has_a_file_only_if_something_ran_in_it(forward, tmp_path):
    """The job exits inside its second step, as a signal handler does it: before the first call or after it."""
    net, out = Net(), tmp_path / "out"
    config = from_document({"dump": {"level": "L0"}, "steps": "all"}, "test", Overrides(output=str(out)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = attach(net, optimizer, config, step=0)
    net(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    session.schedule_begin("forward_backward_no_pipelining", 1)
    if forward:
        net(torch.randn(5, 8))
    session.close()
    steps = [folder.name for folder in sorted(out.glob("step_*"))]
    assert steps == ["step_000000", "step_000001"][: 1 + forward]
    assert open_run(out).dumped_steps == list(range(1 + forward))
