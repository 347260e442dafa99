"""A stub launcher, recipes that call it in the manners of the real ones, and the runner's own command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
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
if os.environ.get("STUB_TRAINS"):
    # One process of the script, through the kit's runner where it was asked for, but with nothing armed.
    import subprocess
    words = sys.argv[1:]
    at = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    arguments = iter(words[at + 1:])
    kept = [word for word in arguments if not (word in {{"--msprobe-config", "--msprobe-output", "--msprobe-device"}}
                                               and next(arguments))]
    runner = ["-m", "msprobe_megatron.run"] if words[at - 1] == "msprobe_megatron.run" else []
    quiet = {{k: v for k, v in os.environ.items() if not k.startswith("MSPROBE")}}
    sys.exit(subprocess.run([sys.executable, *runner, words[at], *kept], env=quiet).returncode)
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


# A training script with the manners of Megatron 0.6 in saving: at intervals, at the end, at exits without looking for
# --save, and its pointer to the newest.
TRAINER = """
import argparse, os, sys
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("--save", "--load", "--wandb-project", "--wandb-save-dir"):
    parser.add_argument(name)
for name in ("--train-iters", "--save-interval", "--exit-interval", "--exit-duration-in-mins"):
    parser.add_argument(name, type=int)
for name in ("--log-progress", "--exit-signal-handler", "--finetune"):
    parser.add_argument(name, action="store_true")
args = parser.parse_known_args()[0]
POINTER = "latest_checkpointed_iteration.txt"

def save(iteration):
    folder = os.path.join(args.save, f"iter_{iteration:07d}", "mp_rank_00")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "model_optim_rng.pt"), "w") as file:
        file.write(f"weights of the short job at {iteration}")
    with open(os.path.join(args.save, POINTER), "w") as file:
        file.write(str(iteration))

if args.save:
    assert args.save_interval
if args.log_progress:
    assert args.save is not None
    with open(os.path.join(args.save, "progress.txt"), "a") as file:
        file.write("Starting job")
if args.wandb_project:
    os.makedirs(args.wandb_save_dir or os.path.join(args.save, "wandb"), exist_ok=True)
iteration = 0
if args.load and not args.finetune and os.path.exists(os.path.join(args.load, POINTER)):
    iteration = int(open(os.path.join(args.load, POINTER)).read())
while iteration < args.train_iters:
    iteration += 1
    if args.exit_signal_handler and iteration == 3 or args.exit_duration_in_mins and iteration == 4:
        save(iteration)
        break
    if args.save and iteration % args.save_interval == 0:
        save(iteration)
    if args.exit_interval and iteration % args.exit_interval == 0:
        if args.save:
            save(iteration)
        break
if args.save and iteration and iteration % args.save_interval:
    save(iteration)
with open("trained.txt", "w") as file:
    file.write(f"{iteration} of {args.train_iters}, saved to {args.save}")
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
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MSPROBE", "HCCL"))}
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
