"""Trains the recipes of a ModelLink or MindSpeed-LLM checkout on CPU, by scripts/msprobe_run.sh or without the kit.

What a user fills in (cards, paths, port) is filled in; the model is shrunk by an overlay; torch_npu, torchair and
Apex are stand-ins. Megatron lies in the checkout, as the installation tells; MindSpeed and the packages of the host's
requirements.txt are found on PYTHONPATH, or, as the two hosts want different ones, on MODELLINK_PACKAGES and
MINDSPEED_LLM_PACKAGES.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from msprobe_megatron.rehearsal.finding import STAND_INS
from tests.hosts.megatron_lm import Finished
from tests.ports import free_port
from tests.recipes.stub import RECIPES, RUNNER, SHIMS

WORLD = 2
TINY = {
    "title": "the smallest model that has every part",
    "match": {"script": ["pretrain_gpt.py"]},
    "append": ["--mock-data"],
    "override": {
        **{"train-iters": 3, "num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4},
        **{"seq-length": 32, "max-position-embeddings": 32, "global-batch-size": 4, "micro-batch-size": 1},
        **{"tokenizer-type": "NullTokenizer", "vocab-size": 4399, "lr": "1e-3", "min-lr": "1e-4", "eval-iters": 1},
        **{"num-workers": 0, "split": "60,30,10", "distributed-backend": "gloo", "msprobe-device": "cpu"},
    },
    "probe": {"steps": [0, 2], "dump": {"level": "L0", "task": "statistics"}},
}
# What else is large, by the overlay's model.
SMALLER: dict[str, dict[str, object]] = {
    "deepseek2_lite": {
        **{"num-experts": 4, "moe-router-topk": 2, "moe-intermediate-size": 64, "padded-vocab-size": 4400},
        **{"kv-lora-rank": 16, "qk-rope-head-dim": 8, "qk-nope-head-dim": 16, "v-head-dim": 16},
    },
}
# Such as CKPT_LOAD_DIR="your model ckpt path": what a user has to put there is one word.
_PLACEHOLDER = re.compile(r'^([A-Z_]+)="?[\w.<>]+ [\w .<>]+"?$', re.MULTILINE)


def filled_in(text: str, folder: Path, without: tuple[str, ...] = ()) -> str:
    """A recipe with what its user has to say: cards, port and paths; tensor parallel where it has no pipeline."""
    pipeline = (found := re.search(r"^PP=(\d+)", text, re.MULTILINE)) is not None and int(found[1]) > 1
    said: dict[str, object] = {"GPUS_PER_NODE": WORLD, "NPUS_PER_NODE": WORLD, "NNODES": 1, "NODE_RANK": 0}
    said |= {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    experts = re.search(r"^EP=", text, re.MULTILINE) is not None
    said |= {"TP": 1 if pipeline or experts else WORLD, "PP": WORLD if pipeline else 1, "EP": WORLD}
    text = _PLACEHOLDER.sub(lambda found: f'{found[1]}="{folder / found[1].lower()}"', text)
    for name, value in said.items():
        text = re.sub(rf"^{name}=.*$", f'{name}="{value}"', text, flags=re.MULTILINE)
    # No data but the mock's, and no operators that nothing stands in for.
    flags = "|".join(("data-path .*", *without))
    return re.sub(rf"^\s*--(?:{flags}) *\\\n", "", text, flags=re.MULTILINE)


@dataclass(frozen=True)
class Host:
    """A checkout, the name of its package, and flags for operators that only a device has."""

    checkout: Path
    package: str
    # The exchange is inside the matmul.
    without: tuple[str, ...] = ("use-mc2",)

    def environment(self) -> dict[str, str]:
        beside = (os.environ.get(name) for name in (f"{self.package.upper()}_PACKAGES", "PYTHONPATH"))
        path = [str(self.checkout), str(STAND_INS), *filter(None, beside)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE")}
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MSPROBE_PYTHON": sys.executable}
        programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        return {**clean, **settings, "PATH": programs, "PYTHONPATH": os.pathsep.join(path)}

    def require(self) -> None:
        """Skip, naming it, where a package of the host is not there; any other fault is a failure."""
        if not (self.checkout / "megatron/core").is_dir():
            pytest.skip(f"{self.checkout} has no megatron/: copy the release that it names into it; not trained")
        code = f"from msprobe_megatron.backends import cpu; cpu.install(); import {self.package}"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=self.checkout,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if "ModuleNotFoundError" in done.stderr:
            pytest.skip(f"{self.package} cannot be imported, not trained: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr[-2000:]

    def train(self, recipe: Path, folder: Path, *, kit: bool, more: dict[str, object] | None = None) -> Finished:
        """Run a recipe of the checkout to its end, from the checkout, as its README tells to."""
        folder.mkdir(parents=True)
        copy, overlay = folder / recipe.name, folder / "tiny.yaml"
        copy.write_text(filled_in(recipe.read_text(), folder, self.without))
        overlay.write_text(json.dumps({**TINY, "override": {**TINY["override"], **(more or {})}}))
        environment, out = self.environment(), folder / "out"
        command = ["bash", str(RUNNER), "--overlay", str(overlay), "--output", str(out), "--", str(copy)]
        if not kit:
            # The same flags, put there by the shims alone; no probe file, so nothing of the kit is armed.
            environment |= {"MSPROBE_OVERLAY": str(overlay), "MSPROBE_RECIPES": str(RECIPES)}
            environment |= {"MSPROBE_SHIMS": str(SHIMS), "PATH": f"{SHIMS}{os.pathsep}{environment['PATH']}"}
            command = ["bash", str(copy)]
        (self.checkout / "logs").mkdir(exist_ok=True)
        done = subprocess.run(
            command,
            cwd=self.checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
            check=False,
        )
        return Finished.of(done.returncode, done.stdout)
