"""Callbacks of other frameworks: against stand-ins that call them as the frameworks do, and the real class if there."""

import importlib.util
import os
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.jobs.integrations.rows import faults, probe, rows, steps
from tests.support.forked import run_forked


def tiny_megatron(optimizer_step=lambda chunks, optimizer, step: None):
    """Chunks and optimizer of a one-process Megatron job, and a function that trains one iteration."""
    from msprobe_megatron.lab.demo import launch, transformer
    from msprobe_megatron.lab.demo.arguments import parse
    from msprobe_megatron.lab.demo.data import Batches
    from msprobe_megatron.lab.demo.model import build_chunks
    from msprobe_megatron.lab.demo.optimizer import build_optimizer
    from msprobe_megatron.lab.demo.train import _forward_backward
    from msprobe_megatron.topology import coordinates

    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    args = parse([*flags.split(), "--global-batch-size", "2", "--train-iters", "3"])
    device = launch.prepare_device(args, "cpu")
    config = transformer.build_config(args)
    launch.start_groups(args)
    launch.seed_everything(1)
    chunks = build_chunks(args, config)
    batches = Batches(args, coordinates.current(), device)

    def train(optimizer, index):
        _forward_backward(args, chunks, optimizer, batches, index)
        return optimizer.step()

    return chunks, lambda: build_optimizer(args, config, chunks), train


def bridge(folder):
    """As Megatron-Bridge's train(): events with a context that holds state, model and optimizer."""
    from msprobe_megatron.hosts.integrations.megatron_bridge import ProbeCallback

    callback = ProbeCallback(str(folder / "probe.yaml"))
    chunks, make_optimizer, train = tiny_megatron()
    optimizer = make_optimizer()
    state = SimpleNamespace(train_state=SimpleNamespace(step=100))
    context = SimpleNamespace(state=state, model=chunks, optimizer=optimizer, user_state={})
    events = {name: getattr(callback, name, None) for name in ("on_train_start", "on_train_step_start", "on_train_end")}
    events["on_train_start"](context)
    for index in range(3):
        train(optimizer, index)
        state.train_state.step += 1
    events["on_train_end"](context)
    return callback.session.steps_recorded


def swift(folder):
    """As ms-swift's trainer: callbacks are made from a table, events are called by name."""
    from msprobe_megatron.hosts.integrations import ms_swift

    table = {}
    ms_swift.register(table)
    chunks, make_optimizer, train = tiny_megatron()
    trainer = SimpleNamespace(
        wrapped_models=chunks, optimizer=make_optimizer(), args=None, state=SimpleNamespace(iteration=100)
    )
    callback = table["msprobe"](trainer, str(folder / "probe.yaml"))
    for event in ("on_train_begin", "on_step_begin"):
        getattr(callback, event)()
    for index in range(3):
        train(trainer.optimizer, index)
        trainer.state.iteration += 1
        callback.on_step_end()
    callback.on_log(logs={})
    callback.on_train_end()
    return callback.session.steps_recorded


def slime(folder):
    """As slime: its hook is called once Megatron is initialised, then model and optimizer are built."""
    from msprobe_megatron.hosts.integrations import slime as adapter
    from msprobe_megatron.job.session import arming

    chunks, make_optimizer, train = tiny_megatron()
    import megatron.core.optimizer as module

    # Its own module has bound the function by name long before.
    own = types.ModuleType("slime_like_model")
    own.get_megatron_optimizer = module.get_megatron_optimizer
    sys.modules[own.__name__] = own
    adapter.init(SimpleNamespace(msprobe_config=str(folder / "probe.yaml")))
    assert own.get_megatron_optimizer is module.get_megatron_optimizer
    assert hasattr(own.get_megatron_optimizer, "__msprobe_patch__")
    optimizer = make_optimizer()
    for index in range(3):
        train(optimizer, index)
    session = arming.arm().session
    session.close()
    return session.steps_recorded


def verl(folder):
    """As verl: an engine with chunks and optimizer, and one of a reference model without an optimizer."""
    from msprobe_megatron.hosts.integrations.verl import attach_engine

    chunks, make_optimizer, train = tiny_megatron()
    optimizer = make_optimizer()
    engine = SimpleNamespace(module=chunks, optimizer=optimizer)
    session = attach_engine(engine, str(folder / "probe.yaml"), tag="actor")
    reference = attach_engine(SimpleNamespace(module=nn.Linear(2, 2)), str(folder / "probe.yaml"), tag="reference")
    for index in range(3):
        train(optimizer, index)
    session.close()
    reference.close()
    return [session.steps_recorded, reference.steps_recorded]


