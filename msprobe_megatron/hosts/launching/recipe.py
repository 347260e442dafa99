"""Runs a recipe from beginning to end: `msprobe-megatron launch`.

The recipe is started as it is, in the caller's directory, with the shims in front of PATH. Its exit code is that of
the launcher it called, even where the recipe's own pipe into `tee` hides it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_megatron.config.document import ConfigError, read_document
from msprobe_megatron.config.save_flags import FLAG, Taken, refuse_hidden, without_save
from msprobe_megatron.hosts.launching.changes import changes, remarks
from msprobe_megatron.hosts.launching.emit import emit
from msprobe_megatron.hosts.launching.hosts import overlays_for
from msprobe_megatron.hosts.launching.overlays import Overlay, all_overlays, find
from msprobe_megatron.hosts.launching.shipped import recipes, shims, shipped
from msprobe_megatron.hosts.rehearsal import rewrite

EXAMPLES = """\
examples:
  msprobe-megatron launch --config probe.yaml -- examples/llama2/pretrain_llama2_7b_ptd.sh
  msprobe-megatron launch --overlay modellink/llama2_7b -- examples/llama2/pretrain_llama2_7b_ptd.sh
  msprobe-megatron launch --overlay modellink/llama2_7b --emit probed.sh -- examples/llama2/pretrain_llama2_7b.sh
  msprobe-megatron launch --rehearse --overlay modellink/llama2_7b -- examples/llama2/pretrain_llama2_7b_ptd.sh
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the runner's own flags; what follows `--` (or the first word that is no flag) is the recipe."""
    parser.add_argument("--overlay", metavar="NAME", help="HOST/MODEL of `msprobe-megatron overlays`, or a YAML file")
    parser.add_argument("--config", metavar="FILE", help="probe file (default: the overlay's)")
    parser.add_argument("--output", metavar="DIR", help="run directory (default: the probe file's)")
    parser.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or npu")
    parser.add_argument("--small", action="store_true", help="apply the overlay's `small` flags: fewer layers")
    parser.add_argument(
        "--keep-save",
        action="store_true",
        help="leave --save to a job that the overlay makes shorter: it then saves over the recipe's checkpoints",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what the overlay changes; the recipe is run up to its launch"
    )
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
    parser.add_argument(
        "--env", action="store_true", help="print the path of the script that is sourced to launch recipes by hand"
    )
    parser.add_argument("recipe", nargs=argparse.REMAINDER, metavar="-- RECIPE.sh ARGS")


def run(arguments: argparse.Namespace) -> int:
    """Run the recipe that the flags name; returns the exit code, the launcher's where one was started."""
    if arguments.recipe[:1] == ["--"]:
        arguments.recipe = arguments.recipe[1:]
    if arguments.env:
        print(shipped("scripts") / "msprobe_env.sh")
        return 0
    if arguments.list:
        for overlay in all_overlays(recipes()):
            print(f"{overlay.name:32} {overlay.title}")
        return 0
    if not arguments.recipe:
        raise ConfigError("launch: no recipe is named; accepted: -- RECIPE.sh ARGS")
    try:
        return _run(arguments, recipes())
    except OSError as error:
        raise ConfigError(f"launch: {error}") from None


def _run(arguments: argparse.Namespace, root: Path) -> int:
    recipe = Path(arguments.recipe[0])
    if not recipe.is_file():
        raise ConfigError(f"{recipe}: no such recipe; accepted: a shell script")
    overlay = find(arguments.overlay, root) if arguments.overlay else None
    if arguments.rehearse:
        _prepare_rehearsal(arguments)
    if overlay is None:
        hint = [other.name for other in overlays_for(recipe, root)]
        if hint:
            print(f"msprobe: an overlay fits this recipe: --overlay {' or '.join(hint)}", flush=True)
    if arguments.emit:
        return _emit(arguments, overlay, recipe)
    with tempfile.TemporaryDirectory(prefix="msprobe_") as folder:
        environment = _environment(arguments, overlay, Path(folder))
        if arguments.dry_run:
            return _dry_run(arguments.recipe, environment, Path(folder))
        if not arguments.rehearse:
            for name in _missing_logs(recipe):
                _complain(f"{recipe} writes its log to {name}/, which is not there; accepted: mkdir -p {name}")
        code = _wait([_shell(recipe), *arguments.recipe], environment, Path(folder))
        return _verdict(code, Path(folder), recipe, launcher_counts=bool(arguments.rehearse))


def _complain(sentence: str) -> None:
    print(f"msprobe: {sentence}", file=sys.stderr, flush=True)


def _dry_run(words: Sequence[str], environment: dict[str, str], folder: Path) -> int:
    """Run a recipe up to its launch and repeat what the shim had to say; no log of an earlier job is overwritten."""
    (folder / "bin").mkdir()
    tee = folder / "bin/tee"
    tee.write_text("#!/bin/sh\nexec cat\n", encoding="utf-8")
    tee.chmod(0o755)
    environment["PATH"] = f"{tee.parent}{os.pathsep}{environment['PATH']}"
    # -C: a `> log` that exists is not overwritten. A session of its own: the shim ends it.
    shell = [_shell(Path(words[0])), "-C", *words]
    code = subprocess.run(shell, env=environment, start_new_session=True, check=False).returncode
    said = folder / "said"
    print(said.read_text(encoding="utf-8") if said.exists() else "", end="", file=sys.stderr, flush=True)
    if (folder / "dry").exists():
        return 0
    if not (folder / "refused").exists():
        _complain(f"{words[0]} ended with exit code {code} before it launched anything: nothing is known of its flags")
    return 2


