"""The adapters against the frameworks' own classes, where these are installed: as much of each as a CPU can import."""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.jobs.hosts.conftest import FRAMEWORKS, folder_of
from tests.jobs.integrations.rows import faults, probe, rows, steps
from tests.jobs.integrations.test_frameworks import tiny_megatron
from tests.support.forked import run_forked


def installed(name):
    folder = folder_of(name)
    if folder is None:
        pytest.skip(f"{name} is not installed: {FRAMEWORKS[name]} not tested")
    return folder


def load(name, path):
    """A module of a framework by its file: the package around it asks for a GPU's packages."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check(tmp_path, step, recorded):
    assert recorded == [step]
    assert faults(tmp_path / "out") == ([], [])
    assert {row["microbatch"] for row in rows(tmp_path / "out", step)} == {0, 1, None}


def bridge(folder, package):
    """Events are fired as megatron/bridge/training/train.py does, by its own manager with its own context."""
    from msprobe_megatron.hosts.integrations.megatron_bridge import ProbeCallback

    module = load("bridge_callbacks", package / "training/callbacks.py")
    callback = ProbeCallback(str(folder / "probe.yaml"))
    manager = module.normalize_callbacks([callback])
    chunks, make_optimizer, train = tiny_megatron()
    optimizer = make_optimizer()
    state = SimpleNamespace(train_state=SimpleNamespace(step=100))

    def fire(event):
        if module.should_fire(manager, event):
            context = module.CallbackContext(state, chunks, manager.user_state, optimizer=optimizer)
            manager.fire(event, context)

    fire("on_train_start")
    for index in range(3):
        fire("on_train_step_start")
        train(optimizer, index)
        state.train_state.step += 1
        fire("on_train_step_end")
    fire("on_train_end")
    return callback.session.steps_recorded


def test_megatron_bridge_itself(tmp_path):
    package = installed("megatron.bridge")
    probe(tmp_path, "[101]")
    (recorded,) = run_forked(1, bridge, tmp_path, package)
    check(tmp_path, 101, recorded)


def swift(folder, package):
    """A callback beside one of ms-swift's own, called by the events that its trainer calls, in its order."""
    from msprobe_megatron.hosts.integrations import ms_swift

    own = load("swift_callbacks_base", package / "megatron/callbacks/base.py").MegatronCallback
    table = {"own": own}
    ms_swift.register(table)
    chunks, make_optimizer, train = tiny_megatron()
    state, optimizer = SimpleNamespace(iteration=100), make_optimizer()
    trainer = SimpleNamespace(wrapped_models=chunks, optimizer=optimizer, args=None, state=state)
    ms_swift.ProbeCallback.__init__.__defaults__ = (str(folder / "probe.yaml"),)
    callbacks = [table[name](trainer) for name in ("own", "msprobe")]

    def call_event(event, **kwargs):
        for callback in callbacks:
            getattr(callback, event)(**kwargs)

    for event, method in inspect.getmembers(own, inspect.isfunction):
        if event.startswith("on_") and event not in ("on_train_begin", "on_train_end"):
            call_event(event, **{name: None for name in inspect.signature(method).parameters if name != "self"})
    call_event("on_train_begin")
    for index in range(3):
        call_event("on_step_begin")
        train(optimizer, index)
        state.iteration += 1
        call_event("on_step_end")
    call_event("on_train_end")
    return callbacks[1].session.steps_recorded


def test_ms_swift_itself(tmp_path):
    package = installed("swift")
    probe(tmp_path, "[101]")
    (recorded,) = run_forked(1, swift, tmp_path, package)
    check(tmp_path, 101, recorded)


def test_ms_swifts_trainer_has_what_the_callback_reads():
    package = installed("swift")
    source = ast.parse((package / "megatron/trainers/base.py").read_text())
    attributes = {
        node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert {"wrapped_models", "optimizer", "state", "iteration"} <= attributes
    assert "megatron_callbacks_map" in (package / "megatron/callbacks/__init__.py").read_text()


def verl(folder):
    """verl's own engine with a model that Megatron made: its zeroing and its step."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    from msprobe_megatron.hosts.integrations.verl import attach_engine

    chunks, make_optimizer, train = tiny_megatron()
    engine = MegatronEngine.__new__(MegatronEngine)
    engine.module, engine.optimizer, engine.mode = chunks, make_optimizer(), None
    session = attach_engine(engine, str(folder / "probe.yaml"), tag="actor")
    engines = SimpleNamespace(step=engine.optimizer_step, zero_grad=engine.optimizer_zero_grad)
    for index in range(3):
        train(engines, index)
    session.close()
    return session.steps_recorded


def test_verl_itself(tmp_path):
    installed("verl")
    probe(tmp_path, "[1]")
    (recorded,) = run_forked(1, verl, tmp_path)
    assert recorded == [1]
    assert faults(tmp_path / "out/actor") == ([], [])
    assert steps(tmp_path / "out/actor") == [1]


def test_slime_itself():
    package = installed("slime")
    words = ast.parse((package / "backends/megatron_utils/initialize.py").read_text())
    (called,) = [
        node
        for node in ast.walk(words)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "custom_init"
    ]
    from msprobe_megatron.hosts.integrations.slime import init

    # One argument, as its hook is called; its model is made later, by the very function that the kit waits for.
    inspect.signature(init).bind(*called.args)
    model = Path(package / "backends/megatron_utils/model.py").read_text()
    assert "import OptimizerConfig, get_megatron_optimizer" in model
    assert "model_chunks=model" in model
