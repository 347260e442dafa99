"""Keeps the rooms of the source apart: who may import whom, who may touch Megatron, who may open a file.

The table is tests/rooms.py, which CONTRIBUTING.md shows. The checker reads syntax trees and imports
nothing, so an import inside a function counts like one at the top of a module.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import CONTRIBUTING, EXCEPTIONS, ROOMS, section, table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "msprobe_megatron"
# What the package's __init__ hands out lazily, and the room it really is in.
HANDED_OUT = {
    **dict.fromkeys(("attach", "Session", "PrecisionDebugger", "save", "seed_all"), "job.session"),
    **dict.fromkeys(("load", "compare", "diagnose", "LoadedRun"), "analysis"),
}

MAY_IMPORT_MEGATRON = {"topology", "job.devices", "lab", "patches"}
# The rooms that run inside a training job, less `job.record` and `run_directory`, where files are written.
NO_WRITING = {
    *("config", "topology", "patches", "run", "adaptor", "__init__"),
    *(room for room in ROOMS if room.startswith("job.") and room != "job.record"),
}
# Compiles into its private cache, before any step.
MAY_WRITE = ("job.measure.native",)

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
    """``msprobe_megatron.job.record.slots`` is in ``job.record``, ``msprobe_megatron.config`` in ``config``."""
    parts = (module.split(".") + ["__init__"])[1:]
    return ".".join(parts[: 2 if parts[0] == "job" else 1])


def excepted(module: str, target: str) -> bool:
    """Whether an import against the table is one of its named exceptions."""
    return any(f"{module}.".startswith(f"{PACKAGE}.{source}.") and target == room for source, room in EXCEPTIONS)


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
    if room == "job.__init__":
        return [] if not list(imports(tree, module, is_package)) else ["job/__init__ imports nothing"]
    if room not in ROOMS:
        return [f"room {room!r} is not in tests/rooms.py: say what it may import"]
    found = []
    for line, name in imports(tree, module, is_package):
        head, _, rest = name.partition(".")
        if head == PACKAGE:
            target = HANDED_OUT.get(rest, room_of(name))
            public = target in ("__version__", room) or (rest in HANDED_OUT and "__init__" in ROOMS[room].imports)
            if not public and target not in ROOMS[room].imports and not excepted(module, target):
                found.append(f"line {line}: {room} may not import {target} ({name})")
        elif head == "megatron" and room not in MAY_IMPORT_MEGATRON:
            found.append(f"line {line}: {room} may not import Megatron ({name}); ask topology")
        elif head in PICKLES:
            found.append(f"line {line}: no pickles ({name})")
        elif head in UNPACKERS or name == "shutil.unpack_archive":
            found.append(f"line {line}: archives are not unpacked ({name})")
    return found + [f"line {line}: {what}" for line, what in _banned(tree, room, module)]


def _banned(tree: ast.AST, room: str, module: str) -> Iterator[tuple[int, str]]:
    writes_nothing = room in NO_WRITING and not module.startswith(tuple(f"{PACKAGE}.{name}" for name in MAY_WRITE))
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
        if writes_nothing and _opens_for_writing(node):
            yield node.lineno, f"{name}: only record/ opens files for writing during training"


def other_sources() -> list[Path]:
    """What is compiled on the user's machine or runs in the browser."""
    return sorted(path for path in (ROOT / PACKAGE).rglob("*") if path.suffix in (".cpp", ".h", ".js"))


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
    assert rooms - {"job.__init__"} == set(ROOMS)
    assert {path.suffix for path in other_sources()} == {".cpp", ".h", ".js"}


def test_files_are_small_and_named_for_what_they_hold() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path in [*sources(), *other_sources()]
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE
    }
    assert not long, f"longer than {LONGEST_FILE} lines: {long}"
    # A stand-in has the names of what it stands in for.
    own = [path for path in sources() if "stand_ins" not in path.parts]
    empty = [str(path.relative_to(ROOT)) for path in own if {path.stem, path.parent.name} & EMPTY_NAMES]
    assert not empty, f"name what these hold: {empty}"


