"""Expert tensor parallelism: summands are compared by their sum; gradients that nobody adds up are found."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor

_LAYER = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2"


def test_summands_of_an_expert_are_compared_by_their_sum(runs):
    """The ranks of an expert hold summands until the tokens have gone home."""
    result = compare(open_run(runs.clean("moe")), open_run(runs.clean("moe_tp2")))
    assert result.verdict == "agree", result.first_divergence
    assert result.layout == {}
    rows = [row for row in result.table.to_pylist() if row["name"] == _LAYER and row["io"] == "output"]
    forward = [row for row in rows if row["kind"] == "activation"]
    assert forward and all(row["sum_golden"] == pytest.approx(row["sum_run"], rel=1e-3, abs=1e-4) for row in forward)


def test_a_lost_summand_is_named(runs):
    result = compare(open_run(runs.clean("moe")), open_run(runs.faulty("moe_tp2", "expert_summand_lost")))
    assert result.verdict == "diverged"
    assert result.first_divergence.module == _LAYER


def _weight_gradients(run):
    """By rank: the gradient of the weight in float64, from what went into the layer and what came back to it."""
    found = {}
    rows = run.rows(step=0).filter(f"name = '{_LAYER}' and tensor is not null")
    columns = "rank, microbatch, kind, io, tensor"
    tensors = {(r, m, kind, io): (r, key) for r, m, kind, io, key in rows.project(columns).fetchall()}
    for rank, microbatch, kind, io in tensors:
        if (kind, io) == ("activation", "input"):
            x, dy = (
                read_tensor(run, 0, *tensors[(rank, microbatch, *which)]).numpy().astype(np.float64)
                for which in (("activation", "input"), ("gradient", "output"))
            )
            found[rank] = found.get(rank, 0.0) + dy.T @ x
    return found


def _recorded_gradients(run):
    rows = run.rows(step=0).filter(f"name = '{_LAYER}.weight' and kind = 'grad_reduced' and tensor is not null")
    return {rank: read_tensor(run, 0, rank, key).numpy() for rank, key in rows.project("rank, tensor").fetchall()}


def test_expert_gradients_that_megatron_does_not_add_up_are_found(runs):
    """TP2 with ETP1 and EP1 (docs/found.md): no false alarm, by a reference in float64."""
    golden, split = open_run(runs.saved("moe")), open_run(runs.saved("moe_tp2_etp1"))
    whole, parts = _weight_gradients(golden), _weight_gradients(split)
    recorded, unreduced = _recorded_gradients(golden), _recorded_gradients(split)
    # Both ranks hold the whole expert and half of its tokens: the gradient is the sum over both.
    np.testing.assert_allclose(parts[0] + parts[1], whole[0], rtol=1e-4, atol=1e-7)
    scale = float((recorded[0] * whole[0]).sum() / (whole[0] ** 2).sum())
    np.testing.assert_allclose(recorded[0], scale * whole[0], rtol=1e-4, atol=1e-9)
    # The optimizer of each rank is given that of its own tokens.
    for rank in (0, 1):
        np.testing.assert_allclose(unreduced[rank], scale * parts[rank], rtol=1e-4, atol=1e-9)
    assert np.abs(unreduced[0] - unreduced[1]).max() > 0.1 * np.abs(recorded[0]).max()
    result = compare(golden, split)
    assert result.verdict == "diverged"
    assert result.first_divergence.kind == "grad_reduced"
    assert ".experts.local_experts." in result.first_divergence.name
    assert any("ETP" in text for text in result.hints)
