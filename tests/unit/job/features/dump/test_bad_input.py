"""What a dump is not made for: it is told or left out, training goes on as it was, and what was written is whole."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.config import Overrides, from_document


@dataclass
class Answer:
    hidden: torch.Tensor
    again: list
    words: str = "text"


class Dataclass(nn.Module):
    def forward(self, x):
        return Answer(x * 2, [x + 1, None])


class Generator(nn.Module):
    consumed = 0

    def forward(self, x):
        for n in range(3):
            Generator.consumed += 1
            yield x * n


class Nothing(nn.Module):
    def forward(self, x):
        return None


class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.inner(x)
        raise ValueError("of the model")


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.data, self.generator, self.nothing, self.raising = Dataclass(), Generator(), Nothing(), Raising()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        answer = self.data(self.linear(x))
        made = self.generator(answer.hidden)
        first = next(made)
        assert self.nothing(x) is None
        try:
            self.raising(x)
        except ValueError:
            first = first + 1
        return torch.tanh(answer.hidden) + first


def train(probed, tmp_path, level="mix", steps=2, **dump):
    torch.manual_seed(0)
    Generator.consumed = 0
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = None
    if probed:
        config = from_document({"dump": {"level": level, **dump}}, "here", Overrides(output=tmp_path / "out"))
        session = attach(model, optimizer, config)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    if session is not None:
        session.close()
    return [p.detach().clone() for p in model.parameters()], Generator.consumed, session


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_modules_that_give_dataclasses_generators_nothing_or_raise(tmp_path, level):
    plain, consumed, _ = train(False, tmp_path)
    probed, consumed_too, session = train(True, tmp_path, level)
    assert session.faults == [] and consumed == consumed_too
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    rows = open_run(tmp_path / "out").rows()
    assert {step for (step,) in rows.project("step").distinct().fetchall()} == {0, 1}
    if level != "L1":
        paths = {path for (path,) in rows.filter("name = 'data' and io = 'output'").project("path").fetchall()}
        assert paths == {"hidden", "again.0"}
        assert not rows.filter("name = 'nothing' and io = 'output'").fetchall()
        assert rows.filter("name = 'raising' and io = 'input'").fetchall()
        assert not rows.filter("name = 'raising' and io = 'output'").fetchall()


def test_calls_after_a_module_that_raised_belong_to_who_made_them(tmp_path):
    train(True, tmp_path, "L1")
    names = {name for (name,) in open_run(tmp_path / "out").rows().project("name").distinct().fetchall()}
    assert "raising.inner/torch.nn.functional.linear.0" in names
    assert "model/torch.tanh.0" in names and not any(name.startswith("raising/") for name in names)


def test_a_name_that_no_call_has_is_told(tmp_path):
    _, _, session = train(True, tmp_path, "L1", list=["tanh", "no_such_api"])
    assert [text for text in session.not_happened() if "no_such_api" in text] == [
        "dump.list: 'no_such_api' matched nothing on this rank"
    ]


def test_a_model_that_raises_ends_the_step_and_what_was_seen_is_written(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Raising())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = from_document({"dump": {"level": "mix"}}, "here", Overrides(output=tmp_path / "out"))
    with attach(model, optimizer, config) as session, pytest.raises(ValueError, match="of the model"):
        model(torch.ones(2, 4))
    assert session.faults == []
    rows = open_run(tmp_path / "out").rows()
    assert rows.filter("name = '0' and io = 'output'").fetchall()
    assert torch.overrides._get_current_function_mode() is None
    model[0](torch.ones(1, 4))  # no hook is left
