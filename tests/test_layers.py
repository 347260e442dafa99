"""Keeps the rooms of the source apart: who may import whom, who may touch Megatron, who may open a file.

The rules are the tables below; CONTRIBUTING.md says them in words. The checker reads syntax trees and imports
nothing, so an import inside a function counts like one at the top of a module.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "msprobe_megatron"

# A room is a module or sub-package of msprobe_megatron. Each may import itself and the rooms listed with it.
# Data flows patches, sites -> probes -> measure -> record -> run directory -> analyse -> report.
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "clock": set(),
    "importing": set(),
    "switch": set(),
    "last_words": set(),
    "bulletin": set(),
    "topology": {"config"},
    "facts": {"config", "topology"},
    "patching": {"config", "importing"},
    "overlays": {"config"},
    "launching": {"config", "overlays"},
    "voice": {"record"},
    "fault_guard": {"record", "voice", "config", "patching", "backends"},
    "plain_loop": {"clock", "topology"},
    "all_the_time": {"dispatch", "patches", "plain_loop"},
    "dispatch": {"patching", "topology"},
    "backends": {"config", "importing", "patching"},
    "dry_run": {"backends", "patching"},
    "arguments": {"config", "importing", "patching"},
    "record": {"config", "topology", "backends"},
    "native": set(),  # the compiled kernel, its build and its cache
    "measure": {"native"},  # pure: tensors in, tensors out
    "probes": {"measure", "record", "clock", "config", "topology", "backends"},
    "sites": {"probes", "clock", "patching", "config", "topology", "native"},  # native: hooks may be compiled, too
    "patches": {"sites", "probes", "clock", "patching", "importing", "arguments", "config", "topology"},
    "analyse": {"record", "config", "topology"},  # reads run directories, never a live model
    "checkpoints": {"analyse", "measure"},  # whole tensors out of Megatron's checkpoints
    "report": {"analyse", "config", "topology"},
    "exchange": {"analyse", "record", "config", "topology"},  # run directories to and from other tools' files
}
# These sit on top of all rooms and put them together.
TOP = {
    *(
        "__init__",
        "__main__",
        "session",
        "attaching",
        "integrations",
        "dumping",
        "perturbing",
        "perturb_targets",
        "monitoring",
        "alerting",
        "flight_recorder",
        "recorder_calls",
        "checking",
        "curves",
        "exchanging",
        "exchanging_collectives",
        "collective_checks",
        "parts",
        "parts_asked",
        "announcing",
        "step_numbers",
        "control",
        "functions_asked",
        "debugger",
        "saving",
        "seeding",
        "reproducing",
        "replaying",
        "while_recording",
        "arming",
        "cli",
        "bench",
        "commands",
    ),
    *("run", "adaptor", "demo"),
    # `run` on a machine that lacks the job's accelerator.
    "rehearsal",
}
# What the package's __init__ hands out lazily, and the room it really is in.
HANDED_OUT = {
    "attach": "attaching",
    "Session": "session",
    "PrecisionDebugger": "debugger",
    "save": "saving",
    "seed_all": "seeding",
}

MAY_IMPORT_MEGATRON = {"topology", "backends", "demo", "patches"}
# The rooms that run inside a training job, less `record`, which is where files are written.
NO_WRITING = {
    *("sites", "probes", "measure", "patches", "topology", "backends", "patching", "importing", "clock"),
    *("config", "facts", "arguments", "switch", "arming", "session", "adaptor", "run", "__init__"),
}

PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Archives from strangers are read in place or not at all.
UNPACKERS = {"zipfile", "tarfile"}
# By the last part of the call's name, and by the whole of it: `directory.write_table` of record/ is fine.
WRITERS = {"write_text", "write_bytes", "mkdir", "makedirs", "mkstemp", "mkdtemp", "save_file", "savez"}
WRITING_CALLS = {
    "os.open",
    "torch.save",
    "np.save",
    "numpy.save",
    "pq.write_table",
    "pyarrow.parquet.write_table",
}
# Full backward hooks put a node into the autograd graph: bits and views change.
BANNED_ATTRIBUTES = {
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_module_full_backward_hook",
}
BANNED_BUILTINS = {"eval", "exec"}
# Names that say nothing about what a file holds.
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
LONGEST_FILE = 400


def module_of(path: Path) -> str:
    """Dotted name a file is imported by: ``patches/loss.py`` is ``msprobe_megatron.patches.loss``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts))


