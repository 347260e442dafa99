"""What the README and the manuals show is true: probe files load, commands and files exist."""

import re
from pathlib import Path

import pytest

from msprobe_megatron.commands import COMMANDS
from msprobe_megatron.config import load
from msprobe_megatron.config.schema import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "README_zh.md", *ROOT.glob("docs/**/*.md")])


def blocks(language):
    for page in PAGES:
        for text in re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            yield page.name, text


@pytest.mark.parametrize(("page", "text"), list(blocks("yaml")))
def test_probe_files_load(tmp_path, page, text):
    path = tmp_path / "probe.yaml"
    path.write_text(text)
    config = load(path)
    assert any(getattr(config, section) is not None for section in SECTIONS), page


def test_there_are_probe_files_to_try():
    assert len(list(blocks("yaml"))) >= 2


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_commands_and_scripts_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for command in re.findall(r"msprobe-megatron ([a-z][a-z-]+)", text):
        assert command in COMMANDS, command
    for script in re.findall(r"\bscripts/[a-z_]+\.(?:sh|py)\b", text):
        assert (ROOT / script).is_file(), script
    for test in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (ROOT / test).is_file(), test
