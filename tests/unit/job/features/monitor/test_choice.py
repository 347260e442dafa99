"""Which steps, modules and tensors are watched."""

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.config import ConfigError, Overrides, Target, TensorChoice, from_document, parse_steps
from msprobe_megatron.job.features.monitor.feature import next_watched
from msprobe_megatron.job.features.monitor.targets import Targets
from tests.unit.job.features.monitor.conftest import rows_of


class Pair(nn.Module):
    """Takes two tensors and gives two."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, first, second=None):
        return first * self.weight, second * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.last = Pair(), nn.Linear(3, 1)

    def forward(self, x):
        a, b = self.pair(x, second=x + 1)
        return self.last(a * b)


def run(tmp_path, monitor, steps=1, microbatches=1, name="out"):
    config = from_document({"monitor": monitor}, "probe.yaml", Overrides(output=str(tmp_path / name)))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, step=0) as session:
        for step in range(steps):
            optimizer.zero_grad()
            for number in range(microbatches):
                model(torch.full((2, 3), 1.0 + step + number, requires_grad=True)).sum().backward()
            optimizer.step()
    assert session.faults == []
    return rows_of(tmp_path / name, 0)


@pytest.mark.parametrize(
    ("start", "every", "window", "expected"),
    [
        (0, 1, None, [0, 1, 2, 3]),
        (5, 1, None, [5, 6, 7, 8]),
        (3, 10, None, [3, 13, 23, 33]),
        (0, 4, "5-20", [8, 12, 16, 20]),
        (1, 7, "0-3,10-30/2", [1, 22]),
        (0, 5, "1-4", []),
    ],
)
def test_steps(start, every, window, expected):
    chosen = None if window is None else parse_steps(window)
    found, step = [], 0
    while len(found) < 4:
        following = next_watched(step, start, every, chosen)
        if following is None:
            break
        found.append(following)
        step = following + 1
    # By hand: count on from the start, keep what lies in the window.
    if chosen is not None:
        assert found == [n for n in range(start, 100) if (n - start) % every == 0 and n in chosen][:4]
    assert found == expected


def test_the_number_of_watched_steps_is_limited(tmp_path):
    rows = run(tmp_path, {"start_step": 1, "every": 2, "collect_times": 2}, steps=8)
    assert sorted({row["step"] for row in rows}) == [1, 3]


def test_choice_of_tensors(tmp_path):
    target = {"input": "tuple[2]:0", "output": "tensor", "input_grad": "tuple[2]:1", "output_grad": "tuple[2]"}
    rows = run(tmp_path, {"targets": {"pair": target}, "gradients": False, "optimizer": False})
    found = {(row["kind"], row["io"], row["path"]) for row in rows if row["kind"] in ("activation", "gradient")}
    assert found == {
        ("activation", "input", "first"),
        ("activation", "output", "0"),
        ("gradient", "input", "second"),
        ("gradient", "output", "0"),
        ("gradient", "output", "1"),
    }


@pytest.mark.parametrize("side", ["tuple[2]:0", "tuple[2]:1", "tuple[2]"])
def test_arguments_without_names_count_in_the_order_they_come_in(tmp_path, side):
    """As a layer of Megatron: its forward takes *args and **kwargs, and is called by keyword."""

    class Nameless(Pair):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class ByKeyword(Model):
        def __init__(self):
            super().__init__()
            self.pair = Nameless()

        def forward(self, x):
            first, second = self.pair(first=x, second=2 * x)
            return self.last(first + second).sum()

    config = from_document(
        {"monitor": {"targets": {"pair": {"input": side}}, "gradients": False, "optimizer": False}},
        "probe.yaml",
        Overrides(output=str(tmp_path / "out")),
    )
    model = ByKeyword()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, step=0):
        for _ in range(2):
            model(torch.ones(2, 3)).backward()
            optimizer.step()
    for step in (0, 1):
        found = [row["path"] for row in rows_of(tmp_path / "out", 0, step) if row["kind"] == "activation"]
        assert found == {"0": ["first"], "1": ["second"], "]": ["first", "second"]}[side[-1]]


def test_a_target_without_sides_is_all_of_it_and_its_parameters(tmp_path):
    rows = run(tmp_path, {"targets": {"pair": {}}})
    assert {row["name"] for row in rows if row["kind"] in ("activation", "gradient")} == {"pair"}
    assert {row["name"] for row in rows if row["kind"] in ("grad_reduced", "optimizer_state")} == {"pair.weight"}


def test_a_target_that_is_nowhere_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"probe.yaml: monitor.targets: 'pear' is no module.*pair, last"):
        run(tmp_path, {"targets": {"pear": {}}})


def test_names_of_the_published_settings():
    first = TensorChoice(2, 0)
    targets = Targets([Target("language_model.encoder.layers.0", first, TensorChoice(), first, TensorChoice(1, 0))])
    assert targets.module("decoder.layers.0") and not targets.module("decoder.layers.1")
    assert targets.parameter("decoder.layers.0.mlp.linear_fc1.weight")
    assert not targets.parameter("decoder.layers.01.weight")
    assert targets.unmatched() == []
    assert targets.tensor("decoder.layers.0", "input", False, 0)
    assert not targets.tensor("decoder.layers.0", "input", False, 1)


@pytest.mark.parametrize(("direction", "kinds"), [("forward", {"activation"}), ("backward", {"gradient"})])
def test_one_direction(tmp_path, direction, kinds):
    rows = run(tmp_path, {"direction": direction, "gradients": False, "optimizer": False})
    assert {row["kind"] for row in rows} & {"activation", "gradient"} == kinds


def test_microbatches_summed(tmp_path):
    each = run(tmp_path, {"optimizer": False}, microbatches=3)
    summed = run(tmp_path, {"optimizer": False, "microbatches": "summed"}, microbatches=3, name="summed")
    kinds = ("activation", "gradient")
    assert {row["microbatch"] for row in summed if row["kind"] in kinds} == {None}
    for row in summed:
        if row["kind"] not in kinds:
            continue
        same = [r for r in each if all(r[k] == row[k] for k in ("kind", "name", "io", "path", "phase"))]
        assert len(same) == 3
        assert row["numel"] == sum(r["numel"] for r in same)
        assert row["n_zero"] == sum(r["n_zero"] for r in same)
        assert row["min"] == min(r["min"] for r in same) and row["max"] == max(r["max"] for r in same)
        assert row["sum"] == pytest.approx(sum(r["sum"] for r in same))
        assert row["sumsq"] == pytest.approx(sum(r["sumsq"] for r in same))


def test_rows_of_a_step_that_failed_are_kept(tmp_path):
    config = from_document({"monitor": {}}, "probe.yaml", Overrides(output=str(tmp_path / "out")))
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    session = attach(model, optimizer, config, step=0)
    model(torch.ones(2, 3))
    session.close()
    assert {row["kind"] for row in rows_of(tmp_path / "out", 0)} >= {"activation"}


def test_switched_off_and_on_while_the_job_runs(tmp_path):
    from msprobe_megatron.config.control_orders import Order

    config = from_document({"monitor": {"collect_times": 2}}, "probe.yaml", Overrides(output=str(tmp_path / "out")))
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, step=0) as session:
        for step in range(8):
            if step in (1, 4):
                assert session.features.obey(Order(monitor=step == 4))
                session._next_step = session.features.next_from(step)
                assert not model.pair._forward_hooks
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    # Off after the first step, on again at 4 for the two that collect_times allows.
    assert sorted({row["step"] for row in rows_of(tmp_path / "out", 0)}) == [0, 4, 5]


def test_without_an_optimizer_and_with_frozen_weights(tmp_path):
    document = {"monitor": {"parameters": True, "update": True, "microbatch_gradients": True}}
    config = from_document(document, "probe.yaml", Overrides(output=str(tmp_path / "out")))
    model = Model()
    model.pair.weight.requires_grad_(False)
    with attach(model, None, config, step=0) as session:
        model(torch.ones(2, 3)).sum().backward()
        session.step()
    assert session.faults == []
    rows = rows_of(tmp_path / "out", 0)
    assert {row["name"] for row in rows if row["kind"] == "grad_reduced"} == {"last.weight", "last.bias"}
    assert {row["name"] for row in rows if row["kind"] == "parameter"} == {"pair.weight", "last.weight", "last.bias"}


def test_an_evaluation_in_the_middle_of_a_step_is_not_watched(tmp_path):
    config = from_document({"monitor": {"data": True}}, "probe.yaml", Overrides(output=str(tmp_path / "out")))
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with attach(model, optimizer, config, step=0) as session:
        loss = model(torch.ones(2, 3)).sum()
        with torch.no_grad():
            model(torch.zeros(7, 3))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.zeros(5, 3))
    assert session.faults == []
    rows = rows_of(tmp_path / "out", 0)
    assert {row["shape"][0] for row in rows if row["kind"] == "activation"} == {2}
    assert [row["sum"] for row in rows if row["name"] == "samples"] == [2.0]
