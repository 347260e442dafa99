"""The peer's column: both tools really run the same plain model, each in its own interpreter."""

import sys

import pytest

from msprobe_megatron.cli import main
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.peer.columns import PeerFailed, check_peer, columns, run_worker
from msprobe_megatron.lab.bench.tables.dump import PAIRS
from msprobe_megatron.lab.bench.tables.perturb import PAIRS as PERTURB_PAIRS


def test_both_tools_run_the_same_model(peer, tmp_path):
    options = Options(tmp_path, turns=1, peer_python=str(peer / "python"))
    (line,) = columns("h64", PAIRS[:1], options, steps=2)
    assert line["name"] == "plain_torch:h64:L0"
    assert line["ratio"] > 0
    assert line["peer_ratio"] > 0
    assert list((tmp_path / "plain_torch" / "h64_ours_L0_0").glob("step_*/rank_00000/records.parquet"))
    assert list((tmp_path / "plain_torch" / "h64_peer_L0_0").glob("step*/*/dump.json"))


def test_the_model_trains_alike_with_and_without(tmp_path):
    task = {"size": "h64", "steps": 2, "folder": str(tmp_path / "a")}
    alone = run_worker(sys.executable, {**task, "tool": "none", "config": {}})
    watched = run_worker(sys.executable, {**task, "tool": "ours", "config": {"dump": {"level": "mix"}}})
    assert alone["loss"] == watched["loss"]
    assert len(watched["times"]) == 2
    assert alone["files"] == 0 < watched["files"]


def test_no_peer_no_column_and_a_bad_one_speaks(tmp_path):
    assert columns("h64", PAIRS, Options(tmp_path)) == []
    (line,) = columns("h64", PAIRS[:1], Options(tmp_path, turns=1, peer_python=sys.executable), steps=1)
    assert line["ratio"] > 0 and line["peer_ratio"] is None
    assert "No module named 'msprobe'" in line["peer_error"]


def test_an_interpreter_without_the_peer_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(PeerFailed, match="no torch with mindstudio-probe"):
        check_peer(sys.executable)
    assert main(["bench", "dump", "--peer-python", str(tmp_path / "python"), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'python'} cannot be run (No such file or directory)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_settings_of_the_free_benchmark_are_those_its_manual_names():
    for pair in PERTURB_PAIRS:
        section = pair.peer["free_benchmark"]
        assert pair.peer["level"] == section["fuzz_level"] == "L1"
        assert section["fuzz_stage"] == ("backward" if "backward" in pair.name else "forward")
        assert section["handler_type"] == ("fix" if pair.name.startswith("fix") else "check")
        assert section["if_preheat"] == pair.name.startswith("preheat")
        assert section["list"] == ([] if pair.name.endswith(("all", "budget")) else ["softmax"])
