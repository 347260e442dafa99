"""The hot switch in real jobs: every rank changes on the same step; nonsense changes nothing and stops nothing."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from msprobe_megatron.config import ConfigError, Overrides, RankSelection, StepSelection, load
from msprobe_megatron.config.control_orders import Order, order_of, parse_order
from msprobe_megatron.config.selection import Span
from msprobe_megatron.job.control import Control, leader
from msprobe_megatron.run_directory.directory import read_events
from msprobe_megatron.topology.coordinates import Coordinates
from tests.support.forked import run_forked

_STEPS = 18


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def train(config, out):
    """Eighteen steps in lockstep; between some of them, somebody at a terminal types."""
    from msprobe_megatron import attach

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(model, optimizer, load(config, Overrides(output=out)))
    control = f"{out}/control.json"
    for step in range(_STEPS):
        model(torch.ones(2, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            _type(step, out, control)
        if dist.get_rank() == 1 and step == 7:
            session._control.request(next=1, level="L1")
            session._control.request(next=1, level="L1")
    session.close()
    dist.destroy_process_group()
    return {"steps": session.steps_recorded, "faults": session.faults}


def _type(step, out, control):
    if step == 0:
        assert main(["ctl", out, "--steps", "3-4", "--level", "mix"]) == 0
    elif step in (4, 5, 6):
        text = {4: "not json", 5: '{"level": "L9"}', 6: '{"steps": "8-2"}'}[step]
        with open(control, "w") as file:
            file.write(text)
    elif step == 11:
        assert main(["ctl", out, "--next", "2"]) == 0
    elif step == 14:
        assert main(["ctl", out, "--monitor", "off"]) == 0


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    root = tmp_path_factory.mktemp("control")
    (root / "probe.yaml").write_text("steps: none\ndump: {level: L0}\n")
    ranks = run_forked(2, train, str(root / "probe.yaml"), str(root / "out"))
    return root / "out", ranks


def test_all_ranks_record_the_same_steps_and_no_others(job):
    _, ranks = job
    assert ranks[0]["faults"] == ranks[1]["faults"] == []
    assert ranks[0]["steps"] == ranks[1]["steps"]
    # what rank 1 asks after step 7 reaches the leader before step 8 or 9; asked twice is asked once
    by_request = {10, 11} & set(ranks[0]["steps"])
    assert len(by_request) == 1
    assert sorted(set(ranks[0]["steps"]) - by_request) == [3, 4, 14, 15]


def test_each_at_the_level_that_was_ordered(job):
    out, ranks = job
    run = open_run(out)
    rows = run.rows().aggregate("step, rank, bool_or(name like '%/torch.relu%') as calls, bool_or(name = 'first') as m")
    seen = {(step, rank): (calls, modules) for step, rank, calls, modules in rows.fetchall()}
    expected = {3: (True, True), 4: (True, True), 10: (True, False), 11: (True, False), 14: (False, True)}
    for step in ranks[0]["steps"]:
        assert seen[step, 0] == seen[step, 1] == expected.get(step, (False, True)), step


def test_nonsense_is_told_and_changes_nothing(job):
    out, _ = job
    said = [event["text"] for event in read_events(out) if event["event"] == "control" and event["rank"] == 0]
    wrong = [text for text in said if text.endswith("nothing changes")]
    for text, words in zip(wrong, ("is not JSON", "'L9' is not known", "ends before it begins"), strict=False):
        assert words in text
    assert wrong[3:] == ["from step 17: monitor off: the probe file has no section for it; nothing changes"]
    assert any("from step 3: steps 3-4 at level mix" in text for text in said)


def test_steps_none_is_not_a_failure(job):
    out, _ = job
    assert all(facts["ledger"]["not_happened"] == [] for facts in open_run(out).ranks.values())


def alone(config, out):
    from msprobe_megatron import attach

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, load(config, Overrides(output=out))) as session:
        for step in range(6):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if step == 1:
                main(["ctl", out, "--dump", "off"])
            if step == 3:
                main(["ctl", out, "--dump", "on", "--level", "L1"])
        return session.steps_recorded


def test_one_process_needs_no_store_and_obeys_at_once(tmp_path):
    (tmp_path / "probe.yaml").write_text("dump: {level: L0}\n")
    assert run_forked(1, alone, str(tmp_path / "probe.yaml"), str(tmp_path / "out")) == [[0, 1, 4, 5]]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "is not a mapping"),
        ({}, "orders nothing"),
        ({"stepps": "1"}, "unknown key (did you mean steps?)"),
        ({"steps": "1", "next": 2}, "stands beside steps"),
        ({"next": 0}, "is out of range"),
        ({"next": True}, "is not a whole number"),
        ({"level": "debug"}, "is not known; accepted: L0, L1, mix"),
        ({"dump": "no"}, "is not a boolean"),
        ({"dump": False, "level": "L0"}, "stands beside steps or a level"),
    ],
)
def test_orders_are_read_strictly(document, words):
    with pytest.raises(ConfigError, match="control.json") as error:
        parse_order(document, "control.json")
    assert words in str(error.value)


def test_an_order_survives_the_way_through_the_store():
    order = order_of({"next": 3, "level": "mix"}).starting(200)
    assert order.steps == StepSelection((Span(200, 202),)) and order.describe() == "steps 200-202 at level mix"
    assert parse_order(json.loads(json.dumps(order.as_dict())), "store") == order
    assert Order(dump=False).describe() == "dump off"


def test_ctl_refuses_what_is_no_run_and_no_order(tmp_path, capsys):
    assert main(["ctl", str(tmp_path), "--next", "2"]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["ctl", str(tmp_path)]) == 2
    assert "orders nothing" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "huge"])
def test_a_file_that_is_none_holds_nobody_up(tmp_path, kind):
    import os

    path, said = tmp_path / "control.json", []
    if kind == "link":
        (tmp_path / "other").write_text('{"dump": false}')
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text('{"steps": "1' + " " * 70_000 + '"}')
    control = Control(tmp_path, Coordinates(), RankSelection(), lambda text, event: said.append(text))
    began = time.monotonic()
    assert [control.apply_due(step, lambda order: True) for step in (0, 1)] == [False, False]
    assert time.monotonic() - began < 30 and len(said) == 1 and said[0].endswith("nothing changes")


def test_the_lowest_rank_that_records_leads():
    where = Coordinates(rank=3, world=4, tp=1, tp_size=2, pp=1, pp_size=2)
    assert leader(where, RankSelection()) == 0
    assert leader(where, RankSelection(axes=(("pp", StepSelection((Span(1, 1),))),))) == 2
    assert leader(where, RankSelection(StepSelection((Span(3, 3),)))) == 3
