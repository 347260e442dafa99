"""Runs a training script on CPU, with stand-ins: what a rehearsal's launcher starts in each process.

A package that is neither installed nor stood in for ends the job with one sentence.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from msprobe_megatron.run import main as run
from msprobe_megatron.run import split


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``python -m msprobe_megatron.rehearsal``, with the arguments of ``msprobe_megatron.run``."""
    words = sys.argv[1:] if argv is None else argv
    found = split(words)
    # A module is looked for from the current directory.
    folder = Path(found[1]).resolve().parent if found is not None and not found[0] else Path.cwd()

    from msprobe_megatron.hosts.rehearsal.finding import needed_by, offer
    from msprobe_megatron.job.devices import BackendError, megatron_on_cpu

    try:
        # Before the stand-ins: whether there is an accelerator is asked of the real packages.
        megatron_on_cpu.install()
    except BackendError as error:
        _end(str(error))
    offer(needed_by(folder))
    try:
        run(words)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package == "msprobe_megatron":
            raise
        target = found[1] if found is not None else "the script"
        _end(
            f"{target} imports {error.name}, which {sys.executable} does not have and nothing stands in for; accepted:"
            f" what the host's own installation asks for{_remedy(package, folder / 'requirements.txt')}"
        )


def _remedy(package: str, requirements: Path) -> str:
    if package == "pkg_resources":
        # Part of setuptools until 80; no requirements.txt of the hosts names it.
        return ": pip install 'setuptools<81'"
    return f": pip install -r {requirements}" if requirements.is_file() else f", pip install {package} among it"


def _end(sentence: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"msprobe: rehearsal: {sentence}", file=sys.stderr, flush=True)
        if os.environ.get("MSPROBE_STATUS"):
            # The launcher says many lines about a child that failed; the runner repeats ours after them.
            Path(os.environ["MSPROBE_STATUS"], "reason").write_text(sentence, encoding="utf-8")
    raise SystemExit(2)


if __name__ == "__main__":
    main()