def test_table_has_no_circle_and_only_known_rooms() -> None:
    left = {room: set(entry.imports) for room, entry in ROOMS.items()}
    assert set().union(*left.values()) <= set(left)
    while free := {room for room, targets in left.items() if not targets & set(left)}:
        left = {room: targets for room, targets in left.items() if room not in free}
    assert not left, f"these rooms import each other in a circle: {sorted(left)}"


def test_every_allowed_import_is_used() -> None:
    """An arrow that nothing needs any more is taken out of the table."""
    used: set[tuple[str, str]] = set()
    for path in sources():
        module = module_of(path).removesuffix(".__init__")
        for _, name in imports(ast.parse(path.read_text(encoding="utf-8")), module, path.name == "__init__.py"):
            if name.partition(".")[0] == PACKAGE:
                rest = name.partition(".")[2]
                used.add((room_of(module), "__init__" if rest in HANDED_OUT else room_of(name)))
    idle = [(room, target) for room, entry in ROOMS.items() for target in entry.imports if (room, target) not in used]
    # patches are named in strings, by the set that loads them.
    assert [arrow for arrow in idle if arrow != ("job.session", "patches")] == []


def test_contributing_shows_this_table() -> None:
    shown = section(CONTRIBUTING.read_text(encoding="utf-8"))
    assert shown == table(), "run: python -m tests.rooms"


