"""The reference of the probe file: complete, as the readers have it, and the one in docs/ is this one."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from msprobe_megatron.config import ProbeConfig, RecorderConfig
from msprobe_megatron.config.document import Context, Node
from msprobe_megatron.config.keys import keys_of
from msprobe_megatron.config.reference import reference, sections

DOCUMENT = Path(__file__).parents[3] / "docs" / "probe_file.md"
SECTIONS = [("top", ProbeConfig), *sections(ProbeConfig)]


def test_the_document_is_up_to_date():
    command = [sys.executable, "-m", "msprobe_megatron.cli", "validate", "--reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert DOCUMENT.read_text() == printed, f"run: msprobe-megatron validate --reference > docs/{DOCUMENT.name}"


def test_every_section_of_the_file_is_there():
    assert [path for path, _ in SECTIONS] == [
        "top",
        "dump",
        "dump.slice[…]",
        "monitor",
        "monitor.targets.NAME",
        "monitor.alerts[…]",
        "monitor.alerts[…].action",
        "perturb",
        "checks",
        "recorder",
        "shards[…]",
        "reproduce",
        "replay",
        "limits",
    ]


@pytest.mark.parametrize(("path", "section"), SECTIONS)
def test_every_key_has_a_line_with_what_it_accepts(path, section):
    heading = "## Top level" if path == "top" else f"## `{path}`"
    chapter = reference().split(f"{heading}\n")[1].split("\n## ")[0]
    for name in keys_of(section):
        (line,) = [line for line in chapter.splitlines() if line.startswith(f"| `{name}` |")]
        assert len(line.split("|")[3].strip()) > 2


def test_defaults_and_choices_are_those_of_the_sections():
    text = reference()
    assert "| `level` | `L0` | L0, L1, mix, debug |" in text
    assert f"| `keep_steps` | `{RecorderConfig().keep_steps}` |" in text
    assert "| `host_memory` | `2GiB` |" in text
    assert "| `limits` | see below |" in text
    assert "| `rule` | (required) |" in text


@pytest.mark.parametrize(("path", "section"), SECTIONS)
def test_every_key_has_a_meaning_and_an_example_that_its_reader_takes(path, section):
    for name, declared in keys_of(section).items():
        assert len(declared.meaning) > 10, name
        value = yaml.safe_load(f"value: {declared.example}")["value"]
        declared.type.read(Node(value, name, Context("probe.yaml")))  # raises ConfigError where it is no example


def test_no_file_is_a_sentence():
    command = [sys.executable, "-m", "msprobe_megatron.cli", "validate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "validate: no file is named; accepted: FILE, " in done.stderr
