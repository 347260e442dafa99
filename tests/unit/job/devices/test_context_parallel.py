"""Attention split over the sequence against dense attention in NumPy float64, values and gradients."""

import functools

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.models.gpt import GPTModel  # noqa: F401 (imported once, before ranks are forked)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from msprobe_megatron.job.devices.megatron_on_cpu.context_parallel import causal_rows, local_positions
from tests.unit.job.devices.forked import RankFailed, run_forked

S, B, H, D = 16, 2, 4, 3
GROUPS = 2  # query groups: key and value have two heads


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [(0, 2, [0, 1, 6, 7]), (1, 2, [2, 3, 4, 5]), (0, 1, list(range(8))), (2, 4, [2, 5])],
)
def test_positions_of_a_rank(rank, size, expected):
    assert local_positions(8, rank, size).tolist() == expected


def test_causal_rows_hide_what_comes_later():
    rows = causal_rows(4, 0, 2)
    assert rows.shape == (1, 1, 2, 4) and rows.dtype is torch.bool
    assert rows[0, 0].tolist() == [[False, True, True, True], [False, False, False, False]]


def _inputs():
    random = np.random.default_rng(0)
    shapes = {
        "query": (S, B, H, D),
        "key": (S, B, GROUPS, D),
        "value": (S, B, GROUPS, D),
        "grad": (S, B, H * D),
    }
    return {name: random.standard_normal(shape) for name, shape in shapes.items()}


def _dense(hidden):
    """Output and gradients of softmax attention, `hidden` [s, s] telling which keys a query must not see."""
    given = _inputs()
    query, grad = given["query"], given["grad"].reshape(S, B, H, D)
    key, value = (np.repeat(given[name], H // GROUPS, axis=2) for name in ("key", "value"))
    scores = np.einsum("qbhd,kbhd->bhqk", query, key) / np.sqrt(D)
    weights = np.exp(np.where(hidden, -np.inf, scores))
    weights /= weights.sum(-1, keepdims=True)
    output = np.einsum("bhqk,kbhd->qbhd", weights, value).reshape(S, B, H * D)
    of_weights = np.einsum("qbhd,kbhd->bhqk", grad, value)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True)) / np.sqrt(D)
    folded = (S, B, GROUPS, H // GROUPS, D)
    return {
        "output": output,
        "query": np.einsum("bhqk,kbhd->qbhd", of_scores, key),
        "key": np.einsum("bhqk,qbhd->kbhd", of_scores, query).reshape(folded).sum(3),
        "value": np.einsum("bhqk,qbhd->kbhd", weights, grad).reshape(folded).sum(3),
    }


def _attend(size, kind, mask=None, **config):
    """What one CP rank computes, and the shape of the scores its softmax saw."""
    ps.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(1)
    fields = {"num_layers": 1, "hidden_size": H * D, "num_attention_heads": H, "num_query_groups": GROUPS}
    settings = TransformerConfig(
        **fields, context_parallel_size=size, attention_dropout=0.0, masked_softmax_fusion=True, **config
    )
    attention = DotProductAttention(settings, 1, AttnMaskType[kind], "self")
    assert settings.context_parallel_size == size
    seen = []
    attention.scale_mask_softmax.register_forward_pre_hook(lambda module, args: seen.append(list(args[0].shape)))
    here = local_positions(S, ps.get_context_parallel_rank(), size)
    local = {name: torch.tensor(array, dtype=torch.float32)[here] for name, array in _inputs().items()}
    leaves = [local[name].requires_grad_() for name in ("query", "key", "value")]
    output = attention(*leaves, None if mask is None else mask[:, :, here])
    output.backward(local["grad"])
    answer = {"positions": here.tolist(), "scores": seen, "output": output.tolist()}
    return {**answer, **{n: x.grad.tolist() for n, x in zip(("query", "key", "value"), leaves, strict=True)}}


def _check(size, expected, results):
    for result in results:
        assert result["scores"] == [[B, H, S // size, S]]
        for name, array in expected.items():
            np.testing.assert_allclose(result[name], array[result["positions"]], rtol=1e-4, atol=1e-5, err_msg=name)


CAUSAL = ~np.tri(S, dtype=bool)


@pytest.mark.parametrize("size", [2, 4])
def test_causal_attention(size):
    _check(size, _dense(CAUSAL), run_forked(size, functools.partial(_attend, size, "causal")))


def test_attention_without_a_mask():
    _check(2, _dense(np.zeros((S, S), dtype=bool)), run_forked(2, functools.partial(_attend, 2, "no_mask")))


def test_a_given_mask_is_kept():
    """Rows cut for the local queries, all keys: two documents in one sequence, for example."""
    hidden = CAUSAL.copy()
    hidden[9:, :9] = True
    mask = torch.tensor(hidden)[None, None]
    for kind in ("causal", "arbitrary"):
        _check(2, _dense(hidden), run_forked(2, functools.partial(_attend, 2, kind, mask)))


def test_what_is_not_supported_is_refused():
    with pytest.raises(RankFailed, match=r"mask type 'padding' with a mask of shape None; accepted: causal"):
        run_forked(2, functools.partial(_attend, 2, "padding"))
    with pytest.raises(RankFailed, match=r"sliding window \(window_size\) is not supported"):
        run_forked(2, functools.partial(_attend, 2, "causal", window_size=(4, 0)))
