"""Windows, slices, lists of tensors and functions of one's own: what is let through, and what is refused."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor
from msprobe_megatron.config import ConfigError, Overrides, from_document
from msprobe_megatron.job.features.dump.narrowing import open_at_start
from tests.unit.job.features.dump import own_functions
from tests.unit.job.features.dump.own_functions import scaled


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.act(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return scaled(x, own_functions.other(x))


def record(tmp_path, steps=1, **dump):
    config = from_document({"dump": dump}, "here.yaml", Overrides(output=tmp_path / "out"))
    torch.manual_seed(2)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 4)
    with attach(model, optimizer, config) as session:
        for _ in range(steps):
            model(data).sum().backward()
            optimizer.step()
    assert session.faults == []
    return session


def rows(tmp_path, where="true", columns="kind, name"):
    return open_run(tmp_path / "out").rows().filter(where).project(columns).fetchall()


def test_a_window_of_modules_has_their_forward_backward_and_weights(tmp_path):
    record(tmp_path, level="L0", scope=["layers.1.inner", "layers.2"])
    names = {"layers.1.inner", "layers.1.act", "layers.1", "layers.2", "layers.2.inner", "layers.2.act"}
    found = set(rows(tmp_path, "kind in ('activation', 'gradient')"))
    assert found == {(kind, name) for kind in ("activation", "gradient") for name in names}
    assert {name for _, name in rows(tmp_path, "kind in ('parameter', 'grad_reduced')")} == {
        f"layers.{n}.inner.{what}" for n in (1, 2) for what in ("weight", "bias")
    }


def test_a_window_of_calls(tmp_path):
    record(
        tmp_path,
        level="L1",
        scope=["layers.0.act/torch.nn.functional.relu.0", "layers.2.inner/torch.nn.functional.linear.0"],
    )
    names = {name for _, name in rows(tmp_path, "kind in ('activation', 'gradient')")}
    assert names == {
        *(f"layers.{n}.act/torch.nn.functional.relu.0" for n in (0, 1)),
        *(f"layers.{n}.inner/torch.nn.functional.linear.0" for n in (1, 2)),
    }


def test_a_window_with_data_mode(tmp_path):
    record(tmp_path, level="L0", scope=["layers.1", "layers.1"], data_mode=["backward", "output"])
    found = set(rows(tmp_path, "kind in ('activation', 'gradient')", "kind, name, io"))
    assert found == {("gradient", name, "output") for name in ("layers.1", "layers.1.inner", "layers.1.act")}


def test_each_step_has_its_window(tmp_path):
    record(tmp_path, steps=2, level="L0", scope=["layers.3", "layers.3"])
    assert {step for (step,) in rows(tmp_path, "name = 'layers.3'", "step")} == {0, 1}


@pytest.mark.parametrize(
    ("scope", "level", "words"),
    [
        (["layers.2", "layers.1"], "L0", "'layers.1' comes before 'layers.2'"),
        (["layers.2", "layers.1.act"], "mix", "comes before"),
        (["layer.2", "layers.3"], "L0", "'layer.2' is no module; accepted: a canonical name such as model"),
        (["layers.2", "layers.3"], "L1", "is a module; level is L1"),
        (["layers.0/torch.relu.0", "layers.3"], "L0", "is an API call; level is L0"),
    ],
)
def test_windows_that_cannot_be_are_refused(tmp_path, scope, level, words):
    with pytest.raises(ConfigError) as error:
        record(tmp_path, level=level, scope=scope)
    assert "here.yaml: dump.scope: " in str(error.value) and words in str(error.value)


def test_a_call_that_never_comes_is_told(tmp_path):
    session = record(tmp_path, level="L1", scope=["layers.0/torch.tanh.0", "layers.2/torch.tanh.0"])
    assert "dump.scope: the first name, layers.0/torch.tanh.0, was never called" in session.not_happened()


@pytest.mark.parametrize(
    ("first", "here", "first_stage", "opened"),
    [
        ("decoder.layers.0", ["decoder.layers.2"], False, True),
        ("decoder.layers.3", ["decoder.layers.2"], False, False),
        ("decoder.layers.2", ["decoder.layers.2"], False, False),
        ("embedding", ["decoder.layers.2"], False, True),
        ("output_layer", ["decoder.layers.0"], True, False),
    ],
)
def test_on_a_later_stage_the_window_may_be_open_from_the_start(first, here, first_stage, opened):
    assert open_at_start(first, here, first_stage) is opened


def test_a_slice_is_measured_and_saved_alone(tmp_path):
    rules = [{"dim": 1, "size": 4, "begin": 1, "end": 3}, {"dim": 0, "begin": 2}]
    record(tmp_path, level="L0", task="tensor", list=["layers.0"], slice=rules)
    run = open_run(tmp_path / "out")
    columns = "shape, sum, sumsq, tensor, shard"
    ((shape, total, squares, key, shard),) = rows(
        tmp_path, "name = 'layers.0' and io = 'input' and kind = 'activation'", columns
    )
    torch.manual_seed(2)
    Net()
    expected = torch.randn(3, 4).numpy().astype(np.float64)[2:, 1:3]
    assert shape == [1, 2] and shard == "?slice"
    assert (total, squares) == pytest.approx((expected.sum(), (expected**2).sum()))
    assert np.array_equal(read_tensor(run, step=0, rank=0, key=key).numpy(), expected.astype(np.float32))
    # a bias has one dimension: cut by the second rule, to elements 2 and 3
    assert rows(tmp_path, "name = 'layers.0.inner.bias' and kind = 'parameter'", "shape") == [([2],)]


def test_tensors_of_some_names_beside_the_statistics_of_all(tmp_path):
    record(tmp_path, level="L0", tensor_list=["layers.2.act"])
    saved = {name for _, name in rows(tmp_path, "tensor is not null")}
    # its input and its output are also those of its neighbours: each distinct tensor is there once
    assert {"layers.2.act"} <= saved and not any(name.startswith(("layers.0", "layers.1")) for name in saved)
    assert all(tensor for (tensor,) in rows(tmp_path, "name = 'layers.2.act'", "tensor"))
    assert rows(tmp_path, "name = 'layers.0' and sum is not null")


def test_functions_of_ones_own_are_calls_under_their_names_and_keep_their_identity(tmp_path):
    before = scaled, own_functions.scaled, own_functions.Holder.twice
    record(
        tmp_path,
        level="L1",
        functions=[
            "tests.unit.job.features.dump.own_functions:scaled",
            "tests.unit.job.features.dump.own_functions:Holder.twice",
        ],
    )
    assert (scaled, own_functions.scaled, own_functions.Holder.twice) == before
    found = set(rows(tmp_path, "name like '%own_functions%'", "kind, name, io, path"))
    name, inner = (
        "model/tests.unit.job.features.dump.own_functions.scaled.0",
        "model/tests.unit.job.features.dump.own_functions.Holder.twice.0",
    )
    assert {(kind, name, "input", path) for kind in ("activation", "gradient") for path in ("0", "1")} <= found
    assert {("activation", inner, "output", ""), ("gradient", inner, "output", "")} <= found
    assert rows(tmp_path, "name = 'model/torch.Tensor.mul.0'")  # what they call is told too


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        (["nowhere.at.all:f"], "cannot be imported"),
        (["tests.unit.job.features.dump.own_functions:scalled"], "has no scalled"),
        (["tests.unit.job.features.dump.own_functions:FACTOR"], "is a float, not a function"),
    ],
)
def test_functions_that_are_not_there_are_refused(tmp_path, functions, words):
    with pytest.raises(ConfigError) as error:
        record(tmp_path, level="L1", functions=functions)
    assert "here.yaml: dump.functions: " in str(error.value) and words in str(error.value)


def test_sites_of_own_functions_have_stacks(tmp_path):
    record(tmp_path, level="L1", functions=["tests.unit.job.features.dump.own_functions:scaled"])
    sites = json.loads((tmp_path / "out/step_000000/rank_00000/sites.json").read_text())
    (site,) = [site for site in sites["apis"] if "own_functions.scaled" in site["name"]]
    assert "test_narrowing.py" in site["stack"][0]
