"""A session that sleeps: nothing of it is on the model, nothing is seen or counted; awake it goes on as before."""

import copy

import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, from_document
from msprobe_megatron.job.session.patch_scopes import ROUTER
from tests.jobs.integrations.rows import rows, steps
from tests.jobs.integrations.test_plain_torch import net, train
from tests.support.forked import run_forked

_JOB = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 --global-batch-size 2"
    " --train-iters 6 --lr 1e-2 --vocab-size 32"
)
PARTS = {
    "L0": {"dump": {"level": "L0"}},
    "mix": {"dump": {"level": "mix"}},
    "monitor": {"monitor": {"activations": True, "gradients": True, "optimizer": True}},
}


def armed(model, optimizer, out, document):
    return attach(model, optimizer, from_document(document, "test", Overrides(output=str(out))), step=0)


def made(seed=0):
    model = net(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def traces(model, optimizer):
    """What the kit has on a model, in the order of `vars`."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "_call_impl" in vars(m)) for m in model.modules()]
    return hooks, "step" in vars(optimizer), len(ROUTER.sessions())


@pytest.mark.parametrize("part", PARTS)
def test_asleep_nothing_is_left_and_awake_it_goes_on(tmp_path, part):
    plain = train(*made(), iterations=6)
    model, optimizer = made()
    untouched = traces(model, optimizer)
    session = armed(model, optimizer, tmp_path / "out", PARTS[part])
    awake = traces(model, optimizer)
    assert awake != untouched
    losses = train(model, optimizer, iterations=2)[0]
    session.sleep()
    assert traces(model, optimizer) == untouched
    session.sleep()
    resumed = copy.deepcopy(plain)  # what a whole run gives, for the bits
    losses += train_on(model, optimizer, 2, 2)
    session.wake()
    session.wake()
    assert traces(model, optimizer)[1:] == awake[1:]
    losses += train_on(model, optimizer, 4, 2)
    session.close()
    session.wake()
    assert traces(model, optimizer) == untouched
    assert losses == resumed[0]
    assert all(torch.equal(a, b.detach()) for a, b in zip(resumed[1], model.parameters(), strict=True))
    assert session.faults == []
    if part != "monitor":
        assert steps(tmp_path / "out") == [0, 1, 2, 3]  # four were seen; those of the sleep have no number
        kinds = [{(r["kind"], r["name"], r["io"], r["microbatch"]) for r in rows(tmp_path / "out", n)} for n in (1, 3)]
        assert kinds[0] == kinds[1]
    else:
        assert session.ledger()["monitor"]["steps"] == 4


def train_on(model, optimizer, first, iterations):
    """Steps `first` and following of `train`."""
    losses = []
    for iteration in range(first, first + iterations):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.linspace(-1, 1, 12).reshape(3, 4) * (1 + iteration + 0.1 * part)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def test_put_to_sleep_within_a_step_it_keeps_what_it_saw(tmp_path):
    model, optimizer = made()
    untouched = traces(model, optimizer)
    session = armed(model, optimizer, tmp_path / "out", PARTS["mix"])
    model(torch.ones(3, 4)).sum().backward()
    session.sleep()
    assert traces(model, optimizer) == untouched
    optimizer.step()
    session.wake()
    train(model, optimizer, iterations=1)
    session.close()
    assert session.faults == []
    (cut, *_), whole = rows(tmp_path / "out", 0), rows(tmp_path / "out", 1)
    assert cut["name"] == "model"
    assert {r["microbatch"] for r in whole if r["phase"] == "forward"} == {0, 1}


def two_by_turns(out):
    """Two sessions of one Megatron model, each awake every second step; what each has recorded, and the losses."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    sessions = []

    def ready(chunks, optimizer):
        for name in ("L0", "monitor"):
            sessions.append(armed(chunks, optimizer, out / name, PARTS[name]))
            sessions[-1].sleep()
        sessions[0].wake()

    def after(iteration):
        now = iteration % 2
        sessions[1 - now].sleep()
        sessions[now].wake()

    counter = iter(range(1, 100))
    result = run(_JOB.split(), Callbacks(ready=ready, step=lambda step: after(next(counter))))
    for session in sessions:
        session.close()
    assert all(session.faults == [] for session in sessions)
    return result.losses, sessions[0].steps_recorded, sessions[1].ledger()["monitor"]["steps"]


def plain_job():
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    return run(_JOB.split()).losses


def test_two_sessions_of_a_megatron_model_take_turns(tmp_path):
    ((losses, recorded, watched),) = run_forked(1, two_by_turns, tmp_path)
    (plain,) = run_forked(1, plain_job)
    assert losses == plain
    assert recorded == [0, 1, 2]
    assert watched == 3
