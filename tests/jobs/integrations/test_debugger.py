"""`PrecisionDebugger` and `save` in plain torch: msprobe's calls, the oldest form, nets without a trace of Megatron."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from msprobe_megatron import PrecisionDebugger, attach, save, seed_all
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.config import ConfigError, Overrides, from_document
from msprobe_megatron.run_directory.directory import read_events
from tests.support.forked import run_forked


class Block(nn.Module):
    """What a ResNet is made of: convolution, norm, a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4), Block(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@pytest.fixture(autouse=True)
def fresh():
    yield
    PrecisionDebugger.close()


def config_file(tmp_path, **keys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "statistics", "dump_path": str(tmp_path / "out"), "level": "L0", **keys}))
    return str(path)


def train(debugger, steps=3, seed=0, model=None, between=lambda step, model: None):
    torch.manual_seed(seed)
    model = model or ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(2, 3, 6, 6)
    losses = []
    for step in range(steps):
        if debugger is not None:
            debugger.start(model)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), torch.tensor([0, 1]))
        between(step, model)
        loss.backward()
        optimizer.step()
        if debugger is not None:
            debugger.stop()
            debugger.step()
        losses.append(loss.detach())
    return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()


def rows(tmp_path, where="true", columns="*"):
    return open_run(tmp_path / "out").rows().filter(where).project(columns).fetchall()


def test_the_loop_of_msprobe_records_its_steps_and_changes_no_bit(tmp_path):
    plain = train(None)
    probed = train(PrecisionDebugger(config_path=config_file(tmp_path, step=[0, "2"])))
    PrecisionDebugger.close()
    for left, right in zip(plain, probed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    run = open_run(tmp_path / "out")
    assert run.steps == [0, 2] and run.ranks[0]["ledger"]["faults"] == []
    kinds = dict(run.rows(step=2).aggregate("kind, count(*)", "kind").fetchall())
    assert kinds["parameter"] == len(list(ResNet().parameters())) == kinds["grad_reduced"]
    assert kinds["activation"] > 10 and kinds["gradient"] > 10


def test_gradients_are_read_before_the_optimizer_and_not_after(tmp_path):
    seen = {}

    def keep(step, model):
        def hook(gradient):
            seen.setdefault(step, (gradient.numpy().astype(np.float64) ** 2).sum())

        model.head.bias.register_hook(hook)

    train(PrecisionDebugger(config_path=config_file(tmp_path)), steps=2, between=keep)
    PrecisionDebugger.close()
    found = dict(rows(tmp_path, "kind = 'grad_reduced' and name = 'head.bias'", "step, sumsq"))
    assert found == pytest.approx(seen) and all(found.values())


def test_only_what_runs_between_start_and_stop_is_recorded(tmp_path):
    debugger = PrecisionDebugger(config_path=config_file(tmp_path, level="L1", risk_level="ALL"))
    x = torch.ones(2, requires_grad=True)
    torch.sin(x)
    debugger.start()
    torch.cos(x)
    debugger.stop()
    torch.tan(x)
    debugger.start()
    torch.exp(x)
    debugger.stop()
    debugger.step()
    debugger.set_init_step(40)
    debugger.start()
    torch.erf(x)
    debugger.step()
    PrecisionDebugger.close()
    assert {(step, name) for step, name in rows(tmp_path, columns="step, name")} == {
        (0, "outside/torch.cos.0"),
        (0, "outside/torch.exp.0"),
        (40, "outside/torch.erf.0"),
    }


def test_inference_is_recorded_too(tmp_path):
    debugger, model = PrecisionDebugger(config_path=config_file(tmp_path)), ResNet().eval()
    with torch.no_grad():
        model(torch.ones(1, 3, 4, 4))
        debugger.start(model)
        model(torch.ones(1, 3, 4, 4))
        debugger.stop()
        debugger.step()
    PrecisionDebugger.close()
    assert len(rows(tmp_path, "name = 'head' and io = 'output'")) == 1


def test_there_is_one_debugger(tmp_path):
    first = PrecisionDebugger(config_path=config_file(tmp_path))
    assert PrecisionDebugger() is first


def test_the_oldest_form_saves_tensors_or_statistics(tmp_path):
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "out"), hook_name="dump", rank=0)
    debugger.configure_hook(mode="api_stack", summary_only=True)
    train(debugger, steps=1)
    PrecisionDebugger.close()
    found = rows(tmp_path, "name like '%conv2d%' and io = 'output' and kind = 'activation'", "name, tensor")
    assert len(found) == 3 and all(tensor is None for _, tensor in found)
    sites = json.loads((tmp_path / "out/step_000000/rank_00000/sites.json").read_text())
    assert all(site["stack"] for site in sites["apis"])
    again = PrecisionDebugger(dump_path=str(tmp_path / "again"), hook_name="dump")
    again.configure_hook(mode="api_list", api_list=["conv2d"], input_output_mode=["forward"])
    train(again, steps=1)
    PrecisionDebugger.close()
    run = open_run(tmp_path / "again")
    found = run.rows().filter("kind in ('activation', 'gradient')").project("name, phase, tensor").fetchall()
    assert all("conv2d" in name and phase == "forward" and tensor for name, phase, tensor in found) and found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hook_name": "dumps"}, "hook_name: 'dumps' is not known; accepted: dump, overflow_check"),
        ({"level": "L9"}, "'L9' is not known"),
        ({"task": "acc_check"}, "cannot be translated"),
        ({"step": ["7-3"]}, "ends before it begins"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, words):
    with pytest.raises(ConfigError) as error:
        PrecisionDebugger(dump_path=str(tmp_path / "out"), **arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "acl"}, "mode: 'acl' is not known"),
        ({"mode": "list"}, "names, because mode is list"),
        ({"input_output_mode": ["sideways"]}, "'sideways' is not known"),
        ({"colour": 1}, "colour"),
    ],
)
def test_wrong_hooks_are_named(tmp_path, options, words):
    debugger = PrecisionDebugger(dump_path=str(tmp_path / "out"), hook_name="dump")
    with pytest.raises(ConfigError) as error:
        debugger.configure_hook(**options)
    assert words in str(error.value)


