"""What the README and the manuals show is true: probe files load, commands and files exist."""

import re
from pathlib import Path

import pytest

from msprobe_megatron.cli.commands import COMMANDS
from msprobe_megatron.config import load
from msprobe_megatron.config.sections.top import SECTIONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
MANUAL = ("README.md", "README_zh.md")


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


def without_code(text):
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)


def anchors(path):
    """Anchors of the headings of a page, made as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    titles = (re.sub(r"\]\([^)]*\)|[\[\]`*]", "", title) for title in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_commands_and_scripts_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", without_code(text)):
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target
    for command in re.findall(r"msprobe-megatron ([a-z][a-z-]+)", text):
        assert command in COMMANDS, command
    for script in re.findall(r"\bscripts/[a-z_]+\.(?:sh|py)\b", text):
        assert (ROOT / script).is_file(), script
    for test in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (ROOT / test).is_file(), test


def test_the_index_names_every_page_of_the_manual():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert {target for target in re.findall(r"\]\(([\w/]+\.md)\)", index)} == pages


def test_both_readmes_name_the_commands_of_an_investigation():
    for name in MANUAL:
        text = (ROOT / name).read_text(encoding="utf-8")
        told = set(re.findall(r"`msprobe-megatron ([a-z][a-z-]+)", text))
        assert told >= {
            "compare",
            "diagnose",
            "report",
            "watch",
            "ctl",
            "summary",
            "env-diff",
            "ckpt-diff",
            "scaling",
        }, name
        assert told >= {"export", "import", "bench", "validate"}, name
