"""Every host has a page of its own: how to start, in lines that run, what is seen, what is not."""

import importlib
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[3] / "docs/hosts"
HOSTS = [path for path in sorted(PAGES.glob("*.md")) if path.name not in ("table.md", "recipes.md")]
LONGEST = 90


@pytest.mark.parametrize("page", HOSTS, ids=lambda path: path.stem)
def test_page(page):
    text = page.read_text(encoding="utf-8")
    before, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert re.search(r"^    \S", before, re.MULTILINE), "the lines to start with come first"
    heads = [part.splitlines()[0] for part in parts]
    assert any(head.startswith("What is seen") for head in heads)
    assert any(head.startswith("What is not") for head in heads)
    assert len(text.splitlines()) <= LONGEST
    # Imports as they stand there, and functions that a flag names by their path.
    for line in re.findall(r"^    (from msprobe_megatron.*)$", text, re.MULTILINE):
        exec(line, {})
    for module, name in re.findall(r"-path (msprobe_megatron[\w.]*)\.(\w+)", text):
        assert callable(getattr(importlib.import_module(module), name))
