"""The published msprobe in an environment of its own, which sees the torch that is here."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


class PeerMissing(Exception):
    """The peer could not be installed; the text says why."""


def make_peer(folder: Path) -> Path:
    """Install mindstudio-probe into a fresh environment in `folder`; returns its bin directory."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, timeout=120)
    python = folder / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    # torch and numpy come from here: a second torch would be minutes and gigabytes.
    Path(where, "host.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "mindstudio-probe==26.2.0"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise PeerMissing(f"pip could not install mindstudio-probe: {done.stderr.strip()[-300:]}")
    return folder / "bin"


def call(peer: Path, *argv: str, cwd: Path | None = None) -> str:
    """Run a command of the peer's environment and return what it printed."""
    done = subprocess.run(
        [str(peer / argv[0]), *argv[1:]], capture_output=True, text=True, timeout=300, check=False, cwd=cwd
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr
