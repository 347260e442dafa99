"""A real launch on a machine that has no accelerator: one sentence, and only where that is certain."""

import pytest

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.hosts.launching.command_line import Launch
from msprobe_megatron.hosts.rehearsal.rewrite import accelerator, require_accelerator


def machine_without(monkeypatch):
    """No card for torch, whatever machine the test runs on."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if hasattr(torch, "accelerator"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr("msprobe_megatron.hosts.rehearsal.rewrite._installed", lambda module: module == "torch")


@pytest.mark.parametrize("host", ["modellink", "mindspeed_llm", "megatron"])
def test_a_real_launch_without_accelerator_is_refused(tmp_path, monkeypatch, host):
    machine_without(monkeypatch)
    (tmp_path / host).mkdir()
    (tmp_path / "dev").mkdir()
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    launch = Launch((), str(script), ("--lr", "1"))
    with pytest.raises(ConfigError, match=r"no NPU and no GPU .* accepted: launch --rehearse"):
        require_accelerator(launch, [], tmp_path, tmp_path / "dev")


@pytest.mark.parametrize("reason", ["nvidia0", "davinci3", "device named", "torch_npu", "cuda", "other", "own script"])
def test_a_launch_that_may_find_an_accelerator_is_not(tmp_path, monkeypatch, reason):
    import torch

    machine_without(monkeypatch)
    (tmp_path / "dev").mkdir()
    if reason != "own script":
        (tmp_path / "modellink").mkdir()
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    if reason in ("nvidia0", "davinci3"):
        (tmp_path / "dev" / reason).touch()
    if reason == "torch_npu":
        monkeypatch.setattr("msprobe_megatron.hosts.rehearsal.rewrite._installed", lambda module: True)
    if reason == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if reason == "other":
        if not hasattr(torch, "accelerator"):
            pytest.skip("this torch knows no other accelerators")
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    added = ["--msprobe-device", "npu"] if reason == "device named" else []
    require_accelerator(Launch((), str(script), ()), added, tmp_path, tmp_path / "dev")


def test_a_machine_without_accelerator_is_one_sentence(bench):
    if accelerator() is not None:
        pytest.skip("this machine has an accelerator")
    (bench.folder / "modellink").mkdir()
    (bench.folder / "pretrain_gpt.py").touch()
    recipe = bench.recipe("torchrun --nproc_per_node 8 pretrain_gpt.py --lr 1 | tee log.txt\n")
    done = bench.run("--config", "probe.yaml", "--", recipe)
    assert (done.returncode, bench.called()) == (2, [])
    (sentence,) = [line for line in done.stdout.splitlines() if line.startswith("msprobe:")]
    assert "no NPU and no GPU was found on this machine, and ModelLink's pretrain_gpt.py needs one" in sentence
    assert "--rehearse" in sentence
    done = bench.run("--config", "probe.yaml", "--device", "npu", "--", recipe)
    assert len(bench.called()) == 1
