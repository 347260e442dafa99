"""Commands that have seen nothing say so and end with exit code 2; beside each the clean case, which ends with 0."""

import json
import shutil

import pytest

from msprobe_megatron.cli import main
from tests.support.demo_runs import demo_run

FLAGS = "--num-layers 2 --train-iters 2 --micro-batch-size 2 --global-batch-size 4"


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    return demo_run(tmp_path_factory.mktemp("dumped"), "dump: {level: L0}", FLAGS)


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    return demo_run(tmp_path_factory.mktemp("monitored"), "monitor: {}", FLAGS)


def _copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def test_diagnose_without_its_steps(dumped, tmp_path, capsys):
    assert main(["diagnose", str(dumped)]) == 0
    copy = _copy(dumped, tmp_path)
    for folder in copy.glob("step_*"):
        shutil.rmtree(folder)
    assert main(["diagnose", str(copy)]) == 2
    assert "2 written steps, whose directories are gone; nothing was diagnosed" in capsys.readouterr().err
    assert main(["diagnose", str(dumped), "--step", "9"]) == 2
    assert "no rows of step 9; recorded steps: [0, 1]" in capsys.readouterr().err


def test_env_diff_of_prose(dumped, tmp_path, capsys):
    script, prose = tmp_path / "train.sh", tmp_path / "notes.txt"
    script.write_text("torchrun pretrain_gpt.py --hidden-size 32\n")
    prose.write_text("The loss went up after lunch.\n")
    assert main(["env-diff", str(script), str(script)]) == 0
    assert main(["env-diff", str(prose), str(prose)]) == 2
    assert "notes.txt: sets no argument" in capsys.readouterr().err


def test_import_of_an_empty_dump(tmp_path, capsys):
    file = tmp_path / "dump" / "step0" / "rank0" / "dump.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"data": {}}))
    assert main(["import", str(tmp_path / "dump"), "--out", str(tmp_path / "out")]) == 2
    assert "no tensor in any of 1 dump.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ctl_on_a_job_that_has_ended(dumped, tmp_path, capsys):
    assert main(["ctl", str(dumped), "--next", "2"]) == 2
    assert "the job has ended" in capsys.readouterr().err
    assert not (dumped / "control.json").exists()
    running = _copy(dumped, tmp_path)
    for file in (running / "ranks").glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "closed": False}))
    assert main(["ctl", str(running), "--next", "2"]) == 0


def test_watch_without_a_monitor(dumped, monitored, capsys):
    for form in ("--once", "--json"):
        assert main(["watch", str(dumped), form]) == 2
        said = capsys.readouterr()
        text = said.err if form == "--once" else json.loads(said.out.splitlines()[-1])["error"]
        assert "has no monitor to watch" in str(text)
        assert main(["watch", str(monitored), form]) == 0
