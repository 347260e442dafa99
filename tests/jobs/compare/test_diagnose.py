"""Diagnosis of one run: the source of a NaN, replicas that differ, and nothing to say about a clean run."""

import json
import shutil

import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "cp2", "dp2_distopt", "ep2", "pp2_recompute", "bf16_tp2"])
def test_a_clean_run_has_no_finding(runs, layout):
    result = diagnose(open_run(runs.clean(layout)))
    assert result.findings == []
    assert result.tensors > 2000


# fault -> (layout, source, module, name of the tensor, io, microbatch, ranks)
_NON_FINITE = {
    "nan_in_weight": (
        *("tp2", "weight", "decoder.layers.2.mlp.linear_fc2", "decoder.layers.2.mlp.linear_fc2.weight"),
        *("weight", None, [1]),
    ),
    "nan_in_data": ("single", "data", "data", "model", "input", 1, [0]),
    "nan_in_operator": (
        *("tp2", "operator", "decoder.layers.1.pre_mlp_layernorm", "decoder.layers.1.pre_mlp_layernorm"),
        *("output", 1, [0, 1]),
    ),
    "nan_on_the_way": ("pp2", "communication", "decoder.layers.2", "decoder.layers.2", "input", 0, [1]),
    "nan_in_reduction": (
        *("tp2", "communication", "decoder.layers.1.self_attention.linear_proj"),
        *("decoder.layers.1.self_attention.linear_proj", "output", 0, [1]),
    ),
}


@pytest.mark.parametrize("fault", _NON_FINITE)
def test_the_source_of_a_nan_is_named(runs, fault):
    layout, source, module, name, io, microbatch, ranks = _NON_FINITE[fault]
    first = diagnose(open_run(runs.faulty(layout, fault))).findings[0]
    assert first.what == "non_finite"
    where = first.where
    assert (where["source"], where["module"], where["name"], where["io"]) == (source, module, name, io)
    assert (where["step"], where["microbatch"], where["ranks"]) == (0, microbatch, ranks)
    assert where["affected"] > 10
    assert first.sure in ("certain", "likely")


def test_replicas_that_differ(runs):
    result = diagnose(open_run(runs.faulty("dp2_distopt", "stale_weight", steps=3)))
    assert [finding.what for finding in result.findings] == ["replicas"]
    where = result.findings[0].where
    assert (where["name"], where["step"]) == ("decoder.layers.1.mlp.linear_fc1.weight", 2)
    # Two ranks, two values: nothing in this run alone says which is right.
    assert where["ranks"] == [0, 1]


def test_the_command(runs, capsys, on_a_terminal):
    assert main(["diagnose", str(runs.clean("tp2"))]) == 0
    assert "all values finite" in capsys.readouterr().out
    faulty = str(runs.faulty("tp2", "nan_in_operator"))
    assert main(["diagnose", faulty, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert findings[0]["where"]["module"] == "decoder.layers.1.pre_mlp_layernorm"
    assert main(["diagnose", faulty]) == 1
    text = capsys.readouterr().out
    assert "first non-finite value: 1 of 1024 elements of decoder.layers.1.pre_mlp_layernorm output" in text
    assert "transformer_layer.py" in text
    assert "next: record only this module" in text
    assert max(map(len, text.splitlines())) > 100, "a sentence in a pipe is one line, for grep"
    on_a_terminal()
    assert main(["diagnose", faulty]) == 1
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_fault_of_the_kit_is_a_finding(runs, tmp_path, capsys):
    """Told by an event alone: the rank that had it may have had no time to write its ledger."""
    run = tmp_path / "run"
    shutil.copytree(runs.clean("tp2"), run)
    text = "probe disabled by an internal error in writer: OSError: disk full"
    event = {"event": "fault", "rank": 1, "step": 2, "text": text}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    assert main(["diagnose", str(run), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["what"] == "warning"
    assert "disk full" in finding["text"]


def test_alerts_come_in_order_of_cause(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs.clean("pp2"), run)
    common = {"event": "alert", "rule": "spike", "step": 2, "microbatch": 0, "kind": "activation"}
    events = [
        {**common, "rank": 1, "phase": "backward", "seq": 5, "name": "b", "kind": "gradient", "text": "third"},
        {**common, "rank": 1, "phase": "forward", "seq": 1, "name": "later", "text": "second"},
        {**common, "rank": 0, "phase": "forward", "seq": 9, "name": "a", "text": "first"},
    ]
    with (run / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
    assert main(["diagnose", str(run), "--json"]) == 1
    findings = [found for found in json.loads(capsys.readouterr().out)["findings"] if found["what"] == "alert"]
    assert [found["text"].rpartition(" ")[2] for found in findings] == ["first", "second", "third"]
