"""Without Megatron: a plain loop, DDP and FSDP2, several optimizers; against NumPy again."""

import numpy as np
import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from tests.support.forked import run_forked
from tests.unit.job.features.monitor.conftest import EVERYTHING, rows_of


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def figures(x):
    x = np.asarray(x.detach().double()).reshape(-1)
    return float(x.min()), float(x.max()), float(x.sum()), float((x * x).sum())


def check(row, tensor):
    low, high, total, squares = figures(tensor)
    assert (row["min"], row["max"]) == (low, high)
    assert row["sum"] == pytest.approx(total, abs=1e-6) and row["sumsq"] == pytest.approx(squares, rel=1e-5)


def config(out):
    import yaml

    return from_document(yaml.safe_load(EVERYTHING), "test", Overrides(output=str(out)))


OPTIMIZERS = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer"}),
    "sgd_plain": (lambda p: torch.optim.SGD(p, lr=0.1), set()),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=0.01), {"square_avg"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_state_of_every_optimizer(tmp_path, name):
    make, states = OPTIMIZERS[name]
    model = net()
    optimizer = make(model.parameters())
    names = dict(model.named_parameters())
    truth = []
    with attach(model, optimizer, config(tmp_path / "out"), step=0) as session:
        for number in range(2):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 12).reshape(3, 4) * (number + 1)).square().sum().backward()
            before = {key: p.detach().clone() for key, p in names.items()}
            gradients = {key: p.grad.clone() for key, p in names.items()}
            momenta = {
                key: value.clone()
                for key, p in names.items()
                if (value := optimizer.state[p].get("exp_avg", optimizer.state[p].get("momentum_buffer"))) is not None
            }
            optimizer.step()
            after = {key: p.detach().clone() for key, p in names.items()}
            kept = {(k, s): optimizer.state[p][s].clone() for k, p in names.items() for s in states}
            truth.append((before, gradients, momenta, after, kept))
    assert session.faults == []
    before, gradients, momenta, after, kept = truth[1]
    rows = {(r["kind"], r["name"], r["io"], r["path"], r["microbatch"]): r for r in rows_of(tmp_path / "out", 0, 1)}
    for key in names:
        check(rows["grad_reduced", key, "weight", "", None], gradients[key])
        check(rows["grad_clipped", key, "weight", "", None], gradients[key])
        check(rows["grad_unreduced", key, "weight", "microbatch", 0], gradients[key])
        check(rows["parameter", key, "weight", "before", None], before[key])
        check(rows["parameter", key, "weight", "after", None], after[key])
        check(rows["update", key, "change", "", None], after[key] - before[key])
        for state in states:
            check(rows["optimizer_state", key, state, "", None], kept[key, state])
        if key in momenta:
            same = torch.sign(gradients[key]) == torch.sign(momenta[key])
            check(rows["optimizer_state", key, "sign_agreement", "", None], same)
    told = {row["io"] for row in rows.values() if row["kind"] == "optimizer_state"}
    assert told == states | ({"sign_agreement"} if momenta else set())


def test_states_that_a_checkpoint_replaced(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with attach(model, optimizer, config(tmp_path / "out"), step=0):
        for number in range(3):
            if number == 2:
                saved = optimizer.state_dict()
                for state in saved["state"].values():
                    state["exp_avg"] = torch.full_like(state["exp_avg"], 8.0)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
    rows = [row for row in rows_of(tmp_path / "out", 0, 2) if row["io"] == "exp_avg"]
    truth = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    assert len(rows) == 4
    for row in rows:
        check(row, truth[row["name"]])
        assert row["min"] > 5  # nine tenths of eight, and a gradient


def parallel(wrapper, out):
    """One of two ranks: a step under DDP or FSDP2; returns what the optimizer had."""
    import os

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    model = net()
    if wrapper == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = {}
    with attach(model, optimizer, config(out), step=0) as session:
        for number in range(2):
            optimizer.zero_grad()
            model(torch.full((3, 4), 1.0 + rank + number)).square().sum().backward()
            local = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
            optimizer.step()
            found = {
                "gradients": local,
                "moments": [
                    getattr(v, "_local_tensor", v).clone()
                    for p in model.parameters()
                    for v in (optimizer.state[p]["exp_avg"],)
                ],
                "names": [n.removeprefix("module.") for n, _ in model.named_parameters()],
                "faults": list(session.faults),
            }
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_parallel_wrappers_of_torch(tmp_path, wrapper):
    ranks = run_forked(2, parallel, wrapper, str(tmp_path / "out"))
    for rank, truth in enumerate(ranks):
        assert truth["faults"] == []
        rows = {(r["kind"], r["name"], r["io"]): r for r in rows_of(tmp_path / "out", rank, 1) if r["path"] == ""}
        for name, gradient, moment in zip(truth["names"], truth["gradients"], truth["moments"], strict=True):
            check(rows["grad_reduced", name, "weight"], gradient)
            check(rows["optimizer_state", name, "exp_avg"], moment)
