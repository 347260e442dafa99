"""Rewrites a recipe's launch for a machine without accelerator: few processes, the smallest model with every part, no
files of the real job. The recipe on disk is not touched, and every change is said.

What is changed stands in `rehearsal_tables`; these are pure functions on words. The rewritten launch goes through
`-m msprobe_megatron.rehearsal`, which brings the stand-ins.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msprobe_megatron.config.document import ConfigError
from msprobe_megatron.hosts.launching.command_line import Launch, LaunchError
from msprobe_megatron.hosts.launching.flags import Flag, flags_of, number_of
from msprobe_megatron.hosts.rehearsal import tables

RUN = "msprobe_megatron.hosts.rehearsal"
MOST_RANKS = 64
# Files of devices that torch.cuda may see.
_DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
LAYERS = 2
# In the order in which they get a share of the processes, and what the share has to divide: the experts, the heads and
# the parts of the sequence of the small model. A pipeline takes any, with a layer for each stage. Experts come first:
# some routers want them on several ranks.
KINDS = {"expert": 4, "pipeline": 0, "tensor": 4, "context": 4}
_SIZES = {
    **{kind: f"{kind}-model-parallel-size" for kind in ("pipeline", "expert", "tensor")},
    "context": "context-parallel-size",
}


def ranks_of(text: str) -> int:
    """Number of processes of a rehearsal; raises `ConfigError` naming what is accepted."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_RANKS:
        raise ConfigError(
            f"--rehearse: {text!r} is not a number of processes; accepted: 1 to {MOST_RANKS}, or nothing for 2;"
            " the recipe comes after --"
        )
    return int(text)


def read_loosely(words: Sequence[str]) -> Launch:
    """Find the script in a launcher's words, even where a placeholder made several words of an option's value."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words):
            return Launch(tuple(words[:at]), words[at + 1], tuple(words[at + 2 :]), is_module=True)
        if word.endswith(".py"):
            return Launch(tuple(words[:at]), word, tuple(words[at + 1 :]))
    raise LaunchError(f"no script was found in: {' '.join(words)}")


def host_of(folder: Path, target: str) -> str:
    """Which host's checkout a script lies in; a sentence where it is none, or lacks what its installation puts
    there.
    """
    host = next((name for name in tables.HOSTS if (folder / name).is_dir()), None)
    if host is None:
        raise ConfigError(
            f"--rehearse: {folder} is no checkout a rehearsal knows: beside {target} there is none of"
            f" {', '.join(f'{name}/' for name in tables.HOSTS)}; accepted: a recipe of"
            f" {', '.join(tables.HOSTS.values())}, started in its checkout"
        )
    for package, how in tables.TO_INSTALL.get(host, {}).items():
        module = "megatron.training" if package == "megatron" else package
        if not (folder / module.replace(".", "/")).is_dir() and not _installed(module):
            raise ConfigError(
                f"--rehearse: {package} is neither in {folder} nor installed in {sys.executable}; accepted: what"
                f" {tables.HOSTS[host]}'s installation asks for: {how.format(folder=folder)}"
            )
    missing = _missing_to_compile(folder / "megatron/core/datasets")
    if missing:
        raise ConfigError(
            f"--rehearse: {' and '.join(missing)} not found, with which Megatron compiles its data helpers first;"
            f" accepted: what {tables.HOSTS[host]}'s installation asks for (pip install pybind11, a C++ compiler, make)"
        )
    return host


def _missing_to_compile(datasets: Path) -> list[str]:
    """What Megatron's own Makefile needs here; nothing where there is none, or its work is done."""
    if not (datasets / "Makefile").is_file() or any(datasets.glob("helpers*.so")):
        return []
    missing = [] if _installed("pybind11") else [f"pybind11 (in {sys.executable})"]
    return missing + [program for program in ("make", "g++") if shutil.which(program) is None]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the latter: imported already, and not from a file
        return False


@dataclass(frozen=True)
class Layout:
    """How the processes are shared out, by the kinds of parallelism that the recipe has."""

    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def data(self) -> int:
        """Processes that work on other samples; experts are spread over these."""
        rest = self.ranks
        for kind in ("pipeline", "tensor", "context"):
            rest //= self.sizes.get(kind, 1)
        return rest

    @property
    def batch(self) -> int:
        """A global batch of at least two samples for each of them, and four in all."""
        return 4 if 4 % self.data == 0 and self.data < 4 else 2 * self.data


