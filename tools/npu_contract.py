"""Does every attribute of torch_npu and of a device module that the kit touches exist in the published wheels?

    python tools/npu_contract.py                            the newest wheel, and the newest for this torch
    python tools/npu_contract.py torch_npu==2.12.0.post3    these
    python tools/npu_contract.py some.whl                   files that are here

Nothing is imported and nothing is run: what the kit touches is read from its source, what a wheel has from the Python
files in it. Wheels are downloaded by pip into a folder that is removed. What only a compiled base class could have is
listed as unseen. Exit code 1 if something is missing.

A device module is `torch.npu`, `torch.cuda` (which transfer_to_npu answers by the other) and whatever the kit calls
the one or the other, followed through variables, arguments, returned values and attributes of objects.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# These define what they touch: the simulated device, and the emulation of CUDA in host memory.
NOT_USERS = ("hosts/rehearsal", "job/devices/megatron_on_cpu")
TORCH, PACKAGE, DEVICE = "torch", "torch_npu", "device"
_ROUNDS = 6
_RETURNS = {"current_stream": "Stream", "default_stream": "Stream"}
Kinds = frozenset[str]
NONE: Kinds = frozenset()


@dataclass
class Touched:
    """What the kit touches: paths such as ``current_device`` and ``Event().record``, each with its places."""

    places: dict[str, set[str]] = field(default_factory=dict)
    returned: dict[str, Kinds] = field(default_factory=dict)
    given: dict[tuple[str, int], Kinds] = field(default_factory=dict)
    stored: dict[tuple[str, str], Kinds] = field(default_factory=dict)

    def size(self) -> int:
        """Grows until everything is known."""
        known = (*self.returned.values(), *self.given.values(), *self.stored.values())
        return sum(map(len, known)) + len(self.places)


class _Reader(ast.NodeVisitor):
    """Follows device modules through one file."""

    def __init__(self, file: str, touched: Touched) -> None:
        self._file, self._touched = file, touched
        self._names: list[dict[str, Kinds]] = [{"torch": frozenset({TORCH}), "torch_npu": frozenset({PACKAGE})}]
        self._classes: list[str] = []
        self._functions: list[str] = []

    # What an expression is.

    def kinds(self, node: ast.AST | None) -> Kinds:
        """Which of the things that are followed an expression may be."""
        if isinstance(node, ast.Name):
            return next((names[node.id] for names in reversed(self._names) if node.id in names), NONE)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self" and self._classes:
                return self._touched.stored.get((self._classes[-1], node.attr), NONE)
            return self._attribute(self.kinds(node.value), node.attr, node)
        some: list[ast.expr] = []
        if isinstance(node, ast.IfExp):
            some = [node.body, node.orelse]
        elif isinstance(node, ast.BoolOp):
            some = node.values
        elif isinstance(node, ast.Tuple | ast.List):
            some = node.elts
        if some:
            return frozenset().union(*map(self.kinds, some))
        return self._call(node) if isinstance(node, ast.Call) else NONE

    def _attribute(self, of: Kinds, name: str, node: ast.AST) -> Kinds:
        found: set[str] = set()
        for kind in of:
            if kind == TORCH:
                found |= {DEVICE} if name in ("npu", "cuda") else set()
            elif kind == PACKAGE:
                found |= {DEVICE} if name == "npu" else self._note(f"torch_npu.{name}", node)
            else:
                found |= self._note(name if kind == DEVICE else f"{kind}.{name}", node)
        return frozenset(found)

    def _note(self, path: str, node: ast.AST) -> set[str]:
        self._touched.places.setdefault(path, set()).add(f"{self._file}:{getattr(node, 'lineno', 0)}")
        return {path}

    def _call(self, node: ast.Call) -> Kinds:
        text = ast.unparse(node.func)
        if text == "getattr" and len(node.args) > 1:
            return self._getattr(node)
        if text.endswith("get_device_module"):
            return frozenset({DEVICE})
        by_name = text in ("sys.modules.get", "importlib.import_module")
        if by_name and _text(node.args[0] if node.args else None) == PACKAGE:
            return frozenset({PACKAGE})
        called = self.kinds(node.func)
        if called:
            # Of the objects that calls give only those of the device's own classes are followed.
            made = {_RETURNS.get(kind, kind) for kind in called}
            return frozenset(f"{kind}()" for kind in made if kind[:1].isupper() and "()" not in kind)
        return self._touched.returned.get(text.rpartition(".")[2], NONE)

    def _getattr(self, node: ast.Call) -> Kinds:
        of, name = self.kinds(node.args[0]), _text(node.args[1])
        if name is not None:
            return self._attribute(of, name, node)
        # By a variable: the device's own type, in contrast to names of dtypes and functions.
        asked = ast.unparse(node.args[1])
        return frozenset({DEVICE}) if of & {TORCH, PACKAGE} and (asked.endswith(".type") or asked == "device") else NONE

    # Where it goes.

    def visit_Assign(self, node: ast.Assign) -> None:
        """A variable or an attribute of an object gets it."""
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, self.kinds(node.value))

    def visit_For(self, node: ast.For) -> None:
        """One of several."""
        self._bind(node.target, self.kinds(node.iter))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        """What a context is called."""
        for item in node.items:
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self.kinds(item.context_expr))
        self.generic_visit(node)

    def _bind(self, target: ast.AST, kinds: Kinds) -> None:
        if isinstance(target, ast.Name):
            names = self._names[-1]
            names[target.id] = names.get(target.id, NONE) | kinds
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and self._classes and kinds:
            key = (self._classes[-1], target.attr)
            self._touched.stored[key] = self._touched.stored.get(key, NONE) | kinds
        elif isinstance(target, ast.Tuple | ast.List):
            for item in target.elts:
                self._bind(item, kinds)

    def visit_Return(self, node: ast.Return) -> None:
        """A function that answers with it."""
        self.generic_visit(node)
        kinds = self.kinds(node.value)
        if kinds and self._functions:
            name = self._functions[-1]
            self._touched.returned[name] = self._touched.returned.get(name, NONE) | kinds

    def visit_Call(self, node: ast.Call) -> None:
        """An argument of a function of the kit."""
        self.generic_visit(node)
        self.kinds(node)
        name = ast.unparse(node.func).rpartition(".")[2]
        for index, argument in enumerate(node.args):
            kinds = self.kinds(argument)
            if kinds and name != "getattr":
                self._touched.given[name, index] = self._touched.given.get((name, index), NONE) | kinds

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Any mention counts."""
        self.generic_visit(node)
        self.kinds(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Attributes of objects are those of their class."""
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Names of its own, some of them arguments."""
        method = bool(self._classes) and bool(node.args.args) and node.args.args[0].arg == "self"
        name = self._classes[-1] if method and node.name == "__init__" else node.name
        known = {}
        for index, argument in enumerate(node.args.args[method:]):
            known[argument.arg] = self._touched.given.get((name, index), NONE)
        self._names.append(known)
        self._functions.append(node.name)
        self.generic_visit(node)
        self._functions.pop()
        self._names.pop()


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def touched(sources: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Paths that files (name, text) touch of a device module or torch_npu, and where."""
    trees = [(name, ast.parse(text)) for name, text in sources]
    found, before = Touched(), -1
    for _ in range(_ROUNDS):
        for name, tree in trees:
            _Reader(name, found).visit(tree)
        if found.size() == before:
            break
        before = found.size()
    return found.places


def kit() -> Iterator[tuple[str, str]]:
    """The files of the kit that use a device."""
    for folder in ("msprobe_megatron", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not any(part in name for part in NOT_USERS):
                yield name, path.read_text(encoding="utf-8")


class Wheel:
    """The Python files of a wheel."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        with zipfile.ZipFile(path) as file:
            self._texts = {name: file.read(name).decode() for name in file.namelist() if name.endswith(".py")}
        self._trees: dict[str, ast.Module] = {}

    def state(self, path: str) -> str:
        """``present``, ``missing`` or ``unseen`` for a path as `touched` gives them."""
        module = "torch_npu" if path.startswith("torch_npu.") else "torch_npu.npu"
        first, called, rest = path.removeprefix("torch_npu.").partition("()")
        found = self._find(module, first)
        if found is None:
            return "missing"
        if not called:
            return "present"
        definition = found[1]
        if not isinstance(definition, ast.ClassDef):
            return "unseen"  # a class that is not defined in Python
        return self._method(found[0], definition, rest.lstrip("."))

    def _method(self, module: str, definition: ast.ClassDef, name: str) -> str:
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return "present"
        for base in definition.bases:
            found = self._find(module, ast.unparse(base)) if isinstance(base, ast.Name) else None
            if found is None or not isinstance(found[1], ast.ClassDef):
                return "unseen"  # compiled
            state = self._method(found[0], found[1], name)
            if state != "missing":
                return state
        return "missing"

    def _find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """Where a name of a module is defined: the module and the node."""
        tree, package = self._tree(module)
        if tree is None or depth > _ROUNDS:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node in tree.body:
                return module, node
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
                return module, node
            if isinstance(node, ast.Import) and any((a.asname or a.name) == name for a in node.names):
                return module, node
            if isinstance(node, ast.ImportFrom):
                found = self._imported(module, package, node, name, depth)
                if found is not None:
                    return found
        inner = f"{module}.{name}"
        return (inner, ast.Pass()) if self._tree(inner)[0] is not None else None

    def _imported(
        self, module: str, package: bool, node: ast.ImportFrom, name: str, depth: int
    ) -> tuple[str, ast.AST] | None:
        parts = module.split(".")
        above = parts[: len(parts) - node.level + package] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                found = self._find(source, name, depth + 1)
                if found is not None:
                    return found
            elif (alias.asname or alias.name) == name:
                return self._find(source, alias.name, depth + 1) or (source, node)
        return None

    def _tree(self, module: str) -> tuple[ast.Module | None, bool]:
        stem = module.replace(".", "/")
        for name, package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            if name in self._texts:
                if name not in self._trees:
                    self._trees[name] = ast.parse(self._texts[name])
                return self._trees[name], package
        return None, False


def report(wheel: Wheel, paths: dict[str, set[str]]) -> tuple[str, bool]:
    """Lines for a wheel, and whether all is there."""
    states = {path: wheel.state(path) for path in sorted(paths)}
    counts = {state: [path for path in states if states[path] == state] for state in ("present", "unseen", "missing")}
    lines = [f"{wheel.name}: " + ", ".join(f"{len(some)} {state}" for state, some in counts.items())]
    lines += [f"  unseen   {path}" for path in counts["unseen"]]
    lines += [f"  missing  {path}: {', '.join(sorted(paths[path]))}" for path in counts["missing"]]
    return "\n".join(lines), not counts["missing"]


def downloaded(asked: list[str], folder: Path) -> list[Path]:
    """Wheels by name of file or by requirement; pip's own words where there is none."""
    files = [Path(word) for word in asked if word.endswith(".whl")]
    for word in asked:
        if not word.endswith(".whl"):
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), word]
            subprocess.run(command, check=True)
    return [*files, *sorted(folder.glob("*.whl"))]


def usual() -> list[str]:
    """The newest wheel, and the newest for the torch of this environment."""
    import torch

    return ["torch_npu", f"torch_npu=={torch.__version__.partition('+')[0]}.*"]


def main(words: list[str]) -> int:
    """Check; returns the exit code."""
    paths = touched(kit())
    print(f"touched: {', '.join(sorted(paths))}")
    good = True
    with tempfile.TemporaryDirectory(prefix="npu_contract_") as folder:
        for path in downloaded(words or usual(), Path(folder)):
            text, all_there = report(Wheel(path), paths)
            print(text)
            good = good and all_there
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
