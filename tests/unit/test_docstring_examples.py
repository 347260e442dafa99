"""Every example in a docstring is run, and there is none that cannot be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("msprobe_megatron", "patches")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {"stand_ins", "import_paths"} & set(path.parts)
]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "msprobe_megatron" else ("msprobe_megatron", *parts)
    return ".".join(parts).removesuffix(".__init__")


def _docstrings(path: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


WITH_EXAMPLES = [path for path in SOURCES if any(">>>" in text for text in _docstrings(path))]


# In a process of its own: the modules of the demo and of the hosts leave threads and settings behind.
_RUN = """
import doctest, importlib, os, sys, tempfile
os.chdir(tempfile.mkdtemp())
for name in sys.argv[1:]:
    result = doctest.testmod(importlib.import_module(name))
    if result.failed or not result.attempted:
        print(f"{name}: {result.failed} of {result.attempted} examples failed")
"""


def test_examples_give_what_they_show() -> None:
    command = [sys.executable, "-c", _RUN, *map(_module, WITH_EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 40


def test_no_example_is_left_unrun() -> None:
    shown = re.compile(r"^\s*Examples?:", re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in SOURCES
        for text in _docstrings(path)
        if shown.search(text) and ">>>" not in text
    ]
    assert not found, "\n".join(found)
