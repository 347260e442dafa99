"""What a job's options hide is named: each by itself, in run.json, in the events, and on the pages of the hosts."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from msprobe_megatron.topology.blind_spots import BLIND_SPOTS, unseen
from tests.forked import run_forked
from tests.integrations.rows import faults, probe, steps

PAGES = Path(__file__).resolve().parents[2] / "docs/hosts"


@pytest.mark.parametrize("spot", BLIND_SPOTS, ids=lambda spot: spot.option)
def test_each_option_is_named_by_itself(spot):
    value = spot.values[0] if spot.values else True
    (text,) = unseen(Namespace(**{spot.option: value}))
    assert text.startswith(spot.option)
    assert text.endswith(spot.unseen)
    assert unseen(Namespace(**{spot.option: "none" if spot.values else False})) == []
    pages = (PAGES / "modellink.md").read_text() + (PAGES / "megatron_lm.md").read_text()
    if spot.option != "context_parallel_algo":  # a section of its own
        assert spot.option.replace("_", "-") in pages


def job(folder):
    """A job whose host was started with features of MindSpeed."""
    from msprobe_megatron import attach

    module = ModuleType("megatron.training.global_vars")
    options = Namespace(use_mc2=True, recompute_in_advance=True, swap_attention=True, moe_fb_overlap=False)
    module._GLOBAL_ARGS = options
    sys.modules[module.__name__] = module
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer, str(folder / "probe.yaml")):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_a_job_with_such_features_says_so_once_and_keeps_it(tmp_path, capfd):
    probe(tmp_path, "[0]")
    run_forked(1, job, tmp_path)
    out, named = tmp_path / "out", ["use_mc2", "recompute_in_advance", "swap_attention"]
    kept = json.loads((out / "run.json").read_text())["unseen"]
    assert [text.partition(":")[0] for text in kept] == named
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "unseen"] == kept
    said = capfd.readouterr().err
    assert [said.count(text) for text in kept] == [1, 1, 1]
    # What can be recorded is.
    assert (steps(out), faults(out)) == ([0], ([], []))