def only_the_first(folder):
    """A job of which one rank was started without the kit, as on a node where the wrapper was forgotten."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run

    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    argv = [*flags.split(), "--train-iters", "3", "--tensor-model-parallel-size", "2"]
    if os.environ["RANK"] == "0":
        argv += ["--msprobe-config", str(folder / "probe.yaml")]
    return run(argv).losses


def test_a_rank_without_the_kit_does_not_hang_the_others(tmp_path):
    probe(tmp_path, "[1]")
    first, second = run_forked(2, only_the_first, tmp_path)
    assert len(first) == 3
    assert first == second
    assert steps(tmp_path / "out") == [1]
    assert [path.name for path in (tmp_path / "out/step_000001").iterdir()] == ["rank_00000"]


@pytest.mark.parametrize("framework", [bridge, swift])
def test_callbacks_use_the_frameworks_own_steps(framework, tmp_path):
    probe(tmp_path, "[101]")
    (recorded,) = run_forked(1, framework, tmp_path)
    assert recorded == [101]
    assert faults(tmp_path / "out") == ([], [])
    assert {r["microbatch"] for r in rows(tmp_path / "out", 101)} == {0, 1, None}


def test_slime(tmp_path):
    probe(tmp_path, "[1]")
    (recorded,) = run_forked(1, slime, tmp_path)
    assert (recorded, steps(tmp_path / "out")) == ([1], [1])


def test_verl(tmp_path):
    probe(tmp_path, "[1]")
    (recorded,) = run_forked(1, verl, tmp_path)
    assert recorded == [[1], []]
    assert steps(tmp_path / "out/actor") == [1]


class Trainer:
    """Lightning's order of events: forward and backward run inside optimizer.step."""

    def __init__(self, model, accumulate):
        self.model, self.accumulate = model, accumulate
        self.strategy, self.global_step = SimpleNamespace(), 10
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]

    def fit(self, callback, batches):
        callback.on_train_start(self, self.model)
        for index, batch in enumerate(batches):
            callback.on_train_batch_start(self, self.model, batch, index)
            if (index + 1) % self.accumulate:
                self.model.training_step(batch).backward()
            else:
                self.optimizers[0].step(lambda batch=batch: self._closure(callback, batch))
                self.optimizers[0].zero_grad()
                self.global_step += 1
            callback.on_train_batch_end(self, self.model, None, batch, index)
        callback.on_train_end(self, self.model)

    def _closure(self, callback, batch):
        loss = self.model.training_step(batch)
        loss.backward()
        callback.on_before_optimizer_step(self, self.model, self.optimizers[0])
        return loss


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx=0):
        return self.layer(batch).square().mean()


def check_lightning(out):
    assert steps(out) == [11]
    assert faults(out) == ([], [])
    found = rows(out, 11)
    assert [r["microbatch"] for r in found if r["kind"] == "activation" and r["io"] == "output"] == [0, 1]
    (gradient,) = [r for r in found if r["kind"] == "grad_reduced" and r["name"] == "layer.weight"]
    assert gradient["absmax"] > 0


def test_lightning_stand_in(tmp_path):
    from msprobe_megatron.hosts.integrations.lightning import ProbeCallback

    torch.manual_seed(0)
    callback = ProbeCallback(str(probe(tmp_path, "[11]")))
    Trainer(Module(), accumulate=2).fit(callback, [torch.randn(3, 4) for _ in range(6)])
    check_lightning(tmp_path / "out")


REAL = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from msprobe_megatron.integrations.lightning import ProbeCallback

class Real(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 4)), batch_size=2)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
probe = ProbeCallback(sys.argv[1])
pl.Trainer(max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", devices=1,
           callbacks=[probe], **quiet).fit(Real(), data)
"""


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_itself(tmp_path):
    # In a process of its own: this one may have Megatron's emulation of CUDA, which Lightning takes for a GPU.
    words = [sys.executable, "-c", REAL, str(probe(tmp_path, "[1]"))]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "out") == [1]
    found = rows(tmp_path / "out", 1)
    assert [r["microbatch"] for r in found if r["kind"] == "activation" and r["io"] == "output"] == [0, 1]
    assert {r["kind"] for r in found} >= {"activation", "parameter", "grad_reduced"}
