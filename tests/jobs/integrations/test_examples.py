"""scripts/examples: each trains under two-rank DDP and the kit; that no bit changes is tested in test_plain_torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.integrations.rows import faults, probe, rows, steps

EXAMPLES = Path(__file__).resolve().parents[3] / "scripts/examples"
NAMES = ("resnet", "yolo", "dit")


def train(name, *words):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py"), *words], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"step (\d+) loss (\S+)", done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_example(name, tmp_path):
    config = probe(tmp_path, "[0, 2]")
    losses = train(name, "--steps", "3", "--probe", str(config))
    assert len(losses) == 3
    assert steps(tmp_path / "out") == [0, 2]
    for rank in (0, 1):
        assert faults(tmp_path / "out", rank) == ([], [])
    found = rows(tmp_path / "out", 2, rank=1)
    assert {r["kind"] for r in found} >= {"activation", "gradient", "parameter", "grad_reduced"}
    assert json.loads((tmp_path / "out/run.json").read_text())["world"] == 2
