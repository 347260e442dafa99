"""The peer's column: both tools really run the same plain model, each in its own interpreter."""

import sys

import pytest

from msprobe_megatron.bench.dump import PAIRS
from msprobe_megatron.bench.options import Options
from msprobe_megatron.bench.peer.columns import PeerFailed, columns, run_worker


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
    with pytest.raises(PeerFailed, match="No module named 'msprobe'"):
        columns("h64", PAIRS[:1], Options(tmp_path, turns=1, peer_python=sys.executable), steps=1)
