"""`msprobe-megatron compare`: exit codes, JSON, files, and what a person reads."""

import json

import pyarrow.parquet as pq

from msprobe_megatron.cli import main

_FIRST = {"name", "io", "kind", "step", "microbatch", "phase", "layer", "ranks", "site", "error", "tolerance"}


def test_agreement(runs, capsys):
    assert main(["compare", str(runs.clean("single")), str(runs.clean("tp2_pp2")), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "agree"
    assert answer["first_divergence"] is None
    assert answer["suspects"] == answer["replicas"] == []
    assert set(answer["counts"]) == {"agree", "diverged", "inherited", "only_left", "only_right", "layout"}


def test_divergence(runs, capsys, tmp_path):
    golden, faulty = str(runs.clean("single")), str(runs.faulty("tp2", "no_reduction"))
    assert main(["compare", golden, faulty, "--json", "--out", str(tmp_path / "out")]) == 1
    answer = json.loads(capsys.readouterr().out)
    first = answer["first_divergence"]
    assert first.keys() >= _FIRST
    assert (first["name"], first["layer"], first["microbatch"]) == ("decoder.layers.2.mlp.linear_fc2", 2, 0)
    assert first["site"]["class"] == "RowParallelLinear"
    assert any("mlp.py" in line for line in first["site"]["stack"])
    assert len(answer["suspects"]) == 10
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == answer
    table = pq.read_table(tmp_path / "out" / "compare.parquet")
    assert len(table) == sum(answer["counts"].values())


def test_divergence_in_words_fits_a_terminal(runs, capsys, on_a_terminal):
    golden, faulty = str(runs.clean("tp2")), str(runs.faulty("tp2", "attention_scale"))
    assert main(["compare", golden, faulty]) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("diverged")
    assert "first divergence: decoder.layers.1.self_attention.core_attention.scale_mask_softmax input" in text
    assert "look at decoder.layers.1.self_attention.core_attention" in text
    assert "step 0, microbatch 0, forward, layer 1, ranks 1" in text
    assert "dot_product_attention.py" in text
    assert len(lines) <= 30
    # In a pipe a sentence is one line, for grep. On a screen a path longer than it wraps; a line never exceeds it.
    on_a_terminal()
    assert main(["compare", golden, faulty]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100


def test_what_cannot_be_compared_says_why(runs, capsys, tmp_path):
    assert main(["compare", str(runs.clean("single")), str(runs.clean("wider"))]) == 2
    assert "the models differ" in capsys.readouterr().out
    assert main(["compare", str(runs.clean("single")), str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


def test_json_has_the_same_keys_whatever_the_verdict(runs, capsys):
    answers = []
    for other in (runs.clean("tp2_pp2"), runs.faulty("tp2", "no_reduction"), runs.clean("wider")):
        main(["compare", str(runs.clean("single")), str(other), "--json"])
        answers.append(json.loads(capsys.readouterr().out))
    assert [answer["verdict"] for answer in answers] == ["agree", "diverged", "incomparable"]
    assert answers[0].keys() == answers[1].keys() == answers[2].keys()
    assert answers[0]["counts"].keys() == answers[1]["counts"].keys() == answers[2]["counts"].keys()
    assert {"verdict", "first_divergence", "suspects", "counts", "replicas"} <= answers[0].keys()


def test_noise_that_is_no_repetition_is_refused(runs, capsys, tmp_path):
    """The distance to another model, other data or other weights would excuse every fault."""
    golden, moe = str(runs.clean("single")), str(runs.clean("moe"))
    faulty = str(runs.faulty("tp2", "no_reduction"))
    assert main(["compare", golden, faulty, "--noise", golden]) == 1
    capsys.readouterr()
    for run, other, noise, why in (
        (golden, faulty, runs.clean("wider"), "the models differ: ffn_hidden_size is 64 and 128"),
        (golden, faulty, runs.faulty("single", "other_data"), "its input data differ"),
        (moe, moe, runs.faulty("ep2", "expert_not_loaded"), "its weights differ, decoder.layers.1.mlp.experts"),
    ):
        assert main(["compare", run, other, "--noise", str(noise)]) == 2
        text = " ".join(capsys.readouterr().out.split())
        assert f"is not a repetition of {run}: {why}" in text
    assert main(["compare", golden, faulty, "--step", "0", "--noise", golden]) == 1
    capsys.readouterr()
    assert main(["compare", golden, golden, "--step", "2", "--noise", str(faulty)]) == 2
    assert "step 2 was not recorded by both" in " ".join(capsys.readouterr().out.split())
