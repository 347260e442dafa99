"""A rehearsal from beginning to end: recipe, real launcher, two processes, a host that cannot live without its NPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

RUNNER = Path(__file__).resolve().parents[4] / "scripts/msprobe_run.sh"
# The host's package needs torch_npu and Apex; its script reads Megatron's flags and trains the demo's GPT with them.
HOST = """import apex.optimizers
import torch
import torch_npu
import torch_npu.contrib.transfer_to_npu

assert torch.ones(2).npu().sum() == 2 and torch.npu.is_available()
"""
SCRIPT = """import argparse
import sys
import modellink
from msprobe_megatron.demo.pretrain_gpt import main

parser = argparse.ArgumentParser()
for name in ("tokenizer-type", "split", "eval-iters", "eval-interval", "num-workers", "log-interval"):
    parser.add_argument(f"--{name}", required=True)
for name in ("distributed-backend", "use-fused-rmsnorm"):
    parser.add_argument(f"--{name}", nargs="?")
parser.add_argument("--mock-data", action="store_true", required=True)
_, sys.argv[1:] = parser.parse_known_args()
main()
"""
RECIPE = """#!/bin/bash
DATA_PATH="your data path"
torchrun --nproc_per_node 8 --nnodes 4 --node_rank 3 --master_addr 10.0.0.1 --master_port 6000 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 \\
    --micro-batch-size 4 --global-batch-size 512 --train-iters 5000 --use-fused-rmsnorm --use-mc2 \\
    --data-path $DATA_PATH \\
    | tee logs/train.log
"""


def checkout(folder, script=SCRIPT):
    for name in ("modellink", "megatron/training", "mindspeed"):
        (folder / name).mkdir(parents=True)
    # megatron itself is the installed one: a folder without __init__ would be found beside it.
    (folder / "modellink/__init__.py").write_text(HOST)
    (folder / "pretrain_gpt.py").write_text(script)
    (folder / "recipe.sh").write_text(RECIPE)
    (folder / "probe.yaml").write_text("steps: [0, 4]\ndump: {level: L0, task: statistics}\n")


def rehearse(folder):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE")}
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return subprocess.run(
        ["bash", str(RUNNER), "--rehearse", "--config", "probe.yaml", "--output", "out", "--", "recipe.sh"],
        cwd=folder,
        env={**clean, "MSPROBE_PYTHON": sys.executable, "PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def test_an_untouched_recipe_is_trained_and_recorded(tmp_path):
    checkout(tmp_path)
    done = rehearse(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    run = json.loads((tmp_path / "out/run.json").read_text())
    assert run["sizes"]["tp"] == 2
    for rank in (0, 1):
        rows = pq.read_table(tmp_path / f"out/step_000004/rank_{rank:05d}/records.parquet").to_pylist()
        assert {"activation", "gradient", "parameter"} <= {row["kind"] for row in rows}
    assert (tmp_path / "recipe.sh").read_text() == RECIPE


def test_a_package_that_nothing_stands_in_for_is_named(tmp_path):
    checkout(tmp_path, "import modellink\nimport sentencepiece_of_the_host.model\n")
    (tmp_path / "requirements.txt").touch()
    done = rehearse(tmp_path)
    assert done.returncode != 0
    # Once where it happened, and once more below what the launcher says about a child that failed.
    first, last = [line for line in done.stdout.splitlines() if "nothing stands in for;" in line]
    assert "pretrain_gpt.py imports sentencepiece_of_the_host" in first
    assert last == done.stdout.splitlines()[-1]
    assert f"pip install -r {tmp_path / 'requirements.txt'}" in last
    assert "ModuleNotFoundError" not in done.stdout


def test_pkg_resources_is_of_setuptools_and_of_no_requirements_file(tmp_path):
    checkout(tmp_path, 'import modellink\nraise ModuleNotFoundError("No module", name="pkg_resources.extern")\n')
    (tmp_path / "requirements.txt").touch()
    done = rehearse(tmp_path)
    assert done.returncode != 0
    last = done.stdout.splitlines()[-1]
    assert "imports pkg_resources.extern" in last and "pip install 'setuptools<81'" in last
    assert "requirements.txt" not in last
