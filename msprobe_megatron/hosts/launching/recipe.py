"""Runs a recipe from beginning to end: what `scripts/msprobe_run.sh` does once it has found a Python.

The recipe is started as it is, in the caller's directory, with the shims in front of PATH. Its exit code is that of
the launcher it called, even where the recipe's own pipe into `tee` hides it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_megatron.config.document import read_document
from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.launching import rehearsal
from msprobe_megatron.launching.emit import emit
from msprobe_megatron.overlays import Overlay, all_overlays, find

_EXAMPLE = """\
examples:
  bash scripts/msprobe_run.sh --config probe.yaml -- examples/llama2/pretrain_llama2_7b_ptd.sh
  bash scripts/msprobe_run.sh --overlay modellink/llama2_7b -- examples/llama2/pretrain_llama2_7b_ptd.sh
  bash scripts/msprobe_run.sh --overlay modellink/llama2_7b --emit probed.sh -- examples/llama2/pretrain_llama2_7b.sh
  bash scripts/msprobe_run.sh --rehearse --overlay modellink/llama2_7b -- examples/llama2/pretrain_llama2_7b_ptd.sh
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the runner's own flags; what follows `--` (or the first word that is no flag) is the recipe."""
    parser = argparse.ArgumentParser(
        prog="msprobe_run.sh",
        description="Run an untouched launch recipe under the kit.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--overlay", metavar="NAME", help="HOST/MODEL of scripts/recipes, or a YAML file")
    parser.add_argument("--config", metavar="FILE", help="probe file (default: the overlay's)")
    parser.add_argument("--output", metavar="DIR", help="run directory (default: the probe file's)")
    parser.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or npu")
    parser.add_argument("--small", action="store_true", help="apply the overlay's `small` flags: fewer layers")
    parser.add_argument(
        "--rehearse",
        metavar="RANKS",
        nargs="?",
        const="2",
        help="on a machine without accelerator: train the recipe on RANKS processes of the CPU (default: 2), shrunk,"
        " with mock data and stand-ins for torch_npu and Apex",
    )
    parser.add_argument("--emit", metavar="OUT.sh", help="write a copy of the recipe with the kit in it; run nothing")
    parser.add_argument("--list", action="store_true", help="list the overlays")
    parser.add_argument("recipe", nargs=argparse.REMAINDER, metavar="-- RECIPE.sh ARGS")
    arguments = parser.parse_args(list(argv))
    if arguments.recipe[:1] == ["--"]:
        arguments.recipe = arguments.recipe[1:]
    if not arguments.recipe and not arguments.list:
        parser.error("no recipe is named; accepted: -- RECIPE.sh ARGS")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    root = Path(os.environ["MSPROBE_RECIPES"])
    try:
        if arguments.list:
            for overlay in all_overlays(root):
                print(f"{overlay.name:32} {overlay.title}")
            return 0
        return _run(arguments, root)
    except (ConfigError, OSError) as error:
        print(f"msprobe: {error}", file=sys.stderr, flush=True)
        return 2


def _run(arguments: argparse.Namespace, root: Path) -> int:
    recipe = Path(arguments.recipe[0])
    if not recipe.is_file():
        raise ConfigError(f"{recipe}: no such recipe; accepted: a shell script")
    overlay = find(arguments.overlay, root) if arguments.overlay else None
    if arguments.rehearse:
        _prepare_rehearsal(arguments)
    if overlay is None:
        hint = [other.name for other in all_overlays(root) if other.matches(str(recipe))]
        if hint:
            print(f"msprobe: an overlay fits this recipe: --overlay {' or '.join(hint)}", flush=True)
    if arguments.emit:
        return _emit(arguments, overlay, recipe)
    with tempfile.TemporaryDirectory(prefix="msprobe_") as folder:
        environment = _environment(arguments, overlay, Path(folder))
        code = _wait([_shell(recipe), *arguments.recipe], environment, Path(folder))
        return _verdict(code, Path(folder), recipe, launcher_counts=bool(arguments.rehearse))


def _prepare_rehearsal(arguments: argparse.Namespace) -> None:
    """Refuse what a rehearsal cannot be combined with, and a machine that can train the recipe itself."""
    rehearsal.ranks_of(arguments.rehearse)
    if arguments.emit:
        raise ConfigError("--emit: writes a copy for the real machine; accepted: --rehearse or --emit, not both")
    if arguments.device not in (None, "cpu"):
        raise ConfigError(f"--device: {arguments.device!r}: a rehearsal is on the CPU; accepted: cpu, or leave it away")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"--rehearse: torch is not installed in {sys.executable}; accepted: an environment with the host's packages"
            " and a torch for CPU"
        )
    found = rehearsal.accelerator()
    if found is not None:
        raise ConfigError(
            f"--rehearse: is for machines without accelerator, but {found}; accepted: run the recipe without"
            " --rehearse, or name an environment without it by MSPROBE_PYTHON"
        )
    arguments.device = "cpu"


def _environment(arguments: argparse.Namespace, overlay: Overlay | None, folder: Path) -> dict[str, str]:
    environment = dict(os.environ, MSPROBE_STATUS=str(folder))
    if overlay is not None:
        is_file = arguments.overlay.endswith((".yaml", ".yml"))
        environment["MSPROBE_OVERLAY"] = os.path.abspath(arguments.overlay) if is_file else overlay.name
        # What is to be known about --small is said to those who asked for it.
        for note in (note for note in overlay.notes if arguments.small or "--small" not in note):
            print(f"msprobe: overlay {overlay.name}: {note}", flush=True)
    config = _probe_file(arguments, overlay, folder)
    given = {"CONFIG": config, "OUTPUT": arguments.output, "DEVICE": arguments.device}
    for name, value in given.items():
        if value:
            # Recipes change directory; a path that was right here must stay right.
            environment[f"MSPROBE_{name}"] = value if name == "DEVICE" else os.path.abspath(value)
    if arguments.small:
        environment["MSPROBE_SMALL"] = "1"
    if arguments.rehearse:
        environment["MSPROBE_REHEARSE"] = arguments.rehearse
        _refuse_second_run(environment.get("MSPROBE_OUTPUT") or str(_content(config).get("output") or ""))
    return environment