def layout_of(flags: Sequence[Flag], ranks: int, host: str) -> Layout:
    """Keep as many of the recipe's kinds of parallelism as the processes allow, each as small as it can be."""
    left, sizes = ranks, {}
    for kind, whole in KINDS.items():
        given = number_of(flags, _SIZES[kind])
        if given is None:
            continue
        share = next((n for n in range(2, left + 1) if left % n == 0), 1)
        most = min(given, number_of(flags, "num-layers") or given) if kind == "pipeline" else given
        # On NPUs it is inside the fused attention.
        fits = share <= most and (not whole or whole % share == 0) and not (kind == "context" and host in tables.ASCEND)
        sizes[kind] = share if fits else 1
        left //= sizes[kind]
    return Layout(ranks, sizes)


@dataclass(frozen=True)
class Rehearsal:
    """A launch made small, and what was changed, a sentence each."""

    launch: Launch
    said: tuple[str, ...]

    def words(self) -> list[str]:
        """The launcher's command line."""
        route = ["-m", RUN, *(["-m"] if self.launch.is_module else [])]
        return [*self.launch.options, *route, self.launch.target, *self.launch.arguments]


def rehearse(launch: Launch, added: Sequence[str], ranks: int, host: str, folder: Path) -> Rehearsal:
    """The same script, with `added` at the end of its arguments, on `ranks` processes of this machine."""
    refused = tables.REFUSED.get(launch.script)
    if refused is not None:
        raise ConfigError(
            f"--rehearse: {launch.script}: {refused}; accepted: a recipe that starts pretrain_gpt.py, such as the one"
            " for pre-training or tuning of the same model"
        )
    flags = flags_of([*launch.arguments, *added])
    layout = layout_of(flags, ranks, host)
    changed = _changed(flags, layout, host, folder)
    left_out = _left_out(flags, layout, host)
    gone = {name for names in left_out.values() for name in names} | set(changed)
    kept = [word for flag in flags if flag.name not in gone for word in flag.words]
    new = [word for name, value in changed.items() for word in (f"--{name}", *([value] if value else []))]
    # --use-env decides whether a script of torch.distributed.launch is told its rank by a flag.
    options = [word for word in launch.options if word in ("--use-env", "--use_env")]
    # A rendezvous of its own on a free port of this machine.
    options += ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(ranks)]
    small = replace(launch, options=tuple(options), arguments=(*kept, *new))
    return Rehearsal(small, tuple(_sentences(launch, layout, changed, left_out, host)))


def _changed(flags: Sequence[Flag], layout: Layout, host: str, folder: Path) -> dict[str, str]:
    """Flag -> its value in the rehearsal, empty for one without."""
    changed: dict[str, str] = dict(tables.ALWAYS)
    if host in tables.ASCEND:
        changed |= dict.fromkeys(tables.ASCEND_SWITCHES, "")
    else:
        parser = _parser_text(folder)
        changed |= tables.PLAIN_KERNELS
        changed |= dict.fromkeys((name for name in tables.PLAIN_SWITCHES if f"--{name}" in parser), "")
    for name, most in tables.AT_MOST.items():
        if any(flag.name == name for flag in flags):
            given = number_of(flags, name)
            changed[name] = str(most if given is None else min(given, most))
    if Flag("moe-router-load-balancing-type", ("group_limited_greedy",)) in flags:
        # ModelLink's own router cannot evaluate, it logs a loss that it has not computed: end before that.
        changed["exit-interval"] = tables.ALWAYS["train-iters"]
    if any(flag.name == "fp16" for flag in flags):
        changed["initial-loss-scale"] = str(tables.LOSS_SCALE)
    for kind, size in layout.sizes.items():
        changed[_SIZES[kind]] = str(size)
    layers = number_of(flags, "num-layers")
    changed["num-layers"] = str(max(min(layers or LAYERS, LAYERS), layout.sizes.get("pipeline", 1)))
    changed["global-batch-size"] = str(layout.batch)
    return changed


def _parser_text(folder: Path) -> str:
    """The files in which Megatron-LM says which flags there are."""
    files = [folder / "megatron/training/arguments.py", *(folder / "megatron/training/config").glob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())


