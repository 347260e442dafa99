"""attach() in loops without Megatron: steps, microbatches, evaluation, several models, DDP and FSDP2."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import ConfigError
from msprobe_megatron.run_directory.directory import RunDirectoryError
from tests.jobs.integrations.rows import faults, probe, rows, steps
from tests.support.forked import run_forked


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))


def train(model, optimizer, iterations=3, accumulate=2, evaluate=""):
    """A loop as anyone writes it; returns losses and the final weights."""
    losses = []
    for iteration in range(iterations):
        optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.linspace(-1, 1, 12).reshape(3, 4) * (1 + iteration + 0.1 * part)
            loss = model(x).square().mean()
            if evaluate == "before backward":
                with torch.no_grad():
                    model(x)
            loss.backward()
            losses.append(loss.item())
            if evaluate == "after backward":
                with torch.no_grad():
                    model(x)
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


def test_rows_of_a_loop_and_not_a_bit_changed(tmp_path):
    plain_model = net()
    plain = train(plain_model, torch.optim.AdamW(plain_model.parameters(), lr=0.1))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with attach(model, optimizer, probe(tmp_path)) as session:
        probed = train(model, optimizer)
    assert probed[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(probed[1], plain[1], strict=True))
    assert session.steps_recorded == [0, 2]
    assert faults(tmp_path / "out") == ([], [])
    found = rows(tmp_path / "out", 2)
    by_microbatch = [
        [(r["phase"], r["kind"], r["name"], r["io"], r["path"]) for r in found if r["microbatch"] == number]
        for number in (0, 1)
    ]
    assert by_microbatch[0] == by_microbatch[1]
    assert by_microbatch[0][0] == ("forward", "activation", "model", "input", "input")
    assert {r["microbatch"] for r in found} == {0, 1, None}
    kinds = {r["kind"] for r in found}
    assert kinds == {"activation", "gradient", "parameter", "grad_reduced"}


def test_recorded_numbers_are_those_of_the_tensors(tmp_path):
    model = nn.Linear(4, 2)
    x = torch.arange(12.0).reshape(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight = model.weight.detach().double().numpy().copy()
    bias = model.bias.detach().double().numpy().copy()
    with attach(model, optimizer, probe(tmp_path, "[0]")):
        model(x).sum().backward()
        optimizer.step()
    table = {(r["kind"], r["name"], r["io"]): r for r in rows(tmp_path / "out", 0)}
    values = x.double().numpy()
    output = table["activation", "model", "output"]
    assert output["sum"] == pytest.approx((values @ weight.T + bias).sum(), rel=1e-5)
    gradient = table["grad_reduced", "weight", "weight"]
    assert gradient["sum"] == pytest.approx(2 * values.sum(), rel=1e-12)
    # The weights that made the step, not those it left behind.
    assert table["parameter", "weight", "weight"]["sum"] == pytest.approx(weight.sum(), rel=1e-6)
    assert table["gradient", "model", "output"]["sum"] == 6


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_evaluation_in_the_middle_of_a_step_is_not_recorded(tmp_path, level):
    """Nor does it take anything away: gradients that are awaited come, and calls go on being numbered."""
    counts = []
    for number, evaluate in enumerate(("", "after backward", "before backward")):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = probe(folder)
        config.write_text(config.read_text().replace("L0", level))
        with attach(model, optimizer, config):
            train(model, optimizer, evaluate=evaluate)
        counts.append([(r["seq"], r["kind"], r["name"], r["microbatch"]) for r in rows(folder / "out", 2)])
    assert counts[1] == counts[0]
    assert counts[2] == counts[0]
    assert any(kind == "gradient" for _, kind, _, _ in counts[0])


def test_schedulers_and_copies_of_the_model_work_while_attached(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, probe(tmp_path)) as session:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        average = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
        assert average(torch.ones(1, 4)).abs().sum() == 0
        train(model, optimizer)
        scheduler.step()
    assert session.steps_recorded == [0, 2]
    assert "_call_impl" not in vars(model)
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_without_an_optimizer_the_step_is_ended_by_hand(tmp_path):
    model = net()
    with attach(model, None, probe(tmp_path, "[7, 8]"), step=7) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            session.step()
    assert session.steps_recorded == [7, 8]
    assert "grad_reduced" in {r["kind"] for r in rows(tmp_path / "out", 8)}


def test_two_models_at_once_do_not_mix(tmp_path):
    actor, critic = net(1), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (actor, critic)]
    config = probe(tmp_path, "[0-2]")
    sessions = [
        attach(model, optimizer, config, tag=tag)
        for model, optimizer, tag in zip((actor, critic), optimizers, ("actor", "critic"), strict=True)
    ]
    x = torch.ones(2, 4)
    for _ in range(3):
        # Both steps are open at once.
        (actor(x).sum() + critic(x).sum()).backward()
        for optimizer in optimizers:
            optimizer.step()
    for session in sessions:
        session.close()
    assert torch.distributed.all_reduce.__module__.startswith("torch")
    assert not hasattr(torch.distributed.all_reduce, "__msprobe_patch__")
    for tag, model in (("actor", actor), ("critic", critic)):
        assert steps(tmp_path / "out" / tag) == [0, 1, 2]
        assert faults(tmp_path / "out" / tag) == ([], [])
        modules = {r["name"] for r in rows(tmp_path / "out" / tag, 2) if r["kind"] == "activation"}
        assert modules == {"model", *(name for name, _ in model.named_children())}


def test_the_same_directory_twice_is_refused_the_same_model_twice_is_one(tmp_path):
    model, config = net(), probe(tmp_path)
    with attach(model, None, config) as session:
        assert attach(model, None, config) is session
        with pytest.raises(RunDirectoryError, match=r"out"):
            attach(net(), None, config)


def test_a_pattern_without_a_match_is_refused(tmp_path):
    path = probe(tmp_path)
    path.write_text(path.read_text().replace("task: statistics", "task: statistics, list: [decoder]"))
    with pytest.raises(ConfigError, match="'decoder' matches no module"):
        attach(net(), None, path)


def sharded(folder, kind):
    """Two ranks, each with its own samples."""
    from torch import distributed

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    weights = [p.detach().clone() for p in model.parameters()]
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = distributed.get_rank()
    with attach(model, optimizer, folder / "probe.yaml"):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1.0 + rank + step)).square().mean().backward()
            optimizer.step()
    distributed.destroy_process_group()
    return weights


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(tmp_path, kind):
    probe(tmp_path)
    weights, _ = run_forked(2, sharded, tmp_path, kind)
    out = tmp_path / "out"
    assert (faults(out, 0), faults(out, 1)) == (([], []), ([], []))
    # What the reducer sends from C++ cannot have rows; the run says so instead.
    unseen = json.loads((out / "run.json").read_text())["unseen"]
    assert [text.split(" (")[0] for text in unseen] == ["torch DistributedDataParallel"] * (kind == "ddp")
    first = [[r for r in rows(out, 0, rank) if r["kind"] == "parameter"] for rank in (0, 1)]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [[r["name"] for r in found] for found in first] == [names, names]
    for index, weight in enumerate(weights):
        total = weight.double().numpy().sum()
        parts = [found[index] for found in first]
        expected = [total, total] if kind == "ddp" else [s.sum() for s in np.array_split(weight.double().numpy(), 2)]
        assert [part["sum"] for part in parts] == pytest.approx(expected, rel=1e-6)
        assert parts[0]["global_shape"] == list(weight.shape)
    gradients = [[r["sum"] for r in rows(out, 2, rank) if r["kind"] == "grad_reduced"] for rank in (0, 1)]
    assert len(gradients[0]) == 4
    assert (gradients[0] == gradients[1]) is (kind == "ddp")