def room_of(module: str) -> str:
    """First name below the package: ``msprobe_megatron.record.slots`` is in ``record``."""
    return (module.split(".") + ["__init__"])[1]


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in the tree, ``import_module("x")`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = module.split(".") + ["__init__"] * is_package
            base = here[: -node.level] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", _called(node)):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _called(node: ast.Call) -> str:
    """Dotted name of what is called, as far as it is one: ``os.open``, ``open``, ``().mkdir``."""
    target, names = node.func, []
    while isinstance(target, ast.Attribute):
        names.append(target.attr)
        target = target.value
    names.append(target.id if isinstance(target, ast.Name) else "()")
    return ".".join(reversed(names))


def _opens_for_writing(node: ast.Call) -> bool:
    name = _called(node)
    if name in WRITING_CALLS or name.rpartition(".")[2] in WRITERS:
        return True
    if name.rpartition(".")[2] not in ("open", "fdopen"):
        return False
    mode = next((word.value for word in node.keywords if word.arg == "mode"), None)
    if name in ("open", "io.open", "os.fdopen"):
        mode = mode or (node.args[1] if len(node.args) > 1 else ast.Constant("r"))
        # A mode that is worked out somewhere else cannot be checked here, so it is not accepted.
        return not (isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rbt"))
    modes = [argument.value for argument in (mode, *node.args) if isinstance(argument, ast.Constant)]
    return any(isinstance(text, str) and re.fullmatch(r"[rwaxbt+]*[wax+][rwaxbt+]*", text) for text in modes)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What in a module's source breaks the rules of its room, one line each."""
    tree, room = ast.parse(source), room_of(module)
    if room not in {*ALLOWED, *TOP}:
        return [f"room {room!r} is not in the tables of tests/test_layers.py: say what it may import"]
    found = []
    for line, name in imports(tree, module, is_package):
        head, _, rest = name.partition(".")
        if head == PACKAGE:
            target = HANDED_OUT.get(rest, room_of(name))
            public = target in ("__init__", "__version__", room)
            if not public and room not in TOP and target not in ALLOWED[room]:
                found.append(f"line {line}: {room} may not import {target} ({name})")
        elif head == "megatron" and room not in MAY_IMPORT_MEGATRON:
            found.append(f"line {line}: {room} may not import Megatron ({name}); ask topology")
        elif head in PICKLES:
            found.append(f"line {line}: no pickles ({name})")
        elif head in UNPACKERS or name == "shutil.unpack_archive":
            found.append(f"line {line}: archives are not unpacked ({name})")
    return found + [f"line {line}: {what}" for line, what in _banned(tree, room)]


def _banned(tree: ast.AST, room: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in BANNED_ATTRIBUTES:
            yield node.lineno, f"{node.attr} alters the autograd graph"
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if name in BANNED_BUILTINS:
            yield node.lineno, f"no {name}()"
        weights_only = [word.value for word in node.keywords if word.arg == "weights_only"]
        if name == "torch.load" and not any(isinstance(v, ast.Constant) and v.value is True for v in weights_only):
            yield node.lineno, "torch.load without weights_only=True"
        if room in NO_WRITING and _opens_for_writing(node):
            yield node.lineno, f"{name}: only record/ opens files for writing during training"


def sources() -> list[Path]:
    return sorted([*(ROOT / PACKAGE).rglob("*.py"), *(ROOT / "patches").rglob("*.py")])


def test_sources_keep_to_their_rooms() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {violation}"
        for path in sources()
        for violation in violations(
            path.read_text(encoding="utf-8"),
            module_of(path).removesuffix(".__init__"),
            path.name == "__init__.py",
        )
    ]
    assert not found, "\n".join(found)


def test_sources_are_found() -> None:
    rooms = {room_of(module_of(path)) for path in sources()}
    assert {"__init__", "record", "measure", "topology", "patches"} <= rooms


def test_files_are_small_and_named_for_what_they_hold() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert not long, f"longer than {LONGEST_FILE} lines: {long}"
    # A stand-in has the names of what it stands in for.
    own = [path for path in sources() if "stand_ins" not in path.parts]
    empty = [str(path.relative_to(ROOT)) for path in own if {path.stem, path.parent.name} & EMPTY_NAMES]
    assert not empty, f"name what these hold: {empty}"


def test_table_has_no_circle_and_only_known_rooms() -> None:
    left = {room: set(targets) for room, targets in ALLOWED.items()}
    assert set().union(*left.values()) <= set(left)
    assert not TOP & set(left)
    while free := {room for room, targets in left.items() if not targets & set(left)}:
        left = {room: targets for room, targets in left.items() if room not in free}
    assert not left, f"these rooms import each other in a circle: {sorted(left)}"


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("record.slots", "from msprobe_megatron.probes.dump import Dump", "record may not import probes"),
        ("record.slots", "import msprobe_megatron.measure.stats", "record may not import measure"),
        ("record.slots", "from msprobe_megatron import sites", "record may not import sites"),
        ("record.slots", "from ..probes import dump", "record may not import probes"),
        ("record.slots", "from .. import probes", "record may not import probes"),
        (
            "record.slots",
            "def f():\n    from msprobe_megatron.analyse import merge",
            "record may not import analyse",
        ),
        ("record.slots", "from msprobe_megatron import attach", "record may not import attaching"),
        ("sites.modules", "from msprobe_megatron.record import slots", "sites may not import record"),
        ("sites.modules", "from msprobe_megatron.session import Session", "sites may not import session"),
        ("patches.loss", "from msprobe_megatron.measure import stats", "patches may not import measure"),
        ("measure.stats", "from msprobe_megatron.config import load", "measure may not import config"),
        (
            "measure.stats",
            "import importlib\nimportlib.import_module('msprobe_megatron.cli')",
            "may not import cli",
        ),
        (
            "analyse.merge",
            "if TYPE_CHECKING:\n    from msprobe_megatron.sites import api",
            "may not import sites",
        ),
        ("report.html", "from msprobe_megatron.record.schema import KINDS", "report may not import record"),
        ("config", "from msprobe_megatron.topology import names", "config may not import topology"),
        ("sites.modules", "def f():\n    import megatron.core", "sites may not import Megatron"),
        ("session", "from megatron.core import parallel_state", "session may not import Megatron"),
        ("probes.dump", "import_module('megatron.core.parallel_state')", "probes may not import Megatron"),
        ("sites.modules", "open('x', 'w')", "only record/ opens files"),
        ("sites.modules", "open(path, mode='ab')", "only record/ opens files"),
        ("probes.dump", "open(path, mode)", "only record/ opens files"),
        ("probes.dump", "path.open('x')", "only record/ opens files"),
        ("probes.dump", "Path('a').write_text('b')", "only record/ opens files"),
        ("measure.stats", "import os\nos.open('x', os.O_RDONLY)", "only record/ opens files"),
        ("measure.stats", "torch.save(x, 'f')", "only record/ opens files"),
        ("probes.dump", "pq.write_table(rows, 'f')", "only record/ opens files"),
        ("session", "path.mkdir(parents=True)", "only record/ opens files"),
        ("sites.modules", "module.register_full_backward_hook(f)", "alters the autograd graph"),
        ("sites.modules", "hook = m.register_full_backward_pre_hook", "alters the autograd graph"),
        ("cli", "eval('1')", "no eval()"),
        ("cli", "def f():\n    from pickle import loads", "no pickles"),
        ("record.tensors", "import pickle as p", "no pickles"),
        ("exchange.importer", "import zipfile", "archives are not unpacked"),
        ("checkpoints.opening", "from tarfile import open", "archives are not unpacked"),
        ("analyse.load", "torch.load('f')", "torch.load without weights_only"),
        ("analyse.load", "torch.load('f', weights_only=False)", "torch.load without weights_only"),
        ("mystery.x", "", "is not in the tables"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str, complaint: str) -> None:
    found = violations(source, f"{PACKAGE}.{module}")
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "record.slots",
            "from msprobe_megatron.record.schema import Row\nfrom . import schema\nfrom .schema import Row",
        ),
        ("record.writer", "import os\nos.open('x', os.O_WRONLY)\nopen('x', 'wb')\np.write_text('x')"),
        (
            "probes.dump",
            "from msprobe_megatron.measure import stats\nfrom ..record import slots\nimport torch",
        ),
        ("probes.dump", "from msprobe_megatron import __version__"),
        ("sites.modules", "from msprobe_megatron.probes import dump\nfrom msprobe_megatron import topology"),
        ("patches.training", "import megatron.core\nfrom msprobe_megatron.sites import modules"),
        ("topology.coordinates", "def f():\n    from megatron.core import parallel_state"),
        (
            "session",
            "from msprobe_megatron.record.directory import RunDirectory\nRunDirectory.open(root)",
        ),
        ("session", "directory.write_table('ranks', table)\ndirectory.write_json('run.json', {})"),
        ("config", "open(path)\nopen(path, 'rb')\npath.open()\npath.open('r')\npath.read_text()"),
        (
            "sites.modules",
            "'''register_full_backward_hook, eval() and pickle are only named here.'''\nmodel.eval()",
        ),
        ("analyse.load", "torch.load('f', weights_only=True)"),
        ("report.html", "from msprobe_megatron.analyse import merge\nopen('page.html', 'w')"),
    ],
)
def test_what_the_rules_allow_is_not_complained_about(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert violations("from .slots import x\nfrom ..measure import y", f"{PACKAGE}.record", is_package=True) == [
        "line 2: record may not import measure (msprobe_megatron.measure.y)"
    ]
    assert violations("from ..measure import y", f"{PACKAGE}.probes", is_package=True) == []


def test_module_names_follow_the_installed_layout() -> None:
    assert module_of(ROOT / "patches" / "loss.py") == "msprobe_megatron.patches.loss"
    assert module_of(ROOT / "msprobe_megatron" / "record" / "slots.py") == "msprobe_megatron.record.slots"
