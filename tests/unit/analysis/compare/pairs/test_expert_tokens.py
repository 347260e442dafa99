"""Which token a row of an expert is: found by its bits, left out where two are alike, refused where it is no copy."""

import json
import struct

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.pairs.expert_tokens import SAMPLE, ExpertTokens
from msprobe_megatron.analysis.compare.pairs.tensor_pairs import Saved
from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.load.saved_tensors import TensorFiles

_LAYER = "decoder.layers.1.mlp"
_EXPERT = f"{_LAYER}.experts.local_experts.3"


def run_of(root, layer_inputs, expert_input):
    """Two data-parallel ranks with micro-batch size 2: inputs of the layer, and what one expert got on rank 1."""
    tensors = {**{f"0:{i}": x for i, x in enumerate(layer_inputs)}, "0:9": expert_input}
    saved = {}
    for rank in (0, 1):
        directory = root / "step_000000" / f"rank_{rank:05d}"
        directory.mkdir(parents=True)
        entries, data = {}, b""
        for key, x in tensors.items():
            entries[key] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
            data += x.tobytes()
        head = json.dumps(entries).encode()
        (directory / "tensors.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    place = dict.fromkeys(("tp", "pp", "cp", "ep", "etp", "edp"), 0)
    saved[0, "forward", "activation", _LAYER, "input", "hidden_states"] = [
        Saved(2 * rank, rank, f"0:{rank}", x.shape, x.shape, "s b[dp:samples] h", 1.0, {**place, "dp": rank})
        for rank, x in enumerate(layer_inputs)
    ]
    saved[0, "forward", "activation", _EXPERT, "input", "hidden_states"] = [
        Saved(0, 1, "0:9", expert_input.shape, None, "x[dp:samples] h", 1.0, {**place, "dp": 1})
    ]
    return ExpertTokens(saved, TensorFiles(Run(root, {})), {"dp": 2})


@pytest.fixture
def inputs():
    return [np.random.default_rng(seed).normal(size=(5, 2, 4)).astype(np.float32) for seed in (1, 2)]


def test_rows_are_found_by_their_bits(inputs, tmp_path):
    # (rank, position, sample in the microbatch) in the order of arrival
    arrived = [(1, 4, 0), (0, 0, 1), (0, 3, 0), (1, 2, 1)]
    expert = np.stack([inputs[rank][s, b] for rank, s, b in arrived])
    numbers = run_of(tmp_path, inputs, expert).numbers(0, f"{_EXPERT}.linear_fc2", 1, 0)
    assert numbers.tolist() == [(2 * rank + b) * SAMPLE + s for rank, s, b in arrived]


def test_tokens_that_are_alike_and_padding_are_left_out(inputs, tmp_path):
    inputs[1][0, 0] = inputs[0][0, 0]  # the first token of two samples
    expert = np.stack([inputs[0][0, 0], inputs[0][1, 1], np.zeros(4, np.float32)])
    assert run_of(tmp_path, inputs, expert).numbers(0, _EXPERT, 1, 0).tolist() == [-1, SAMPLE + 1, -1]


def test_what_is_no_copy_is_not_guessed(inputs, tmp_path):
    expert = inputs[0][:, 0] * np.float32(1.0000002)
    tokens = run_of(tmp_path, inputs, expert)
    assert tokens.numbers(0, _EXPERT, 1, 0) is None
    assert tokens.numbers(0, _EXPERT, 0, 0) is None
    assert tokens.numbers(0, f"{_LAYER}.experts", 1, 0) is None
    assert tokens.numbers(7, _EXPERT, 1, 0) is None
