"""The command line as a user meets it: help, exit codes, JSON, nonsense."""

import json
import subprocess
import sys

import pytest

from msprobe_megatron.cli import main
from msprobe_megatron.cli.commands import COMMANDS, GROUPS


def call(capsys, *argv):
    try:
        code = main(list(argv))
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """A run made by `msprobe-megatron demo`, in a process of its own."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "msprobe_megatron.cli", "demo", "--json", "--out", "out", "--num-layers", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "out", json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"example: msprobe-megatron {command}" in out
    assert "--json" in out


def test_no_command_and_an_unknown_one_are_usage_errors(capsys):
    for argv in ([], ["no-such-command"], ["summary", "x", "--no-such-flag"]):
        code, _, err = call(capsys, *argv)
        assert code == 2
        assert "usage:" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["complte"], "'complte' is no command (did you mean compare?); accepted: demo, "),
        (
            ["export", "x", "--format", "tensorbord"],
            "'tensorbord' is not known (did you mean tensorboard?); accepted: csv,",
        ),
        (["export", "x", "--formt", "csv"], "unrecognized arguments: --formt (did you mean --format?)"),
        (
            ["validate", "l0.yaml"],
            "l0.yaml: dump.level: 'l0' is not known (did you mean L0?); accepted: L0, L1, ",
        ),
        (["validate", "rule.yaml"], "'spikes' is not known (did you mean spike?); accepted: nonfinite, spike"),
        (["docs", "alert"], "'alert' is no page (did you mean alerts?)"),
    ],
)
def test_the_closest_word_is_suggested_and_errors_are_json_if_asked_for(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l0.yaml").write_text("dump: {level: l0}\n")
    (tmp_path / "rule.yaml").write_text("monitor: {alerts: [spikes]}\n")
    code, out, err = call(capsys, *argv)
    assert (code, out) == (2, "")
    assert said in err
    code, out, err = call(capsys, *argv, "--json")
    assert (code, err) == (2, "")
    assert said in json.loads(out)["error"]


def test_help_lists_every_command_in_groups(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    titles = [line for line in out.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [f"{title}:" for title in GROUPS]
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.strip()]
    assert listed == list(COMMANDS)


@pytest.mark.parametrize(
    ("words", "offered"), [("exp", ["export"]), ("export --fo", ["--format"]), ("ctl --du", ["--dump"])]
)
def test_the_shell_completes_commands_and_flags(words, offered):
    command = [sys.executable, "-m", "msprobe_megatron", "completion", "bash"]
    script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    typed = ["msprobe-megatron", *words.split()]
    lines = [script, f"COMP_WORDS=({' '.join(typed)}) COMP_CWORD={len(typed) - 1}"]
    lines += ["_msprobe_megatron", 'printf "%s\\n" "${COMPREPLY[@]}"']
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered


def test_completion_of_the_other_shells_names_every_command(capsys):
    for shell in ("zsh", "fish"):
        code, out, _ = call(capsys, "completion", shell)
        assert code == 0
        assert all(name in out for name in COMMANDS)


def test_validate_prints_the_schema(capsys):
    from msprobe_megatron.config.json_schema import json_schema

    code, out, _ = call(capsys, "validate", "--schema")
    assert (code, json.loads(out)) == (0, json_schema())


def test_demo_records_two_steps_and_says_so(demo_run):
    path, summary = demo_run
    assert summary["steps"] == [0, 2]
    assert summary["warnings"] == []
    assert {line["place"] for line in summary["lines"]} >= {"embedding", "layer 0", "layer 1", "loss", "output_layer"}
    assert path.joinpath("run.json").is_file()


def test_summary_of_a_run_and_of_a_step(capsys, demo_run):
    path, whole = demo_run
    code, out, _ = call(capsys, "summary", str(path))
    assert code == 0
    assert "layer 1" in out
    assert all(len(line) <= 100 for line in out.splitlines()[1:])
    code, out, _ = call(capsys, "summary", str(path), "--step", "2", "--json")
    assert code == 0
    assert json.loads(out)["steps"] == [2]
    assert json.loads(out)["rows"] < whole["rows"]
    code, _, err = call(capsys, "summary", str(path), "--step", "1")
    assert code == 2
    assert "recorded steps: [0, 2]" in err


def test_summary_numbers_are_those_of_the_rows(demo_run):
    """Norm and largest value of a layer's weights, computed again from the parquet files with NumPy alone."""
    import numpy as np
    import pyarrow.parquet as pq

    path, summary = demo_run
    line = next(x for x in summary["lines"] if x["place"] == "layer 1" and x["kind"] == "parameter")
    squares, largest, count = 0.0, 0.0, 0
    for file in path.glob("step_*/rank_*/records.parquet"):
        for row in pq.read_table(file).to_pylist():
            if row["kind"] == "parameter" and row["name"].startswith("decoder.layers.1."):
                squares += np.float64(row["sumsq"])
                largest = max(largest, row["absmax"])
                count += 1
    assert line["tensors"] == count
    assert np.isclose(line["norm"], np.sqrt(squares))
    assert line["absmax"] == largest


def test_summary_tells_of_files_that_are_missing_or_broken(capsys, demo_run, tmp_path):
    import shutil

    path, _ = demo_run
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    (copy / "step_000002" / "rank_00000" / "records.parquet").unlink()
    code, out, _ = call(capsys, "summary", str(copy))
    assert code == 1
    assert "step_000002/rank_00000/records.parquet is missing" in out
    (copy / "run.json").write_text("{")
    code, _, err = call(capsys, "summary", str(copy))
    assert code == 2
    assert "run.json" in err


def test_patches_of_a_run_and_of_the_installed_megatron(capsys, demo_run):
    path, _ = demo_run
    code, out, _ = call(capsys, "patches", str(path), "--json")
    assert code == 0
    fired = {line["id"]: line["fired"] for line in json.loads(out)}
    # Three iterations ran, two of them recorded, with four microbatches each.
    assert fired["schedules.forward_backward_no_pipelining"] == 3
    assert fired["schedules.forward_step"] == 8
    code, _, err = call(capsys, "patches", str(path), "--rank", "7")
    assert code == 2
    assert "rank 7" in err
    done = subprocess.run(
        [sys.executable, "-m", "msprobe_megatron.cli", "patches", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    states = {line["id"]: line["state"] for line in json.loads(done.stdout)}
    assert states["schedules.forward_step"] == "bound"
    assert states["recompute.CheckpointFunction.backward"] == "bound"


def test_validate_says_what_will_be_recorded_or_what_is_wrong(capsys, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("steps: [10, '20-22']\ndump: {level: L0}\n")
    bad.write_text("stepz: [10]\ndump: {level: L0}\n")
    code, out, _ = call(capsys, "validate", str(good))
    assert code == 0
    assert "20-22" in out
    code, _, err = call(capsys, "validate", str(bad))
    assert code == 2
    assert "stepz" in err
    assert "steps" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("nonsense", ["/no/such/run", "setup.py", "tests"])
def test_what_is_no_run_directory_is_said_in_one_line(capsys, nonsense):
    code, _, err = call(capsys, "summary", nonsense)
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert nonsense in err
