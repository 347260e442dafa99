"""Alerts and suspect operators are on the page, first in its verdict."""

import json
import shutil

import pytest

from msprobe_megatron.analyse.load import open_run
from msprobe_megatron.report.html.page import page_data
from tests.forked import run_forked

JOB = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 2"
    " --attention-dropout 0 --hidden-dropout 0 --practise unstable"
)


def train(argv):
    from msprobe_megatron.demo.pretrain_gpt import run

    return run(argv).losses


@pytest.fixture(scope="module")
def unstable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unstable")
    (folder / "probe.yaml").write_text("dump: {}\nperturb: {mode: no_change, modules: [linear_fc2]}\n")
    run_forked(1, train, f"{JOB} --msprobe-config {folder}/probe.yaml --msprobe-output {folder}/out".split())
    return folder / "out"


def test_a_suspect_is_the_verdict(unstable):
    data = page_data(open_run(unstable))
    assert data["verdict"]["tone"] == "bad"
    assert data["verdict"]["headline"] == "Suspect operator: decoder.layers.1.mlp.linear_fc2"
    (finding,) = [found for found in data["verdict"]["findings"] if found["title"] == "Suspect operators"]
    assert "another result for the same inputs" in finding["text"]
    assert {row["name"] for row in data["log"]["verdicts"]} == {"decoder.layers.1.mlp.linear_fc2"}


def test_an_alert_comes_before_suspects_and_is_no_fault_of_the_record(unstable, tmp_path):
    shutil.copytree(unstable, tmp_path / "out")
    event = {
        "event": "alert",
        "rule": "spike",
        "step": 1,
        "rank": 0,
        "kind": "loss",
        "name": "lm loss",
        "text": "spike: it jumps",
    }
    with (tmp_path / "out" / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    verdict = page_data(open_run(tmp_path / "out"))["verdict"]
    assert verdict["headline"] == "Alert since step 1: spike"
    assert [found["title"] for found in verdict["findings"]][:2] == ["Alerts", "Suspect operators"]
    assert "it jumps" in verdict["findings"][0]["text"]
    assert not any("it jumps" in found["text"] for found in verdict["findings"][1:])
    assert 1 in verdict["steps"]
