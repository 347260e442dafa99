"""Which run may serve as the noise of another: the same data, the same weights but for their last places."""

from types import SimpleNamespace

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.comparable import no_repetition
from tests.unit.analysis.compare.pairs_of_rows import figures_of, pair, pairs_of

RUN = SimpleNamespace(dumped_steps=[], path="golden", facts={}, steps=[0])
NOISE = SimpleNamespace(dumped_steps=[], path="again", facts={}, steps=[0])
TOKENS = np.arange(64)


def why_not(weights, moved, dtype="float32", tokens=TOKENS, **changes):
    """Of one activation that lies far apart, the batch and one weight of both runs."""
    activation = pair(figures_of(weights), figures_of(2 * weights))
    data = pair(figures_of(TOKENS), figures_of(tokens), kind="data", name="model", io="input", path="input_ids")
    of = {"kind": "parameter", "name": "decoder.layers.0.mlp.w", "io": "value", "dtype_l": dtype, "dtype_r": dtype}
    weight = pair(figures_of(weights), figures_of(moved), **{**of, **changes})
    return no_repetition(RUN, NOISE, None, pairs_of(activation, data, weight))


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-23), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_weights_of_a_repetition_may_be_off_by_their_last_place(dtype, unit):
    weights = np.random.default_rng(0).uniform(1.0, 2.0, 4096)
    assert why_not(weights, weights, dtype) == ""
    assert why_not(weights, weights + unit, dtype) == "", "one unit, all upwards"
    told = why_not(weights, weights * (1 + 20 * unit), dtype)
    assert told.startswith(
        "--noise again is not a repetition of golden: its weights differ, decoder.layers.0.mlp.w by "
    )


def test_only_the_weights_of_the_first_step_have_to_be_the_same():
    weights = np.random.default_rng(1).standard_normal(256)
    assert why_not(weights, 3 * weights, step=1) == ""
    assert "its weights differ" in why_not(weights, 3 * weights)


def test_other_data_are_no_repetition():
    weights = np.ones(8)
    assert why_not(weights, weights, tokens=TOKENS + 1).endswith("its input data differ")