def _left_out(flags: Sequence[Flag], layout: Layout, host: str) -> dict[str, list[str]]:
    """Reason -> flags of the command line that are not passed on for it."""
    reasons = {reason: list(patterns) for reason, patterns in tables.LEFT_OUT.items()}
    *_, layouts, operators = reasons
    reasons[operators] += tables.LEFT_OUT_IN.get(host, ())
    if layout.sizes.get("context", 1) == 1:
        reasons[layouts] += tables.CONTEXT_PARALLEL
    found: dict[str, list[str]] = {}
    for flag in flags:
        hits = (reason for reason, names in reasons.items() if any(fnmatch.fnmatchcase(flag.name, n) for n in names))
        reason = next(hits, "not filled in" if flag.is_placeholder else None)
        if reason is not None and flag.name not in found.setdefault(reason, []):
            found[reason].append(flag.name)
    return found


def _sentences(
    launch: Launch, layout: Layout, changed: Mapping[str, str], left_out: Mapping[str, list[str]], host: str
) -> list[str]:
    recipe = flags_of(launch.arguments)
    given = {flag.name for flag in recipe}
    said = [
        f"rehearsal of {launch.target} on {layout.ranks} process{'es' * (layout.ranks > 1)} of this machine's CPU;"
        " the recipe on disk is not changed, its command line is:"
    ]
    asked = {kind: number_of(recipe, _SIZES[kind]) or 1 for kind in layout.sizes}
    shares = [f"{kind} {size} ({asked[kind]})" for kind, size in layout.sizes.items()]
    alone = [kind for kind, size in layout.sizes.items() if size == 1 < asked[kind]]
    said.append(
        f"  layout: {', '.join([*shares, f'data {layout.data}'])}; in brackets the recipe's"
        + (f"; not rehearsed: {' and '.join(alone)} parallel" if alone else "")
    )
    numbers = {name: number_of(recipe, name) for name in ("num-layers", *tables.AT_MOST, "global-batch-size")}
    shrunk = [
        f"{name} {changed[name]} ({n})" for name, n in numbers.items() if n is not None and changed[name] != str(n)
    ]
    said.append(f"  smaller: {', '.join(shrunk) or 'nothing'}")
    said.append("  data: Megatron's mock data and its NullTokenizer; nothing is loaded or saved")
    for reason, names in left_out.items():
        # What an overlay put there is not the recipe's.
        shown = " ".join(f"--{name}" for name in names if name in given)
        said += [f"  left out, {reason}: {shown}"] if shown else []
    if host in tables.ASCEND:
        said.append(
            "  stand-ins in plain torch, unless installed: torch_npu, torchair, acl, Apex; before 0.8 TransformerEngine"
        )
    said.append("loss, norms and seconds are those of this small model on a CPU, not those of the real job")
    return said


def accelerator(devices: Path = Path("/dev")) -> str | None:
    """What this machine has that a rehearsal is not for, as words of a sentence; None where there is nothing.

    torch is imported only where a device file says that it may see something.
    """
    if _installed("torch_npu"):
        return f"torch_npu is installed in {sys.executable}"
    if any(found for pattern in _DEVICES for found in devices.glob(pattern)):
        import torch

        if torch.cuda.is_available():
            return f"torch in {sys.executable} can use {torch.cuda.get_device_name(0)}"
    return None


def require_accelerator(launch: Launch, added: Sequence[str], folder: Path, devices: Path = Path("/dev")) -> None:
    """Raise `ConfigError` where a host's script is to train for real on a machine that certainly cannot.

    Certain is: no device file of an accelerator, no torch_npu, nothing that torch can use, and none named by --device.
    """
    host = next((name for name in tables.HOSTS if (folder / name).is_dir()), None)
    named = any(word.partition("=")[0] == "--msprobe-device" for word in (*launch.arguments, *added))
    if host is None or named or launch.is_module or not Path(launch.target).is_file() or _installed("torch_npu"):
        return
    if any(found for pattern in (*_DEVICES, "davinci[0-9]*") for found in devices.glob(pattern)):
        return
    if _installed("torch"):
        import torch

        # Backends of other vendors register themselves when torch is imported.
        other = getattr(torch, "accelerator", None)
        if torch.cuda.is_available() or (other is not None and other.is_available()):
            return
    raise ConfigError(
        f"no NPU and no GPU was found on this machine, and {tables.HOSTS[host]}'s {launch.script} needs one; accepted:"
        " launch --rehearse, which trains the recipe small on the CPU, or --device NAME if there is one"
    )


def environment() -> dict[str, str]:
    """Variables that several processes on one CPU need, unless they are set."""
    wanted = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if Path("/sys/class/net/lo").exists():
        # gloo otherwise looks the host name up, which not every machine can resolve.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in wanted.items() if not os.environ.get(name)}
