"""Forward-only passes as steps: one call or one session.step(), tokens and log-probs kept, training beside unseen."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from msprobe_megatron import attach
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor
from msprobe_megatron.config import ConfigError, from_document
from tests.jobs.integrations.rows import faults, rows, steps


class Cache:
    """A cache of keys and values that says how many tokens it has."""

    def __init__(self):
        self.length = 0

    def get_seq_length(self):
        return self.length


class Speaker(nn.Module):
    """A model with the arguments of a causal LM."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids, position_ids=None, past_key_values=None):
        if past_key_values is not None:
            past_key_values.length += input_ids.shape[-1]
        return {"logits": self.head(torch.tanh(self.embed(input_ids)))}


def config(tmp_path, **more):
    return from_document({"output": str(tmp_path / "run"), "dump": {"level": "L0"}, **more}, "test")


def passes(tmp_path, step):
    return json.loads((tmp_path / f"run/step_{step:06d}/rank_00000/sites.json").read_text())["passes"]


def kept(tmp_path, step, path):
    run = open_run(tmp_path / "run")
    found = run.rows(step=step).filter(f"kind = 'token' and path = '{path}'").project("tensor").fetchall()
    return [read_tensor(run, step, 0, key).numpy() for (key,) in found]


IDS = torch.tensor([[1, 5, 2, 9], [0, 10, 3, 3]])


def test_every_call_is_a_step_with_its_tokens_and_log_probs(tmp_path):
    model, plain = Speaker(), Speaker()
    with attach(model, config=config(tmp_path), forward_only=True) as session, torch.no_grad():
        first = model(IDS, position_ids=torch.arange(4).expand(2, 4))["logits"]
        model(IDS[:, :2])
    assert torch.equal(first, plain(IDS)["logits"])
    assert session.steps_recorded == [0, 1] and not session.faults
    assert steps(tmp_path / "run") == [0, 1] and faults(tmp_path / "run") == ([], [])
    assert kept(tmp_path, 0, "input_ids")[0].tolist() == IDS.tolist()
    assert kept(tmp_path, 0, "position_ids")[0].tolist() == [[0, 1, 2, 3]] * 2
    scores = kept(tmp_path, 0, "whole")[0].astype(np.float64)
    logits = first.double().numpy()
    for sample in range(2):
        for at in range(3):
            expected = logits[sample, at, IDS[sample, at + 1]] - math.log(np.exp(logits[sample, at]).sum())
            assert scores[sample, at, 1] - scores[sample, at, 0] == pytest.approx(expected, abs=1e-5)
    assert np.isnan(scores[:, -1]).all()


def test_prefill_and_decode_are_told_apart(tmp_path):
    model, cache = Speaker(), Cache()
    with attach(model, config=config(tmp_path, forward_passes="call")) as session, torch.no_grad():
        model(IDS, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)
        model(IDS[:, :1])
        session.name_pass("decode")
        model(IDS[:, 0])
        model(IDS[0])
    found = [passes(tmp_path, step)[0]["pass"] for step in range(5)]
    assert found == ["prefill", "decode", "prefill", "decode", "flattened"]
    assert passes(tmp_path, 0) == [{"microbatch": 0, "pass": "prefill", "samples": 2, "tokens": 8}]


def test_a_step_by_hand_holds_several_passes(tmp_path):
    model = Speaker()
    with attach(model, config=config(tmp_path, forward_passes="step")) as session, torch.no_grad():
        for _ in range(2):
            model(IDS)
            model(IDS[:, :3])
            session.step()
    assert steps(tmp_path / "run") == [0, 1]
    assert [entry["tokens"] for entry in passes(tmp_path, 1)] == [8, 6]
    assert [len(ids[0]) for ids in kept(tmp_path, 1, "input_ids")] == [4, 3]


def test_training_beside_the_passes_is_not_seen_and_not_a_bit_changed(tmp_path):
    def trained(probed):
        model = Speaker()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        session = attach(model, optimizer, config(tmp_path), forward_only=True) if probed else None
        for _ in range(2):
            with torch.no_grad():
                model(IDS)
            optimizer.zero_grad()
            model(IDS)["logits"].square().mean().backward()
            optimizer.step()
        if session is not None:
            session.close()
            assert session.steps_recorded == [0, 1] and not session.faults
        return list(model.parameters())

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


class InPlace(nn.Module):
    """Adds a residual in place and returns it as a new tensor, as Megatron does without gradients."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        out = self.inner(x)
        out.add_(x)
        fresh = torch.empty((1,))
        fresh.data = out.data
        return fresh


def test_a_tensor_changed_in_place_behind_its_version_counter_is_measured_anew(tmp_path):
    model, x = InPlace(), torch.linspace(-1, 2, 8).reshape(2, 4)
    with attach(model, config=config(tmp_path), forward_only=True), torch.no_grad():
        expected = float(model(x).double().sum())
    (row,) = [r for r in rows(tmp_path / "run", 0) if r["name"] == "model" and r["io"] == "output"]
    assert row["sum"] == pytest.approx(expected, rel=1e-5)


def test_a_pass_that_raises_ends_its_step(tmp_path):
    model = Speaker()
    with attach(model, config=config(tmp_path), forward_only=True) as session, torch.no_grad():
        with pytest.raises(IndexError):
            model(IDS + 50)
        model(IDS)
    assert not session.faults and session.steps_recorded[-1] == 1
    assert kept(tmp_path, 1, "input_ids")[0].tolist() == IDS.tolist()


def test_other_words_are_refused(tmp_path):
    assert config(tmp_path, forward_passes=True).forward_passes == "call"
    with pytest.raises(ConfigError, match=r"forward_passes: 'always'.*off, call, step"):
        config(tmp_path, forward_passes="always")
