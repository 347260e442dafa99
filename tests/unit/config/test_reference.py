"""The reference of the probe file: complete, as the readers have it, and the one in docs/ is this one."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import yaml

from msprobe_megatron.config import schema
from msprobe_megatron.config.meanings import MEANINGS
from msprobe_megatron.config.node import Context, Node
from msprobe_megatron.config.reference import reference
from msprobe_megatron.config.validate import TABLES

DOCUMENT = Path(__file__).parents[2] / "docs" / "probe_file.md"


def test_the_document_is_up_to_date():
    command = [sys.executable, "-m", "msprobe_megatron.cli", "validate", "--reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert DOCUMENT.read_text() == printed, f"run: msprobe-megatron validate --reference > docs/{DOCUMENT.name}"


def test_every_key_has_a_line_with_what_it_accepts():
    lines = reference().splitlines()
    for section in TABLES:
        for field in dataclasses.fields(section):
            if field.name in ("raw", "notes", "source"):
                continue
            found = [line for line in lines if line.startswith(f"| `{field.name}` |")]
            assert found, f"{section.__name__}.{field.name}"
            assert all(len(line.split("|")[3].strip()) > 2 for line in found)


def test_defaults_and_choices_are_those_of_the_schema():
    text = reference()
    assert "| `level` | `L0` | L0, L1, mix, debug |" in text
    assert f"| `keep_steps` | `{schema.RecorderConfig().keep_steps}` |" in text
    assert "| `host_memory` | `2GiB` |" in text


def test_every_key_has_a_meaning_and_an_example_that_its_reader_takes():
    for section, readers in TABLES.items():
        assert MEANINGS[section.__name__].keys() == readers.keys()
        for key, (meaning, example) in MEANINGS[section.__name__].items():
            assert len(meaning) > 10, key
            value = yaml.safe_load(f"value: {example}")["value"]
            readers[key](Node(value, key, Context("probe.yaml")))  # raises ConfigError where it is no example


def test_no_file_is_a_sentence():
    command = [sys.executable, "-m", "msprobe_megatron.cli", "validate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "which file?" in done.stderr
