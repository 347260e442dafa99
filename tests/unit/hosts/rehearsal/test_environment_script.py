"""scripts/rehearsal_env.sh: what it refuses before anything is installed, and the lines it prints at its end."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "scripts/rehearsal_env.sh"
# Answers every question of the script and installs nothing.
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
    "-m venv "*) mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python" ;;
esac
exit 0
"""


@pytest.fixture
def checkouts(tmp_path):
    """Makes a host of a name, MindSpeed and Megatron-LM; returns the options that name them."""

    def make(host):
        for folder in (f"host/{host}", "mindspeed/mindspeed", "megatron/megatron/training"):
            (tmp_path / folder).mkdir(parents=True)
        for file in ("host/requirements.txt", "mindspeed/requirements.txt"):
            (tmp_path / file).write_text("einops\ntorch_npu==2.1\n")
        (tmp_path / "python").write_text(PYTHON)
        (tmp_path / "python").chmod(0o755)
        words = [f"--{name}={tmp_path / name}".split("=") for name in ("host", "mindspeed", "megatron", "python")]
        return [*sum(words, []), "--env", str(tmp_path / "env")]

    return make


def run(folder, *words):
    environment = {**os.environ, "CALLS": str(folder / "calls")}
    command = ["bash", str(SCRIPT), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def calls(folder):
    path = folder / "calls"
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("host", "overlay", "recipe"),
    [
        ("modellink", "modellink/llama2_7b", "examples/llama2/pretrain_llama2_7b_ptd.sh"),
        ("mindspeed_llm", "mindspeed_llm/qwen3_8b", "examples/mcore/qwen3/pretrain_qwen3_8b_4K_ptd.sh"),
    ],
)
@pytest.mark.parametrize("there", [True, False], ids=["the recipe is there", "it has moved"])
def test_it_ends_with_a_line_that_rehearses(checkouts, tmp_path, host, overlay, recipe, there):
    words = checkouts(host)
    if there:
        (tmp_path / "host" / recipe).parent.mkdir(parents=True)
        (tmp_path / "host" / recipe).touch()
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--rehearse --overlay {overlay} -- {recipe if there else 'RECIPE'}\n" in done.stdout
    assert (tmp_path / "host/megatron/training").is_dir()
    assert (tmp_path / "env/requirements.txt").read_text() == "einops\n"
    assert f"--no-build-isolation --no-deps --editable {tmp_path / 'mindspeed'}" in calls(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--host", "nowhere", "neither modellink/ nor mindspeed_llm/"),
        ("--mindspeed", "host", "has no mindspeed"),
        ("--megatron", "host", "core_r0.6.0 for ModelLink"),
        ("--env", "host", "is no virtual environment"),
        ("--host", None, "--host: no value is given"),
        ("--hots", "host", "accepted: --host, --mindspeed"),
    ],
)
def test_refused_before_anything_is_installed(checkouts, tmp_path, option, value, complaint):
    words = [*checkouts("modellink"), option]
    if value is not None:
        words.append(str(tmp_path / value))
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "pip" not in calls(tmp_path) and not (tmp_path / "env").exists()
