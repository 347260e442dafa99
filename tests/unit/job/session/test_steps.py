"""The states of a session: which transition is legal, what an illegal one does, what each event does in each state."""

import itertools
import threading

import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.job.features.feature import NEVER
from msprobe_megatron.job.session.faults import ProbeFault
from msprobe_megatron.job.session.steps import OFF, TRANSITIONS, IllegalTransition, Lifecycle, State
from tests.jobs.integrations.rows import steps
from tests.jobs.integrations.test_plain_torch import net, train
from tests.support.forked import run_forked

IDLE, IN_STEP, RECORDING, SLEEPING, FAULTED, DISABLED, CLOSED = State


@pytest.mark.parametrize(("before", "target"), list(itertools.product(State, State)))
def test_every_transition_is_made_refused_or_ignored(before, target):
    lifecycle = Lifecycle(before)
    if target in TRANSITIONS[before]:
        assert lifecycle.move(target) is before and lifecycle.state is target
    elif before in OFF:
        assert lifecycle.move(target) is before and lifecycle.state is before
    else:
        with pytest.raises(IllegalTransition, match=f"from '{before.value}' to '{target.value}'"):
            lifecycle.move(target)
        assert lifecycle.state is before


def test_the_table():
    """Written out once more: a change of the table is a decision."""
    assert {(before.name, target.name) for before, targets in TRANSITIONS.items() for target in targets} == {
        ("IDLE", "IN_STEP"),
        ("IN_STEP", "RECORDING"),
        ("IN_STEP", "IDLE"),
        ("RECORDING", "IDLE"),
        ("RECORDING", "IN_STEP"),
        ("SLEEPING", "SLEEPING"),
        ("SLEEPING", "IDLE"),
        *((state, "SLEEPING") for state in ("IDLE", "IN_STEP", "RECORDING")),
        *((state, "FAULTED") for state in ("IDLE", "IN_STEP", "RECORDING", "SLEEPING")),
        *((state.name, "CLOSED") for state in State if state is not CLOSED),
        ("FAULTED", "DISABLED"),
    }


def reachable(state):
    found, new = set(), {state}
    while new:
        found |= new
        new = {target for one in new for target in TRANSITIONS[one]} - found
    return found


def test_nothing_leads_back_from_a_fault_and_every_state_to_the_end():
    assert reachable(IDLE) == set(State)
    assert all(CLOSED in reachable(state) for state in State)
    assert all(reachable(state) <= OFF for state in OFF)


def armed(tmp_path, **document):
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = from_document({"dump": {"level": "L0"}, **document}, "test", Overrides(output=str(tmp_path / "out")))
    return model, optimizer, attach(model, optimizer, config, step=0)


def test_the_states_of_a_plain_loop(tmp_path):
    model, optimizer, session = armed(tmp_path, steps="1")
    seen = [session.state]
    for _ in range(3):
        loss = model(torch.ones(3, 4)).sum()
        seen.append(session.state)
        loss.backward()
        optimizer.step()
        seen.append(session.state)
    assert seen == [IDLE, IN_STEP, IDLE, RECORDING, IDLE, IN_STEP, IDLE]
    assert session._next_step == NEVER
    session.sleep()
    assert session.state is SLEEPING
    session.wake()
    assert session.state is IDLE
    session.close()
    session.close()
    session.wake()
    session.sleep()
    assert session.state is CLOSED and session.faults == []
    assert steps(tmp_path / "out") == [1]


def test_an_illegal_transition_is_a_fault_and_training_goes_on(tmp_path, capsys):
    reference = net(0)
    expected = train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), iterations=3)
    model, optimizer, session = armed(tmp_path)
    session._move(RECORDING)  # no step has begun
    assert session.state is FAULTED
    losses = train(model, optimizer, iterations=3)
    assert session.state is DISABLED
    session.close()
    assert losses[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(losses[1], expected[1], strict=True))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "internal error" in line]
    assert line.endswith(
        "probe disabled by an internal error in session: IllegalTransition: from 'idle' to 'recording';"
        " training continues without it"
    )


def test_an_illegal_transition_stops_a_strict_job(tmp_path):
    _, _, session = armed(tmp_path, strict=True)
    with pytest.raises(ProbeFault, match="IllegalTransition"):
        session._move(RECORDING)
    session.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_a_fault_of_another_thread_ends_with_the_step(tmp_path, recorded):
    model, optimizer, session = armed(tmp_path, steps="0-9" if recorded else "9")
    loss = model(torch.ones(3, 4)).sum()
    thread = threading.Thread(target=session.fault, args=(RuntimeError("elsewhere"), "writer"))
    thread.start()
    thread.join()
    assert session.state is FAULTED
    loss.backward()
    optimizer.step()
    assert session.state is DISABLED
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    train(model, optimizer, iterations=2)
    assert session._steps.last == 2, "steps are counted on: none is reported as never reached"
    session.close()
    assert session.faults == ["writer: RuntimeError: elsewhere"]


def on_one_rank_of_two(out):
    """Every event, on a rank that the probe file does not select."""
    torch.distributed.init_process_group("gloo")
    model = net(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = from_document({"ranks": [0], "dump": {"level": "L0"}}, "test", Overrides(output=str(out)))
    session = attach(model, optimizer, config, step=0)
    before = session.state
    session.forward_begin(model)  # as integrations do that have events of their own
    session.optimizer_begin()
    session.optimizer_end()
    session.step()
    session.sleep()
    session.wake()
    session.close()
    torch.distributed.destroy_process_group()
    return before.name, session.faults


def test_a_rank_that_is_not_selected_sleeps(tmp_path):
    assert run_forked(2, on_one_rank_of_two, tmp_path / "out") == [("IDLE", []), ("SLEEPING", [])]
