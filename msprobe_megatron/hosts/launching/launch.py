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
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.config.save_flags import Taken, refuse_hidden, without_save
from msprobe_megatron.hosts.launching.changes import changes, remarks
from msprobe_megatron.hosts.launching.command_line import Launch, LaunchError, read
from msprobe_megatron.hosts.launching.overlays import Overlay, find
from msprobe_megatron.hosts.rehearsal import rewrite

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def say(text: str) -> None:
    """One line on standard output, where a recipe's `| tee` puts it into the log."""
    tell([text], sys.stdout)


def tell(lines: Sequence[str], stream: TextIO | None = None) -> None:
    """Lines on standard error, or another stream; in a dry run they are left to the runner, past any redirection."""
    text = "".join(f"msprobe: {line}\n" for line in lines)
    dry = _dry_run()
    if dry is not None:
        with (dry / "said").open("a", encoding="utf-8") as file:
            file.write(text)
        return
    print(text, end="", file=stream or sys.stderr, flush=True)


def _dry_run() -> Path | None:
    """Where the runner waits for what a dry run says; None in any other."""
    status = os.environ.get("MSPROBE_STATUS")
    return Path(status) if status and os.environ.get("MSPROBE_DRY_RUN") else None


def overlay_from_environment() -> Overlay | None:
    """The overlay that the runner chose, if any."""
    name = os.environ.get("MSPROBE_OVERLAY")
    return find(name, Path(os.environ.get("MSPROBE_RECIPES", "."))) if name else None


def overlay_for(launch: Launch) -> Overlay | None:
    """The overlay that the runner chose if it is for this script; one that is not is named."""
    overlay = overlay_from_environment()
    if overlay is not None and launch.script not in overlay.scripts:
        say(f"overlay {overlay.name} is for {', '.join(overlay.scripts)}, not for {launch.script}: not applied")
        return None
    return overlay


def overlaid(launch: Launch, overlay: Overlay, folder: Path, rehearses: bool) -> tuple[Launch, list[str]]:
    """The launch without what would save over the recipe's checkpoints, and the overlay's words; all changes are said.

    A rehearsal leaves more out than that, and names it.
    """
    small, keeps = bool(os.environ.get("MSPROBE_SMALL")), os.environ.get("MSPROBE_KEEP_SAVE") == "1"
    refuse_hidden(launch.arguments)
    notes = [] if _dry_run() else overlay.notes_on(launch.arguments)
    for sentence in (*overlay.drift(launch.arguments), *notes):
        say(f"overlay {overlay.name}: {sentence}")
    added = overlay.arguments(launch.arguments, small=small)
    kept: list[str] = list(launch.arguments)
    taken: list[Taken] = []
    if overlay.cuts(small) and not keeps and not rehearses:
        kept, taken = without_save(launch.arguments, folder)
    new = [word for word in kept if word not in launch.arguments]
    tell(changes(overlay, launch.arguments, [*added, *new], taken, os.environ))
    if overlay.cuts(small) and not rehearses:
        tell(remarks(overlay, launch.arguments, added, keeps))
    return replace(launch, arguments=tuple(kept)), added


def kit_words(launch: Launch) -> list[str]:
    """The kit's own flags, from the environment, unless the recipe gives them."""
    words: list[str] = []
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
        launch = rewrite.read_loosely(words) if ranks else read(words)
    except LaunchError as error:
        if ranks:
            raise ConfigError(f"--rehearse: {error}; accepted: a recipe that starts a SCRIPT.py or -m MODULE") from None
        say(f"the launcher's command line is left as it is: {error}")
        return [*program, *words], environment
    if not launch.is_python:
        say(f"{launch.target} is started with --no-python, past the kit")
        return [*program, *words], environment
    folder = Path.cwd() if launch.is_module else Path(launch.target).resolve().parent
    added: list[str] = []
    overlay = overlay_for(launch)
    if overlay is not None:
        launch, added = overlaid(launch, overlay, folder, rehearses=bool(ranks))
        environment.update(overlay.environment)
    elif _dry_run():
        say("no overlay is applied: the recipe's own flags are not changed")
    added += kit_words(launch)
    if not ranks:
        if not _dry_run():
            rewrite.require_accelerator(launch, added, folder)
        return [*program, *launch.words(added)], environment
    refuse_hidden(launch.arguments)
    host = rewrite.host_of(folder, launch.target)
    small = rewrite.rehearse(launch, added, rewrite.ranks_of(ranks), host, folder)
    for sentence in small.said:
        say(sentence)
    return [*program, *small.words()], {**environment, **rewrite.environment()}


def _end_dry_run(status: Path) -> NoReturn:
    """End the recipe where it would have launched: no line of it that comes after this one is run."""
    (status / "dry").touch()
    # The runner gave the recipe a session of its own.
    for group in {os.getsid(0), os.getpgrp()}:
        os.killpg(group, signal.SIGKILL)
    raise SystemExit(0)


def run(program: Sequence[str], words: Sequence[str]) -> int:
    """Start the real launcher and wait for it; its exit code is also left in $MSPROBE_STATUS."""
    argv, environment = command(program, words)
    dry = _dry_run()
    if dry is not None:
        _end_dry_run(dry)
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
    """Entry point of the shims: the real program and how many of its own words there are, then the arguments."""
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
