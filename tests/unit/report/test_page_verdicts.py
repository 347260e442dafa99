"""Alerts, disagreements of ranks and suspect operators are on the page, with or without recorded tensors."""

import json
import shutil

import pytest

from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.page.page_data import page_data
from msprobe_megatron.cli import main
from msprobe_megatron.report.html.page import page
from tests.support.demo_runs import demo_run
from tests.unit.report.browser import load, tab

TWO_LAYERS = "--num-layers 2 --micro-batch-size 1 --train-iters 2"
TP2 = f"{TWO_LAYERS} --tensor-model-parallel-size 2 --sequence-parallel"
PARTS = {
    "suspect": ("perturb: {mode: no_change, modules: [linear_fc2]}\n", f"{TWO_LAYERS} --practise unstable", 1),
    "examined": ("perturb: {mode: no_change, modules: [linear_fc2]}\n", TWO_LAYERS, 1),
    "disagreeing": ("checks: {replicas: true, every: 1}\n", f"{TP2} --practise drift", 2),
    "compared": ("checks: {replicas: true, every: 1}\n", TP2, 2),
    "kept": ("recorder: {keep_steps: 2}\n", TWO_LAYERS, 1),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Runs of one part of the kit alone, each made once: no tensors are recorded by any of them."""
    folder = tmp_path_factory.mktemp("parts")

    def make(name):
        if not (folder / name).exists():
            probe, flags, world = PARTS[name]
            demo_run(folder, probe, flags, world=world, name=name)
        return folder / name

    return make


@pytest.fixture(scope="module")
def unstable(tmp_path_factory):
    probe = "dump: {}\nperturb: {mode: no_change, modules: [linear_fc2]}\n"
    return demo_run(tmp_path_factory.mktemp("unstable"), probe, f"{TWO_LAYERS} --practise unstable")


@pytest.mark.parametrize(
    ("name", "tone", "headline", "said"),
    [
        (
            "suspect",
            "bad",
            "Suspect operator: decoder.layers.1.mlp.linear_fc2",
            "a different result for the same inputs",
        ),
        ("examined", "good", "Healthy as far as examined", "no suspect in 8 checks of 2 operators"),
        (
            "disagreeing",
            "bad",
            "Ranks disagree since step 0 in decoder.layers.0.input_layernorm.weight",
            "is not the same on ranks [0, 1] (tp)",
        ),
        ("compared", "good", "Healthy as far as examined", "replicas identical in 2 comparisons (tp)"),
        ("kept", "good", "Healthy as far as examined", "the flight recorder was not triggered"),
    ],
)
def test_a_run_without_tensors_has_a_page(parts, tmp_path, capsys, name, tone, headline, said):
    out = tmp_path / "page.html"
    assert main(["report", str(parts(name)), "--out", str(out)]) == (0 if tone == "good" else 1)
    assert headline in capsys.readouterr().out
    data = page_data(open_run(parts(name)))
    assert (data["verdict"]["tone"], data["verdict"]["headline"]) == (tone, headline)
    assert any(said in finding["text"] for finding in data["verdict"]["findings"])
    assert data["series"]["tensors"] == [] and data["run"]["arguments"]["num_layers"] == 2
    assert data["run"]["environment"]["WORLD_SIZE"] == str(PARTS[name][2])
    assert data["log"]["ledgers"]["groups"]


def test_a_directory_that_tells_of_a_job_alone_says_so(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    verdict = page_data(open_run(tmp_path))["verdict"]
    assert verdict["tone"] == "note"


def test_what_has_no_tensors_cannot_be_compared_and_its_setting_can(parts):
    data = page_data(open_run(parts("suspect")), open_run(parts("examined")))
    assert data["verdict"]["tone"] == "bad"
    assert "no step was recorded by both" in data["versus"]["comparison"]["reason"]
    settings = {entry["name"]: entry for entry in data["versus"]["setup"]}
    assert (settings["practise"]["run"], settings["practise"]["effect"]) == ("unstable", "none")
    assert not any(name.startswith("msprobe_") for name in settings)


@pytest.mark.parametrize("name", ["suspect", "disagreeing"])
def test_pages_without_tensors_in_a_browser(browser, parts, tmp_path, name):
    path = tmp_path / "page.html"
    path.write_text(page(page_data(open_run(parts(name)))), encoding="utf-8")
    load(browser, path)
    tabs = [button.text for button in browser.find_elements("css selector", "nav button")]
    assert tabs == ["Overview", "Who", "Log", "Setup"]
    rows = {"suspect": "#perturb tbody tr", "disagreeing": "#alerts tbody tr"}
    shown = browser.find_elements("css selector", rows[name])
    assert len(shown) == {"suspect": 1, "disagreeing": 2}[name] and all(row.is_displayed() for row in shown)
    if name == "disagreeing":
        dots = browser.find_elements("css selector", "svg[aria-label='alerts by step'] circle")
        assert [float(dot.get_attribute("cx")) for dot in dots] == [30, 1210]  # steps 0 and 1 of a line of two
        assert "tp" in browser.find_element("id", "checks").text
    tab(browser, "setup")
    assert "WORLD_SIZE" in browser.find_element("id", "environment").text
    tab(browser, "log")
    assert browser.get_log("browser") == []


def test_a_suspect_is_the_verdict(unstable):
    data = page_data(open_run(unstable))
    assert data["verdict"]["tone"] == "bad"
    assert data["verdict"]["headline"] == "Suspect operator: decoder.layers.1.mlp.linear_fc2"
    (finding,) = [found for found in data["verdict"]["findings"] if found["title"] == "Suspect operators"]
    assert "a different result for the same inputs" in finding["text"]
    (suspect,) = data["perturb"]["suspects"]
    assert (suspect["name"], suspect["verdict"]) == ("decoder.layers.1.mlp.linear_fc2", "nondeterministic")
    assert sum(data["perturb"]["verdicts"].values()) == suspect["looks"]


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
    assert verdict["headline"] == "Alert since step 1: spike in lm loss"
    assert [found["title"] for found in verdict["findings"]][:2] == ["Alerts", "Suspect operators"]
    assert "it jumps" in verdict["findings"][0]["text"]
    assert not any("it jumps" in found["text"] for found in verdict["findings"][1:])
    assert 1 in verdict["steps"]
