"""Rehearses the recipes of a ModelLink or MindSpeed-LLM checkout on CPU, by `launch` or without the kit.

The recipes are untouched: `--rehearse` makes them fit this machine. Megatron lies in the checkout, as the installation
tells; MindSpeed and the packages of the host's requirements.txt are found on PYTHONPATH, or, as the two hosts want
different ones, on MODELLINK_PACKAGES and MINDSPEED_LLM_PACKAGES.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.jobs.hosts.megatron_lm import Finished
from tests.unit.hosts.launching.stub import RECIPES, ROOT, RUNNER, SHIMS

WORLD = 2
PROBE = "steps: [0, 2]\ndump: {level: L0, task: statistics}\n"
# As a rehearsal's processes begin, without a recipe.
_IMPORT = """
import pathlib
from msprobe_megatron.job.devices import megatron_on_cpu
from msprobe_megatron.hosts.rehearsal.finding import needed_by, offer

megatron_on_cpu.install()
offer(needed_by(pathlib.Path()))
import {package}
"""


@dataclass(frozen=True)
class Host:
    """A checkout and the name of its package."""

    checkout: Path
    package: str

    def environment(self) -> dict[str, str]:
        """That of a user in whose environment the kit and the host's requirements are installed."""
        beside = (os.environ.get(name) for name in (f"{self.package.upper()}_PACKAGES", "PYTHONPATH"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE")}
        programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        return {**clean, "PATH": programs, "PYTHONPATH": os.pathsep.join(filter(None, beside))}

    def require(self) -> None:
        """Skip, naming it, where a package of the host is not there; any other fault is a failure."""
        if not (self.checkout / "megatron/core").is_dir():
            pytest.skip(f"{self.checkout} has no megatron/: copy the release that it names into it; not trained")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _IMPORT.format(package=self.package)],
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

    def links(self, folder: Path) -> Path:
        """A folder with links to what is in the checkout: what a job writes beside its script does not land in it."""
        place = folder / "checkout"
        place.mkdir(parents=True)
        for path in self.checkout.iterdir():
            if path.name not in (".git", "logs", "probe_out"):
                (place / path.name).symlink_to(path)
        return place

    def state(self) -> str:
        """What git says about the checkout, and the recipes and sources in it."""
        words = ["git", "-C", str(self.checkout), "status", "--porcelain", "--untracked-files=normal"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def rehearse(self, recipe: Path, folder: Path, overlay: str, *, kit: bool) -> Finished:
        """Run a recipe of the checkout to its end, as its README tells to, on two processes."""
        place, name = self.links(folder), recipe.relative_to(self.checkout)
        probe = folder / "probe.yaml"
        probe.write_text(PROBE)
        command = ["bash", str(RUNNER), "--rehearse", str(WORLD), "--overlay", overlay, "--config", str(probe)]
        command += ["--output", str(folder / "out"), "--", str(name)]
        environment = self.environment()
        if not kit:
            # The same flags, put there by the shims alone; no probe file, so nothing of the kit is armed.
            environment |= {"MSPROBE_REHEARSE": str(WORLD), "MSPROBE_DEVICE": "cpu", "MSPROBE_OVERLAY": overlay}
            environment |= {"MSPROBE_RECIPES": str(RECIPES), "MSPROBE_SHIMS": str(SHIMS)}
            environment["PATH"] = f"{SHIMS}{os.pathsep}{environment['PATH']}"
            command = ["bash", str(name)]
        return self.run(command, place, environment)

    def line(self, line: str, folder: Path) -> Finished:
        """Run a line of a page as a user types it, in the checkout."""
        text = line.replace("/path/to/msprobe_megatron", str(ROOT)).replace("~/msprobe_megatron", str(ROOT))
        return self.run(["bash", "-c", text], folder, self.environment())

    def run(self, command: list[str], folder: Path, environment: dict[str, str]) -> Finished:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
            check=False,
        )
        return Finished.of(done.returncode, done.stdout)
