"""Between the command line and the model: other people's patches, faults of the kit, jobs without a model."""

import json
import sys
import types

import pytest

from msprobe_megatron.config.flags import Flags
from msprobe_megatron.job.patching.patch_set import Patch, PatchSet
from tests.jobs.integrations.rows import probe, steps
from tests.jobs.integrations.test_frameworks import tiny_megatron
from tests.support.forked import run_forked


def fake_training(chunks, make_optimizer):
    """megatron.training.training with the one function the kit looks for."""
    module = types.ModuleType("megatron.training.training")

    def setup_model_and_optimizer(*args, **kwargs):
        return chunks, make_optimizer(), None

    module.setup_model_and_optimizer = setup_model_and_optimizer
    sys.modules["megatron.training.training"] = module
    return module


def job(folder, replaced):
    from msprobe_megatron.job.session.arming import arm

    chunks, make_optimizer, train = tiny_megatron()
    module = fake_training(chunks, make_optimizer)
    armed = arm(Flags(config=str(folder / "probe.yaml")), install=False)
    assert module.setup_model_and_optimizer.__msprobe_patch__
    if replaced:
        module.setup_model_and_optimizer = lambda: (chunks, make_optimizer(), None)
    _, optimizer, _ = module.setup_model_and_optimizer()
    for index in range(2):
        train(optimizer, index)
    armed.session.close()
    return armed.session.steps_recorded


@pytest.mark.parametrize("replaced", [False, True], ids=["ours", "replaced by others"])
def test_the_model_is_found_even_where_setup_was_replaced(tmp_path, replaced):
    probe(tmp_path, "[1]")
    (recorded,) = run_forked(1, job, tmp_path, replaced)
    assert (recorded, steps(tmp_path / "out")) == ([1], [1])


def broken(folder, strict):
    from msprobe_megatron.job.session import session as module
    from msprobe_megatron.job.session.arming import arm

    def attach(*args, **kwargs):
        raise KeyError("a bug of the kit")

    module.attach = attach
    said = []
    sys.stderr = types.SimpleNamespace(write=said.append, flush=lambda: None)
    armed = arm(Flags(config=str(folder / "probe.yaml"), strict=strict), install=False)
    try:
        armed.model_ready([], None)
    except KeyError:
        return "stopped"
    return "".join(said)


def test_a_fault_while_attaching_does_not_stop_the_job(tmp_path):
    probe(tmp_path)
    (said,) = run_forked(1, broken, tmp_path, False)
    assert "could not attach: KeyError: 'a bug of the kit'; training continues without the probe" in said
    assert run_forked(1, broken, tmp_path, True) == ["stopped"]


def test_sets_of_patches_that_overlap_in_time_leave_nothing_behind(monkeypatch):
    module = types.ModuleType("megatron_overlap")

    def work():
        return []

    module.work = work
    monkeypatch.setitem(sys.modules, "megatron_overlap", module)

    def wrap(original, events):
        return lambda: [events, *original()]

    patch = Patch("overlap", ("megatron_overlap:work",), wrap, phase="recording", why="test")
    first, second = PatchSet([patch], "first"), PatchSet([patch], "second")
    for _ in range(3):
        first.apply()
        second.apply()
        assert module.work() == ["second", "first"]
        first.revert()
        assert module.work() == ["second"]
        first.apply()
        assert module.work() == ["first", "second"]
        second.revert()
        first.revert()
        assert module.work is work


def test_an_unknown_release_gives_a_sentence(monkeypatch):
    from msprobe_megatron.patches.schedules import PATCHES

    from msprobe_megatron.job.patching.attributes import PatchError

    module = types.ModuleType("megatron.core.pipeline_parallel.schedules")
    module.forward_step = lambda batch, network: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    forward_step = [patch for patch in PATCHES if patch.id == "schedules.forward_step"]
    with pytest.raises(PatchError, match="has no parameter 'model': this release is not supported"):
        PatchSet(forward_step, None).apply()
    others = [patch for patch in PATCHES if patch.phase == "functions"]
    with pytest.raises(PatchError, match=r"cannot patch .*forward_backward_no_pipelining.*megatron-core is"):
        PatchSet(others, None).apply()


def job_with_yaml_cfg(folder):
    """Megatron's `--yaml-cfg` throws the parsed command line away and returns namespaces made of the YAML file."""
    import argparse

    from msprobe_megatron.job.session.arming import arm

    chunks, make_optimizer, train = tiny_megatron()
    module = fake_training(chunks, make_optimizer)
    arguments = types.ModuleType("megatron.training.arguments")

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        parser = argparse.ArgumentParser()
        parser.add_argument("--yaml-cfg")
        parser = extra_args_provider(parser) if extra_args_provider else parser
        parser.parse_args()
        return types.SimpleNamespace(language_model=types.SimpleNamespace(num_layers=2), yaml_cfg="gpt.yaml")

    arguments.parse_args = parse_args
    sys.modules["megatron.training.arguments"] = arguments
    sys.argv = ["pretrain_gpt.py", "--yaml-cfg", "gpt.yaml", "--msprobe-config", str(folder / "probe.yaml")]
    armed = arm(install=False)
    variables = types.ModuleType("megatron.training.global_vars")
    variables._GLOBAL_ARGS = arguments.parse_args()
    sys.modules["megatron.training.global_vars"] = variables
    _, optimizer, _ = module.setup_model_and_optimizer()
    for index in range(2):
        train(optimizer, index)
    armed.session.close()
    return armed.session.steps_recorded


def test_yaml_cfg_of_megatron_does_not_hide_the_flags(tmp_path):
    probe(tmp_path, "[1]")
    (recorded,) = run_forked(1, job_with_yaml_cfg, tmp_path)
    assert recorded == [1]
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["arguments"]["language_model"] == {"num_layers": 2}
