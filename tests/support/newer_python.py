"""An environment with Python 3.12 or newer, which megatron-core has asked for since 0.17.

Made once, in ``.matrix/`` of the checkout, with the torch of `scripts/setup_env.sh` and what the kit and tests need;
releases of megatron-core go beside it, one folder each. ``python -m tests.support.newer_python`` makes it and prints
its interpreter; MSPROBE_NEWER_PYTHON names the Python to make it with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
MATRIX = ROOT / ".matrix"
LEAST = (3, 12)
_MINUTES = 15
# What `megatron.training` and `megatron.core` import without asking for it.
_TRAINING = ("einops", "regex", "packaging", "setuptools<81", "wheel")


class NotAvailable(Exception):
    """There is no such Python, or no package index: the reason is the message."""


def _candidates() -> Iterator[str]:
    yield from filter(None, [os.environ.get("MSPROBE_NEWER_PYTHON")])
    yield sys.executable
    for name in ("python3.12", "python3.13"):
        yield from filter(None, [shutil.which(name)])
    versions = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    yield from sorted(str(path) for path in versions.glob("3.1[23]*/bin/python"))


def _suits(python: str) -> bool:
    code = f"import sys, venv; sys.exit(not {LEAST} <= sys.version_info[:2] <= (3, 13))"
    done = subprocess.run([python, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MINUTES * 60)
    if done.returncode:
        raise NotAvailable(f"pip install {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1:]}")


def _torch() -> str:
    """The version of torch that `scripts/setup_env.sh` installs."""
    found = re.search(r"^_SETUP_TORCH=(\S+)", (ROOT / "scripts/setup_env.sh").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def environment() -> Path:
    """The interpreter of the environment; made on the first call. Raises `NotAvailable`."""
    folder = MATRIX / "newer_python"
    python, stamp = folder / "bin/python", folder / ".complete"
    if stamp.is_file():
        return python
    chosen = next(filter(_suits, _candidates()), None)
    if chosen is None:
        raise NotAvailable("no Python 3.12 or 3.13 was found; MSPROBE_NEWER_PYTHON names one")
    MATRIX.mkdir(exist_ok=True)
    subprocess.run([chosen, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True)
    try:
        _pip(python, f"torch=={_torch()}+cpu")
    except NotAvailable:
        _pip(python, f"torch=={_torch()}")
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    _pip(
        python,
        f"torch=={_torch()}",
        *needed,
        "pytest>=8",
        "hypothesis>=6",
        "einops",
        "regex",
        "packaging",
        "setuptools<81",
    )
    _pip(python, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    stamp.touch()
    return python


def release(version: str) -> Path:
    """The folder of a release of megatron-core, to be put on PYTHONPATH. Raises `NotAvailable`."""
    python, folder = environment(), MATRIX / version
    if not (folder / "megatron").is_dir():
        _pip(python, "--no-deps", "--target", str(folder), f"megatron-core=={version}")
    return folder


if __name__ == "__main__":
    print(environment())
