"""Tolerances follow dtype, depth, size and steps."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.verdict.tolerance import Scene, depths, tolerances
from msprobe_megatron.analysis.load.run import Run
from tests.unit.analysis.compare.pairs_of_rows import pair, pairs_of


def scene(**changes):
    return Scene(
        **{"eps": 2.0**-23, "layers": 8, "reduction": 64, "tokens": 128, "first_step": 0, "lr": 1e-3} | changes
    )


def allowed(entry, **changes):
    return float(tolerances(pairs_of(entry), scene(**changes)).average[0])


def test_depth_counts_layers_to_the_loss_and_back():
    names = ["embedding", "decoder.layers.0", "decoder.layers.7", "decoder.final_layernorm", "model"]
    forward = pairs_of(*(pair(name=name) for name in names))
    assert depths(forward, 8).tolist() == [0, 1, 8, 9, 9]
    backward = pairs_of(*(pair(name=name, kind="gradient") for name in names))
    assert depths(backward, 8).tolist() == [18, 17, 10, 9, 9]


def test_coarser_deeper_smaller_and_later_allow_more():
    first, last = pair(name="decoder.layers.0"), pair(name="decoder.layers.7")
    assert allowed(last) > allowed(first)
    assert allowed(first, eps=2.0**-7) > 1000 * allowed(first)
    assert allowed(pair({"numel": 16})) > allowed(pair({"numel": 1 << 20}))
    assert allowed(pair(step=3)) > 10 * allowed(first)
    assert allowed(pair(step=3), first_step=3) == allowed(first)
    assert allowed(pair(kind="gradient", name="decoder.layers.0")) > allowed(first)


def test_nothing_beyond_a_quarter_is_ever_called_rounding():
    assert allowed(pair(step=10**6), eps=2.0**-2) == 0.25


def test_weights_of_the_first_step_and_the_batch_are_exact():
    weight = {"kind": "parameter", "io": "weight", "name": "decoder.layers.7.mlp.linear_fc1.weight"}
    assert allowed(pair(**weight), eps=2.0**-7) < 1e-6
    assert allowed(pair(**weight, dtype_r="bfloat16")) > 1e-4
    ids = {"name": "model", "io": "input", "path": "input_ids", "dtype_l": "int64", "dtype_r": "int64"}
    assert allowed(pair(**ids)) == 1e-12


def test_an_adam_step_moves_a_weight_by_its_learning_rate():
    """The relative drift of a weight is steps * lr * sqrt(noise) over its own size."""
    weight = {"kind": "parameter", "io": "weight", "name": "decoder.layers.0.mlp.linear_fc1.weight"}
    size = np.sqrt(100.0 / 1024)  # of the figures that `pair` gives
    noise = (2.0**-23 + 2.0**-23 * np.sqrt(128)) * np.sqrt(1 + 4 * 9)
    expected = 1.5 * (5 * 1e-3 * np.sqrt(noise) / size + 2 * 2.0**-23)
    assert allowed(pair(step=5, **weight)) == pytest.approx(expected)


def test_a_weight_after_the_optimizer_has_moved_once_more():
    weight = {"kind": "parameter", "io": "weight", "name": "decoder.layers.0.mlp.linear_fc1.weight"}
    assert allowed(pair(**weight, path="before")) < 1e-6
    assert allowed(pair(**weight, path="after")) == allowed(pair(**weight, path="before", step=1))
    assert allowed(pair(**weight, path="after")) < 1e-3


def test_the_scene_is_read_from_both_runs(tmp_path):
    facts = {"hidden_size": 64, "ffn_hidden_size": 256, "seq_length": 128, "global_batch_size": 8, "lr": 3e-4}
    golden = Run(tmp_path, {"arguments": {**facts, "iteration": 100}})
    other = Run(tmp_path, {"arguments": facts})
    found = Scene.of(golden, other, pairs_of(pair(dtype_r="bfloat16"), pair(name="decoder.layers.5")))
    assert found == Scene(2.0**-7, 6, 256.0, 1024.0, 100, 3e-4)


def norm(left, right, step=0):
    """The two gradient norms of a step."""
    return pair(
        {"sum": left, "sumsq": left**2, "numel": 1},
        {"sum": right, "sumsq": right**2, "numel": 1},
        kind="loss",
        name="grad_norm",
        step=step,
    )


def test_what_was_clipped_may_be_off_by_the_rounding_of_the_norm():
    state = {"kind": "optimizer_state", "name": "decoder.layers.0.mlp.linear_fc1.weight"}
    gradient = pair(kind="grad_reduced", name="decoder.layers.0.mlp.linear_fc1.weight")
    plain = float(tolerances(pairs_of(pair(**state)), scene()).average[0])
    off = tolerances(pairs_of(norm(1.0, 1.0 + 3e-6), pair(**state), gradient), scene()).average
    assert off[1] == pytest.approx(plain + 2 * 3e-6, rel=1e-3)
    assert off[2] == pytest.approx(allowed(gradient))  # not clipped
    later = tolerances(pairs_of(norm(1.0, 1.0 + 3e-6), norm(1.0, 1.0, 1), pair(step=1, **state)), scene()).average
    assert later[2] == pytest.approx(allowed(pair(step=1, **state)) + 2 * 3e-6, rel=1e-3)


def test_a_wrong_norm_excuses_nothing_beyond_rounding():
    state = pair(kind="optimizer_state", name="decoder.layers.0.mlp.linear_fc1.weight")
    found = tolerances(pairs_of(norm(1.0, 1.4), state), scene()).average
    assert found[1] < 1e-4
