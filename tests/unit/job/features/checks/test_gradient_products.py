"""Products of inputs and gradients: what is written equals the gradients that autograd computes."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.analysis.laws.registry import examine
from msprobe_megatron.analysis.load.run import open_run

_PROBE = "checks: {replicas: false, optimizer: false, rng: false, update: false, every: 2}\n"
_PLACES = {8: [1, 3, 5, 7], 16: [2, 6, 10, 14]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


def trained(folder, *, forgets=False, dtype=torch.float32):
    """Three steps of two microbatches; returns the gradients of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(dtype)
    with torch.no_grad():
        for block in model:
            block.norm.weight.uniform_(0.5, 1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen = []
    if forgets:
        model[1].second.weight.register_hook(lambda g: g * 0 if seen.append(0) or len(seen) % 2 else None)
    (folder / "probe.yaml").write_text(f"output: {folder}/out\n{_PROBE}")
    session, gradients = attach(model, optimizer, folder / "probe.yaml"), []
    for _ in range(3):
        for _ in range(2):
            model(torch.randn(5, 3, 8, dtype=dtype)).square().sum().backward()
        with torch.no_grad():
            model(torch.randn(5, 3, 8, dtype=dtype))  # an evaluation is no part of the step
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    assert session.faults == []
    return gradients


def test_products_are_the_gradients_of_autograd(tmp_path):
    gradients = trained(tmp_path)
    files = sorted((tmp_path / "out/products/rank_00000").glob("*.parquet"))
    assert [path.name for path in files] == ["steps_000000_000000.parquet", "steps_000002_000002.parquet"]
    for path, step in zip(files, (0, 2), strict=True):
        rows = pq.read_table(path).to_pylist()
        assert {row["name"] for row in rows} == {name for name in gradients[step] if name.endswith("weight")}
        for row in rows:
            facts, gradient = json.loads(row["extra"]), gradients[step][row["name"]]
            places = [torch.tensor(_PLACES[size]) for size in gradient.shape]
            wanted = gradient[tuple(places)]
            products = torch.tensor(facts["products"])
            if facts["kind"] == "norm":
                products = products / torch.tensor(facts["weight"])
            torch.testing.assert_close(torch.tensor(facts["gradient"]), wanted)
            torch.testing.assert_close(products, wanted, rtol=1e-4, atol=1e-5)
            assert facts["calls"] == 2 and not facts["skipped"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_microbatch_that_is_missing_from_one_matrix(tmp_path, dtype, forgets):
    trained(tmp_path, forgets=forgets, dtype=dtype)
    examined = examine(open_run(tmp_path / "out"))
    found = {law.name: breach for law, breach in examined.broken}
    if forgets:
        assert found["weight-gradients"].where["name"] == "1.second.weight"
    else:
        assert found == {} and "weight-gradients" in examined.held
