"""What a job's options hide is named: each by itself, in run.json, in the events, and on the pages of the hosts."""

import contextlib
import enum
import io
import json
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from msprobe_megatron.topology.host.blind_spots import BLIND_SPOTS, TRIED, unseen, untried
from tests.jobs.integrations.rows import faults, probe, steps
from tests.support.forked import run_forked

PAGES = Path(__file__).resolve().parents[4] / "docs/hosts"


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


class Scope(enum.Enum):
    attn = 1
    full_iteration = 2


@pytest.mark.parametrize(
    ("given", "named"),
    [([Scope.attn, Scope.full_iteration], True), (["full_iteration"], True), ([Scope.attn], False), ([], False)],
)
def test_a_graph_of_the_whole_iteration_is_named_however_it_is_given(given, named):
    said = unseen(Namespace(cuda_graph_scope=given))
    assert [text.partition(":")[0] for text in said] == (["cuda_graph_scope=full_iteration"] if named else [])


@pytest.mark.parametrize(
    ("release", "known"),
    [("0.16.1", True), ("0.6.0", True), ("0.20.0rc0", True), (None, True), ("dev", True)]
    + [("9.9.9", False), ("0.21.0", False), ("1.0", False), ("0.5.0", False)],
)
def test_a_release_that_was_never_tried_is_named(release, known):
    said = untried(release)
    assert [text.partition(":")[0] for text in said] == ([] if known else [f"megatron-core {release}"])


def test_tried_is_what_the_table_has():
    rows = re.findall(r"\| (?:Megatron-LM \| .*?\(|megatron-core \| )(\d+)\.(\d+)", (PAGES / "table.md").read_text())
    found = sorted({(int(major), int(minor)) for major, minor in rows})
    assert (found[0], found[-1]) == TRIED


def job(folder):
    """A job whose host was started with features of MindSpeed."""
    from msprobe_megatron import attach

    module = ModuleType("megatron.training.global_vars")
    options = Namespace(use_mc2=True, recompute_in_advance=True, swap_attention=True, moe_fb_overlap=False)
    module._GLOBAL_ARGS = options
    sys.modules[module.__name__] = module
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), attach(model, optimizer, str(folder / "probe.yaml")):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return said.getvalue()


def test_a_job_with_such_features_says_so_once_and_keeps_it(tmp_path):
    probe(tmp_path, "[0]")
    (said,) = run_forked(1, job, tmp_path)
    out, named = tmp_path / "out", ["use_mc2", "recompute_in_advance", "swap_attention"]
    kept = json.loads((out / "run.json").read_text())["unseen"]
    assert [text.partition(":")[0] for text in kept] == named
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["text"] for event in events if event["event"] == "unseen"] == kept
    assert [said.count(text) for text in kept] == [1, 1, 1]
    # What can be recorded is.
    assert (steps(out), faults(out)) == ([0], ([], []))
