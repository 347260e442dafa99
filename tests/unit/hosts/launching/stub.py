"""A stub launcher, recipes that call it in the manners of the real ones, and the runner's own command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNNER = ROOT / "scripts/msprobe_run.sh"
ENV = ROOT / "scripts/msprobe_env.sh"
RECIPES = ROOT / "scripts/recipes"
SHIMS = ROOT / "scripts/shims"

# Writes down how it was called, then behaves as it is told to.
_LAUNCHER = """#!{python} -S
import json, os, sys, time
with open(os.environ["STUB_OUT"], "a") as file:
    kept = {{k: v for k, v in os.environ.items() if k.startswith(("MSPROBE", "HCCL", "NCCL", "PATH"))}}
    file.write(json.dumps({{"argv": sys.argv[1:], "environment": kept, "cwd": os.getcwd()}}) + "\\n")
code = os.environ.get("STUB_CODE", "0")
if code == "wait":
    import signal
    def leave(number, frame):
        os._exit(100 + number)
    signal.signal(signal.SIGTERM, leave)
    open(os.environ["STUB_OUT"] + ".ready", "w").close()
    time.sleep(60)
sys.exit(int(code))
"""
# `python -m torch.distributed.launch` goes through this one; anything else to the real interpreter.
_PYTHON = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = torch.distributed.launch ]; then shift 2; exec "{torchrun}" "$@"; fi
exec "{python}" "$@"
"""


@dataclass(frozen=True)
class Called:
    """One call of the stub launcher."""

    argv: list[str]
    environment: dict[str, str]
    cwd: str


class Bench:
    """A folder with a stub launcher on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "calls.jsonl"
        self.stubs = folder / "bin with space"
        self.stubs.mkdir()
        self._program("torchrun", _LAUNCHER.format(python=sys.executable))
        text = _PYTHON.format(python=sys.executable, torchrun=self.stubs / "torchrun")
        self._program("python", text)
        self._program("python3", text)

    def _program(self, name: str, text: str) -> None:
        (self.stubs / name).write_text(text)
        (self.stubs / name).chmod(0o755)

    def recipe(self, text: str, name: str = "recipe.sh") -> Path:
        """Write a recipe."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MSPROBE")}
        path = f"{self.stubs}{os.pathsep}{clean['PATH']}"
        return {**clean, "PATH": path, "STUB_OUT": str(self.out), "MSPROBE_PYTHON": sys.executable, **more}

    def command(self, *words: object) -> list[str]:
        return [shutil.which("bash") or "bash", str(RUNNER), *map(str, words)]

    def run(self, *words: object, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Call msprobe_run.sh."""
        return self.call(self.command(*words), cwd, **more)

    def call(self, words: list[str], cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=cwd or self.folder,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def called(self) -> list[Called]:
        """What the stub was called with, oldest first."""
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        return [Called(**json.loads(line)) for line in lines]