def test_calls_out_of_place_are_named(tmp_path):
    with pytest.raises(ConfigError, match="not created yet"):
        PrecisionDebugger.start()
    debugger = PrecisionDebugger(config_path=config_file(tmp_path))
    with pytest.raises(ConfigError, match=r"level L0 needs start\(model\)"):
        debugger.start()
    with pytest.raises(ConfigError, match="belongs to PrecisionDebugger"):
        debugger.configure_hook()
    for wrong in (-1, True, "1"):
        with pytest.raises(ConfigError, match="set_init_step"):
            debugger.set_init_step(wrong)


def test_level_debug_has_only_what_is_saved_with_its_gradient(tmp_path):
    debugger = PrecisionDebugger(config_path=config_file(tmp_path, level="debug"))
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    for _ in range(2):
        y = x * 2
        debugger.save({"y": y, "scale": 0.5, "more": [torch.tensor([True, False]), "text"]}, "head")
        debugger.save(y, "head")
        debugger.save(y * 3, "silent", save_backward=False)
        (y**2).sum().backward()
        debugger.step()
    PrecisionDebugger.close()
    found = {
        (step, kind, name, path): (dtype, total)
        for step, kind, name, path, dtype, total in rows(tmp_path, columns="step, kind, name, path, dtype, sum")
    }
    numbers = np.array([1.0, -2.0, 3.0])
    for step in (0, 1):
        assert found.pop((step, "activation", "debug/head.0", "y")) == ("float32", (2 * numbers).sum())
        assert found.pop((step, "activation", "debug/head.0", "scale")) == ("float64", 0.5)
        assert found.pop((step, "activation", "debug/head.0", "more.0")) == ("bool", 1.0)
        assert found.pop((step, "gradient", "debug/head.0", "y")) == ("float32", (2 * 2 * numbers).sum())
        assert found.pop((step, "activation", "debug/head.1", "")) == ("float32", (2 * numbers).sum())
        assert found.pop((step, "gradient", "debug/head.1", "")) == ("float32", (2 * 2 * numbers).sum())
        assert found.pop((step, "activation", "debug/silent.0", "")) == ("float32", (6 * numbers).sum())
    assert found == {}


def test_save_works_at_every_level_and_costs_nothing_elsewhere(tmp_path):
    config = from_document({"steps": [1], "dump": {"level": "L0"}}, "here", Overrides(output=tmp_path / "out"))
    save(torch.ones(1), "nobody listens")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, config) as session:
        for step in range(3):
            hidden = model(torch.ones(1, 2))
            save(hidden, "hidden")
            save(hidden, 7)
            hidden.sum().backward()
            optimizer.step()
    assert session.faults == []
    assert rows(tmp_path, "name like 'debug/%'", "step, kind, name") == [
        (1, "activation", "debug/hidden.0"),
        (1, "gradient", "debug/hidden.0"),
    ]
    assert "name: 7 is not a name" in next(e["text"] for e in read_events(tmp_path / "out") if e["event"] == "save")


def test_debug_without_a_single_save_is_told(tmp_path):
    config = from_document({"dump": {"level": "debug"}}, "here", Overrides(output=tmp_path / "out"))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, config) as session:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "nothing was saved" in session.not_happened()[0]


def data_parallel(config):
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.parallel.DistributedDataParallel(ResNet())
    train(PrecisionDebugger(config_path=config), steps=2, model=model)
    PrecisionDebugger.close()
    torch.distributed.destroy_process_group()
    return {}


def test_data_parallel_jobs(tmp_path):
    run_forked(2, data_parallel, config_file(tmp_path, level="mix", step=[1]))
    found = dict(rows(tmp_path, "kind = 'grad_reduced' and name = 'head.bias'", "rank, sumsq"))
    assert found[0] == found[1] > 0
    assert {rank for (rank,) in rows(tmp_path, "name like 'blocks.1.conv/%conv2d%'", "rank")} == {0, 1}


def test_seeds(monkeypatch):
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(F, "dropout", F.dropout)
    drawn = []
    for _ in range(2):
        seed_all(7)
        drawn.append((torch.rand(2).tolist(), np.random.rand(2).tolist()))
    assert drawn[0] == drawn[1]
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        seed_all(7, mode=True)
        assert torch.are_deterministic_algorithms_enabled()
        seed_all(7)  # takes nothing back that was asked for before
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    for wrong in ({"seed": "7"}, {"seed": True}, {"mode": 1}):
        with pytest.raises(TypeError):
            seed_all(**wrong)
    with pytest.raises(ValueError, match="out of range"):
        seed_all(-1)
    with pytest.raises(ValueError, match="not available"):
        seed_all(1, is_enhanced=True)


def test_dropout_can_be_taken_out(monkeypatch):
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        monkeypatch.setattr(F, name, getattr(F, name))
    seed_all(7, rm_dropout=True)
    x = torch.randn(4, 4)
    assert torch.equal(nn.Dropout(0.9)(x), x)
