"""patches/source: check, apply, refuse, reverse, on scripts of both shapes and on a real checkout if there is one."""

import subprocess
from pathlib import Path

import pytest
import yaml

SOURCE = Path(__file__).resolve().parents[3] / "patches/source"
LINE = "import msprobe_megatron.adaptor"
OLD = '# Copyright line\n"""Pretrain GPT."""\n\nimport os\nprint(os.name)\n'
NEW = '# Copyright line\n\n"""Pretrain and SFT GPT."""\n\n# Capture the import time\nimport time\n'


def apply(*words):
    done = subprocess.run(
        ["bash", str(SOURCE / "apply.sh"), *map(str, words)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(params=[OLD, NEW], ids=["0.6", "0.13"])
def tree(request, tmp_path):
    path = tmp_path / "a tree with spaces"
    path.mkdir()
    (path / "pretrain_gpt.py").write_text(request.param)
    return path


def round_trip(tree):
    script = tree / "pretrain_gpt.py"
    before = script.read_bytes()
    code, said = apply("--check", tree)
    assert (code, script.read_bytes()) == (0, before), said
    assert apply(tree)[0] == 0
    lines = script.read_text().splitlines()
    assert lines.count(LINE) == 1
    # Above every other import, so that nothing of Megatron is there before the kit.
    assert not [line for line in lines[: lines.index(LINE)] if line.startswith(("import", "from"))]
    patched = script.read_bytes()
    code, said = apply(tree)
    assert (code, script.read_bytes()) == (1, patched)
    assert "already has the line" in said
    assert apply("--reverse", tree)[0] == 0
    assert script.read_bytes() == before
    assert apply("--reverse", tree)[0] == 1


def test_round_trip(tree):
    round_trip(tree)


def test_a_tree_inside_another_repository(tree):
    subprocess.run(["git", "init", "-q", str(tree.parent)], check=True)
    round_trip(tree)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text("import torch\n")
    code, said = apply(tmp_path)
    assert code == 2
    assert "no patch fits" in said
    code, said = apply(tmp_path / "nowhere")
    assert code == 2
    assert "no pretrain_gpt.py" in said


def test_series_lists_every_patch_and_its_anchor():
    series = yaml.safe_load((SOURCE / "series.yaml").read_text())
    assert {entry["patch"] for entry in series} == {path.name for path in SOURCE.glob("*.patch")}
    for entry in series:
        assert f" {entry['anchor']}\n+{LINE}\n" in (SOURCE / entry["patch"]).read_text()
        assert all(len(record) == 3 for records in entry["verified"].values() for record in records)


def test_round_trip_on_the_checkout(megatron_lm, tmp_path):
    (tmp_path / "pretrain_gpt.py").write_bytes((megatron_lm.checkout / "pretrain_gpt.py").read_bytes())
    round_trip(tmp_path)