def _missing_logs(recipe: Path) -> list[str]:
    """Directories that a recipe's `tee` writes to, that are not there and that the recipe does not make."""
    text = recipe.read_text(encoding="utf-8", errors="replace")
    found = dict.fromkeys(re.findall(r"^[^#\n]*\|\s*tee\s+(?:-a\s+)?[\"']?([^\s$\"'|;&]+)/[^\s/]*", text, re.MULTILINE))
    return [name for name in found if not Path(name).is_dir() and not re.search(rf"mkdir\b.*{re.escape(name)}", text)]


def _prepare_rehearsal(arguments: argparse.Namespace) -> None:
    """Refuse what a rehearsal cannot be combined with, and a machine that can train the recipe itself."""
    rewrite.ranks_of(arguments.rehearse)
    if arguments.keep_save:
        raise ConfigError("--keep-save: a rehearsal saves nothing; accepted: --rehearse or --keep-save, not both")
    if arguments.emit:
        raise ConfigError("--emit: writes a copy for the real machine; accepted: --rehearse or --emit, not both")
    if arguments.device not in (None, "cpu"):
        raise ConfigError(f"--device: {arguments.device!r}: a rehearsal is on the CPU; accepted: cpu, or leave it away")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"--rehearse: torch is not installed in {sys.executable}; accepted: an environment with the host's packages"
            " and a torch for CPU"
        )
    found = rewrite.accelerator()
    if found is not None:
        raise ConfigError(
            f"--rehearse: is for machines without accelerator, but {found}; accepted: run the recipe without"
            " --rehearse, or name an environment without it by MSPROBE_PYTHON"
        )
    arguments.device = "cpu"


def _environment(arguments: argparse.Namespace, overlay: Overlay | None, folder: Path) -> dict[str, str]:
    environment = _routed(dict(os.environ, MSPROBE_STATUS=str(folder)))
    if overlay is not None:
        is_file = arguments.overlay.endswith((".yaml", ".yml"))
        environment["MSPROBE_OVERLAY"] = os.path.abspath(arguments.overlay) if is_file else overlay.name
        # What is to be known about --small is said to those who asked for it.
        notes = [note for note in overlay.notes if arguments.small or "--small" not in note]
        for note in notes if not arguments.dry_run else ():
            print(f"msprobe: overlay {overlay.name}: {note}", flush=True)
    config = _probe_file(arguments, overlay, folder)
    given = {"CONFIG": config, "OUTPUT": arguments.output, "DEVICE": arguments.device}
    for name, value in given.items():
        if value:
            # Recipes change directory; a path that was right here must stay right.
            environment[f"MSPROBE_{name}"] = value if name == "DEVICE" else os.path.abspath(value)
    for name in ("small", "keep_save", "dry_run"):
        if getattr(arguments, name):
            environment[f"MSPROBE_{name.upper()}"] = "1"
    if not arguments.dry_run:
        # Only the runner knows how to end one.
        environment.pop("MSPROBE_DRY_RUN", None)
    if arguments.rehearse:
        environment["MSPROBE_REHEARSE"] = arguments.rehearse
        _refuse_second_run(environment.get("MSPROBE_OUTPUT") or str(_content(config).get("output") or ""))
    return environment


def _routed(environment: dict[str, str]) -> dict[str, str]:
    """The environment with the shims in front of PATH, and what they look for."""
    front = str(shims())
    environment |= {"MSPROBE_SHIMS": front, "MSPROBE_RECIPES": str(recipes())}
    environment.setdefault("MSPROBE_PYTHON", sys.executable)
    path = environment.get("PATH", os.defpath)
    if front not in path.split(os.pathsep):
        environment["PATH"] = f"{front}{os.pathsep}{path}"
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
    words = _emitted_words(arguments, overlay, text) if overlay is not None else []
    if arguments.dry_run:
        return 0
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


def _emitted_words(arguments: argparse.Namespace, overlay: Overlay, text: str) -> list[str]:
    """The overlay's words; `FLAG` before them takes --save out when the copy runs. All changes are said."""
    # Nothing runs that could tell the flags: the words of the recipe itself have to do.
    lines = [re.split(r"\s[|>&;]", line)[0] for line in text.splitlines() if not line.lstrip().startswith("#")]
    given = [word for word in " ".join(lines).replace('"', " ").split() if word != "\\"]
    refuse_hidden(given)
    added = overlay.arguments(given, small=arguments.small)
    cuts = overlay.cuts(arguments.small)
    taken: list[Taken] = []
    if cuts and not arguments.keep_save:
        taken = without_save(given, Path.cwd())[1]
    said = changes(overlay, given, added, taken, os.environ)
    said += remarks(overlay, given, added, arguments.keep_save) if cuts else []
    for sentence in said:
        _complain(sentence)
    return [*([FLAG] if cuts and not arguments.keep_save else []), *added]


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
    if not started:
        launchers = "torchrun nor python -m torch.distributed.launch"
        _complain(
            f"{recipe} called neither {launchers}: nothing was recorded"
            if code == 0
            else f"{recipe} ended with exit code {code} and called neither {launchers}: nothing was launched"
        )
        return code or 2
    if code:
        print(
            f"msprobe: the launcher ended well; {recipe} itself ended with exit code {code}, most often because `tee`"
            " has no logs/ to write to",
            flush=True,
        )
        return 0 if launcher_counts else code
    return code