def _probe_file(arguments: argparse.Namespace, overlay: Overlay | None, folder: Path) -> str:
    """The probe file that was named, else one made of the overlay's `probe` section."""
    if arguments.config:
        if not os.path.isfile(arguments.config):
            raise ConfigError(f"--config: {arguments.config}: no such file; accepted: a probe file")
        return str(arguments.config)
    if overlay is not None and overlay.probe:
        path = folder / f"{overlay.name.replace('/', '_')}.yaml"
        probe = _probe_of_rehearsal(overlay.probe) if arguments.rehearse else dict(overlay.probe)
        path.write_text(json.dumps(probe, indent=2) + "\n")
        return str(path)
    if os.environ.get("MSPROBE_CONFIG"):
        return os.environ["MSPROBE_CONFIG"]
    raise ConfigError("no probe file is named; accepted: --config FILE, --overlay NAME, or $MSPROBE_CONFIG")


def _probe_of_rehearsal(probe: Mapping[str, Any]) -> dict[str, Any]:
    """All layers, as the small model lacks most; a directory of its own, as the real job refuses one that has a run."""
    fitted = {
        key: {name: value for name, value in part.items() if name != "layers"} if isinstance(part, dict) else part
        for key, part in probe.items()
    }
    return {**fitted, "output": f"{probe.get('output', './probe_out')}_rehearsal"}


def _content(config: str) -> Mapping[str, Any]:
    """A probe file as a table; one that cannot be read is left to the job, which says what is wrong with it."""
    try:
        content = read_document(Path(config))
    except ConfigError:
        return {}
    return content if isinstance(content, dict) else {}


def _refuse_second_run(output: str) -> None:
    """What every process of the job would say, before there are any; a rehearsal is on this machine alone."""
    if output and Path(output, "run.json").exists():
        raise ConfigError(f"--output: {output} already holds a run; accepted: another --output DIR, or remove it")


def _emit(arguments: argparse.Namespace, overlay: Overlay | None, recipe: Path) -> int:
    out, text = Path(arguments.emit), recipe.read_text(encoding="utf-8")
    words: list[str] = []
    if overlay is not None:
        # Nothing runs that could tell the flags: the words of the recipe itself have to do.
        lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
        words += overlay.arguments(" ".join(lines).replace('"', " ").split(), small=arguments.small)
    config = _probe_file(arguments, overlay, out.resolve().parent)
    words += ["--msprobe-config", os.path.abspath(config)]
    for name in ("output", "device"):
        value = getattr(arguments, name)
        if value:
            words += [f"--msprobe-{name}", value]
    text = emit(text, words, str(recipe))
    exports = "".join(
        f"export {key}={shlex.quote(value)}\n" for key, value in (overlay.environment if overlay else {}).items()
    )
    first, _, rest = text.partition("\n")
    # Below the line that names the shell.
    text = f"{first}\n{exports}{rest}" if first.startswith("#") else exports + text
    out.write_text(text, encoding="utf-8")
    print(f"msprobe: {out} runs {recipe} under the kit; compare: diff {recipe} {out}", flush=True)
    return 0


def _shell(recipe: Path) -> str:
    """`sh` for a recipe that asks for it, else bash, which every recipe seen so far is written for."""
    with recipe.open(encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    return "sh" if first.startswith("#!") and first.split("/")[-1].split() in (["sh"], ["env sh"]) else "bash"


def _wait(words: list[str], environment: dict[str, str], folder: Path) -> int:
    child = subprocess.Popen(words, env=environment)

    def forward(number: int, frame: FrameType | None) -> None:
        # To the launchers, not to the shell: a shell that dies leaves its launcher running.
        launchers = [int(path.stem) for path in folder.glob("*.pid") if not path.with_suffix(".code").exists()]
        for pid in launchers or [child.pid]:
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    # A Ctrl-C reaches every process of the terminal by itself.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    code = child.wait()
    return 128 - code if code < 0 else code


def _verdict(code: int, folder: Path, recipe: Path, launcher_counts: bool) -> int:
    """The launcher's exit code where the recipe hid it; 2 where no launcher was called."""
    if (folder / "refused").exists():
        # The shim has said why.
        return 2
    started = list(folder.glob("*.pid"))
    failed = [int(path.read_text()) for path in folder.glob("*.code") if path.read_text().strip() != "0"]
    if failed:
        reason = (folder / "reason").read_text(encoding="utf-8") if (folder / "reason").exists() else ""
        print(
            f"msprobe: the launcher ended with exit code {failed[0]} (the recipe with {code})"
            + (f": {reason}" if reason else ""),
            flush=True,
        )
        return failed[0]
    if not started and code == 0:
        print(
            f"msprobe: {recipe} called neither torchrun nor python -m torch.distributed.launch: nothing was recorded",
            file=sys.stderr,
            flush=True,
        )
        return 2
    if started and code and launcher_counts:
        print(
            f"msprobe: the launcher ended well; {recipe} itself ended with exit code {code}, most often because `tee`"
            " has no logs/ to write to",
            flush=True,
        )
        return 0
    return code


if __name__ == "__main__":
    raise SystemExit(main())
