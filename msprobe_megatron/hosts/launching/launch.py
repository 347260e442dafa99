"""What the shims on PATH call in place of `torchrun` and `python -m torch.distributed.launch`.

Reads what `msprobe_run.sh` or `msprobe_env.sh` left in the environment, rewrites the command line, starts the real
launcher as a child, passes signals on to it, and leaves its exit code where the runner finds it: recipes end in
`| tee`, whose exit code is tee's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.launching import rehearsal
from msprobe_megatron.launching.command_line import Launch, LaunchError, read
from msprobe_megatron.overlays import Overlay, find

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def say(text: str) -> None:
    """One line on standard output, where a recipe's `| tee` puts it into the log."""
    print(f"msprobe: {text}", flush=True)


def overlay_from_environment() -> Overlay | None:
    """The overlay that the runner chose, if any."""
    name = os.environ.get("MSPROBE_OVERLAY")
    return find(name, Path(os.environ.get("MSPROBE_RECIPES", "."))) if name else None


def appended(launch: Launch, overlay: Overlay | None) -> list[str]:
    """What is put at the end of the script's arguments: the overlay's flags, then the kit's own."""
    words: list[str] = []
    if overlay is not None:
        if launch.script not in overlay.scripts:
            say(f"overlay {overlay.name} is for {', '.join(overlay.scripts)}, not for {launch.script}: not applied")
        else:
            for sentence in overlay.drift(launch.arguments):
                say(f"overlay {overlay.name}: {sentence}")
            words += overlay.arguments(launch.arguments, small=bool(os.environ.get("MSPROBE_SMALL")))
    for name, variable in (("config", "MSPROBE_CONFIG"), ("output", "MSPROBE_OUTPUT"), ("device", "MSPROBE_DEVICE")):
        value = os.environ.get(variable)
        if value and not any(word.partition("=")[0] == f"--msprobe-{name}" for word in launch.arguments):
            words += [f"--msprobe-{name}", value]
    return words


def command(program: Sequence[str], words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The real command and its environment for a launcher that was called with `words`."""
    environment = dict(os.environ)
    shims = environment.pop("MSPROBE_SHIMS", None)
    if shims is not None:
        # What the job starts in its turn is not re-routed again.
        kept = [part for part in environment.get("PATH", "").split(os.pathsep) if part != shims]
        environment["PATH"] = os.pathsep.join(kept)
    ranks = environment.get("MSPROBE_REHEARSE")
    try:
        launch = rehearsal.read_loosely(words) if ranks else read(words)
    except LaunchError as error:
        if ranks:
            raise ConfigError(f"--rehearse: {error}; accepted: a recipe that starts a SCRIPT.py or -m MODULE") from None
        say(f"the launcher's command line is left as it is: {error}")
        return [*program, *words], environment
    if not launch.is_python:
        say(f"{launch.target} is started with --no-python, past the kit")
        return [*program, *words], environment
    overlay = overlay_from_environment()
    if overlay is not None:
        environment.update(overlay.environment)
    added = appended(launch, overlay)
    if not ranks:
        return [*program, *launch.words(added)], environment
    folder = Path.cwd() if launch.is_module else Path(launch.target).resolve().parent
    host = rehearsal.host_of(folder, launch.target)
    small = rehearsal.rehearse(launch, added, rehearsal.ranks_of(ranks), host, folder)
    for sentence in small.said:
        say(sentence)
    return [*program, *small.words()], {**environment, **rehearsal.environment()}


def run(program: Sequence[str], words: Sequence[str]) -> int:
    """Start the real launcher and wait for it; its exit code is also left in $MSPROBE_STATUS."""
    argv, environment = command(program, words)
    child = subprocess.Popen(argv, env=environment)
    status = os.environ.get("MSPROBE_STATUS")
    if status:
        Path(status, f"{child.pid}.pid").touch()

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    code = child.wait()
    code = 128 - code if code < 0 else code
    if status:
        Path(status, f"{child.pid}.code").write_text(f"{code}\n")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the shims: the real program and how many of its own words there are, then the arguments.

    Example: ``python -m msprobe_megatron.launching.launch 1 /usr/bin/torchrun --nnodes 1 train.py``.
    """
    count, *rest = sys.argv[1:] if argv is None else list(argv)
    split = int(count)
    try:
        return run(rest[:split], rest[split:])
    except (ConfigError, OSError) as error:
        say(str(error))
        status = os.environ.get("MSPROBE_STATUS")
        if status:
            # The recipe's pipe hides this exit code too.
            Path(status, "refused").touch()
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