def test_top_of_the_package_can_be_read_at_a_glance() -> None:
    entries = {path.name for path in (ROOT / PACKAGE).iterdir() if path.name != "__pycache__"}
    assert len(entries) <= 12, sorted(entries)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "job.record.slots",
            "from msprobe_megatron.job.features.dump.probe import Dump",
            "job.record may not import job.features",
        ),
        ("job.record.slots", "import msprobe_megatron.job.measure.stats", "job.record may not import job.measure"),
        ("job.record.slots", "from msprobe_megatron.job import sites", "job.record may not import job.sites"),
        ("job.record.slots", "from ..features import dump", "job.record may not import job.features"),
        ("job.record.slots", "from .. import features", "job.record may not import job.features"),
        (
            "job.record.slots",
            "def f():\n    from msprobe_megatron.analysis import compare",
            "job.record may not import analysis",
        ),
        ("job.record.slots", "from msprobe_megatron import attach", "job.record may not import job.session"),
        (
            "job.sites.module.modules",
            "from msprobe_megatron.job.record import slots",
            "job.sites may not import job.record",
        ),
        (
            "job.sites.module.modules",
            "from msprobe_megatron.job.session.session import Session",
            "job.sites may not import job.session",
        ),
        ("patches.loss", "from msprobe_megatron.job.measure import stats", "patches may not import job.measure"),
        ("job.measure.stats", "from msprobe_megatron.config import load", "job.measure may not import config"),
        (
            "job.measure.stats",
            "import importlib\nimportlib.import_module('msprobe_megatron.cli')",
            "may not import cli",
        ),
        (
            "analysis.merge",
            "if TYPE_CHECKING:\n    from msprobe_megatron.job.sites import calls",
            "may not import job.sites",
        ),
        ("report.html", "from msprobe_megatron.job.record import slots", "report may not import job.record"),
        ("config", "from msprobe_megatron.topology import names", "config may not import topology"),
        ("job.sites.module.modules", "def f():\n    import megatron.core", "job.sites may not import Megatron"),
        ("job.session.session", "from megatron.core import parallel_state", "job.session may not import Megatron"),
        (
            "job.features.dump.probe",
            "import_module('megatron.core.parallel_state')",
            "job.features may not import Megatron",
        ),
        ("job.sites.module.modules", "open('x', 'w')", "only record/ opens files"),
        ("job.sites.module.modules", "open(path, mode='ab')", "only record/ opens files"),
        ("job.features.dump.probe", "open(path, mode)", "only record/ opens files"),
        ("job.features.dump.probe", "path.open('x')", "only record/ opens files"),
        ("job.features.dump.probe", "Path('a').write_text('b')", "only record/ opens files"),
        ("job.measure.stats", "import os\nos.open('x', os.O_RDONLY)", "only record/ opens files"),
        ("job.measure.stats", "torch.save(x, 'f')", "only record/ opens files"),
        ("job.features.dump.probe", "pq.write_table(rows, 'f')", "only record/ opens files"),
        ("job.session.session", "path.mkdir(parents=True)", "only record/ opens files"),
        ("job.sites.module.modules", "module.register_full_backward_hook(f)", "alters the autograd graph"),
        ("job.sites.module.modules", "hook = m.register_full_backward_pre_hook", "alters the autograd graph"),
        ("cli", "eval('1')", "no eval()"),
        ("cli", "def f():\n    from pickle import loads", "no pickles"),
        ("job.record.tensors", "import pickle as p", "no pickles"),
        ("report.importer", "import zipfile", "archives are not unpacked"),
        ("analysis.opening", "from tarfile import open", "archives are not unpacked"),
        ("analysis.load", "torch.load('f')", "torch.load without weights_only"),
        ("analysis.load", "torch.load('f', weights_only=False)", "torch.load without weights_only"),
        ("mystery.x", "", "is not in tests/rooms.py"),
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
            "job.record.slots",
            "import msprobe_megatron.job.record.writer\nfrom . import writer\nfrom .writer import Batch",
        ),
        ("job.record.writer", "import os\nos.open('x', os.O_WRONLY)\nopen('x', 'wb')\np.write_text('x')"),
        (
            "job.features.dump.probe",
            "from msprobe_megatron.job.measure import stats\nfrom ...record import slots\nimport torch",
        ),
        ("job.features.dump.probe", "from msprobe_megatron import __version__"),
        (
            "job.sites.module.modules",
            "from msprobe_megatron.job.measure import native\nfrom msprobe_megatron import topology",
        ),
        ("patches.training", "import megatron.core\nfrom msprobe_megatron.job.sites import module"),
        ("topology.coordinates", "def f():\n    from megatron.core import parallel_state"),
        (
            "job.session.session",
            "from msprobe_megatron.run_directory.directory import RunDirectory\nRunDirectory.open(root)",
        ),
        ("job.session.session", "directory.write_table('ranks', table)\ndirectory.write_json('run.json', {})"),
        ("config", "open(path)\nopen(path, 'rb')\npath.open()\npath.open('r')\npath.read_text()"),
        (
            "job.sites.module.modules",
            "'''register_full_backward_hook, eval() and pickle are only named here.'''\nmodel.eval()",
        ),
        ("analysis.load", "torch.load('f', weights_only=True)"),
        ("report.html", "from msprobe_megatron.analysis import compare\nopen('page.html', 'w')"),
    ],
)
def test_what_the_rules_allow_is_not_complained_about(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert violations("from .slots import x\nfrom ..measure import y", f"{PACKAGE}.job.record", is_package=True) == [
        "line 2: job.record may not import job.measure (msprobe_megatron.job.measure.y)"
    ]
    assert violations("from ..measure import y", f"{PACKAGE}.job.features", is_package=True) == []


def test_module_names_follow_the_installed_layout() -> None:
    assert module_of(ROOT / "patches" / "loss.py") == "msprobe_megatron.patches.loss"
    assert module_of(ROOT / "msprobe_megatron" / "job" / "record" / "slots.py") == "msprobe_megatron.job.record.slots"


@pytest.mark.parametrize("heading", ["The way of one L0 tensor", "The way of one alert"])
def test_the_pictures_of_contributing_name_files_that_exist(heading: str) -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    named = set(re.findall(r"(?<![\w/])[a-z_]+(?:/[a-z_]+)*(?:\.py|/)(?=[\s,)`]|$)", text, re.MULTILINE))
    assert len(named) > 10
    root = CONTRIBUTING.parent
    missing = [name for name in named if not ((root / PACKAGE / name).exists() or (root / name).exists())]
    assert missing == []
