"""Judging tensors by their statistics: rounding passes, faults do not, near-zero means are no reason."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.verdict.judge import judge, scales
from msprobe_megatron.analysis.compare.verdict.tolerance import Allowed, Scene, tolerances
from tests.unit.analysis.compare.pairs_of_rows import figures_of, pair, pairs_of

_SCENE = Scene(eps=2.0**-23, layers=4, reduction=64, tokens=128, first_step=0, lr=1e-2)
_BF16 = Scene(eps=2.0**-7, layers=4, reduction=64, tokens=128, first_step=0, lr=1e-2)


def judged(left, right, scene=_SCENE, **common):
    pairs = pairs_of(pair(figures_of(left), figures_of(right), **common))
    return judge(pairs, tolerances(pairs, scene))


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=4096)


def test_rounding_to_the_dtype_agrees(values):
    rounded = values.astype(np.float32).astype(np.float64)
    assert not judged(values, rounded).diverged[0]
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    coarse = bits.view(np.float32).astype(np.float64)
    assert not judged(values, coarse, _BF16, dtype_r="bfloat16").diverged[0]
    # The same rounding is a fault where both runs are float32.
    assert judged(values, coarse).diverged[0]


def test_a_mean_near_zero_is_no_reason(values):
    centred = values - values.mean()
    other = centred + 1e-9 * np.random.default_rng(1).normal(size=values.size)
    relative = abs(other.sum() - centred.sum()) / abs(centred.sum())
    assert relative > 1  # what a comparison of means would have said
    assert not judged(centred, other).diverged[0]


@pytest.mark.parametrize("fault", ["scaled", "shifted", "one_element", "sign"])
def test_faults_diverge(values, fault):
    other = values.copy()
    if fault == "scaled":
        other *= 1.001
    elif fault == "shifted":
        other += 1e-3
    elif fault == "one_element":
        other[7] = 50.0
    else:
        other = -other
    result = judged(values, other)
    assert result.diverged[0]
    assert result.error[0] > result.tolerance[0]


def test_numbers_of_non_finite_elements_must_be_equal(values):
    broken = values.copy()
    broken[3] = np.nan
    assert judged(values, broken).diverged[0]
    assert np.isinf(judged(values, broken).error[0])
    assert not judged(broken, broken).diverged[0]
    other = values.copy()
    other[3] = np.inf
    assert judged(broken, other).diverged[0]


def test_replicas_that_differ_are_a_finding_of_their_own(values):
    figures = figures_of(values)
    pairs = pairs_of(pair(figures, {**figures, "d_norm": 0.1}), pair(figures, {**figures, "d_norm": 1e-9}))
    result = judge(pairs, tolerances(pairs, _SCENE))
    assert result.replica.tolist() == [True, False]
    assert result.diverged.tolist() == [True, False]


def test_equal_digests_agree_and_unequal_ones_show_a_flipped_bit(values):
    figures = figures_of(values)
    weight = {"kind": "parameter", "io": "weight", "name": "decoder.layers.0.mlp.linear_fc1.weight"}
    pairs = pairs_of(
        pair(figures, figures, digest_l=5, digest_r=5, **weight),
        pair(figures, figures, digest_l=5, digest_r=6, **weight),
        pair(figures, figures, digest_l=5, digest_r=6),
    )
    # An activation may differ in its last bits; a weight of the first step may not.
    assert judge(pairs, tolerances(pairs, _SCENE)).diverged.tolist() == [False, True, False]


def test_shapes_that_differ_are_not_compared():
    pairs = pairs_of(
        pair({"numel": 128 * 8}, {"numel": 256 * 8}, global_shape_l=[128, 8], global_shape_r=[256, 8]),
        pair({"numel": 30}, {"numel": 40}, global_shape_l=[30], global_shape_r=[40]),
    )
    result = judge(pairs, tolerances(pairs, _SCENE), padded_vocabulary=(128, 256))
    assert result.layout.tolist() == ["vocabulary padded to 128 and 256", "shape (30,) vs (40,)"]
    assert not result.diverged.any()


def test_a_weight_gradient_that_cancels_is_measured_against_what_was_added_up():
    """The gradient of a key's bias is zero but for rounding; its noise is that of dY X / sqrt(tokens)."""
    rng = np.random.default_rng(2)
    x, dy = rng.normal(size=(64, 8)), rng.normal(size=(64, 8))
    module = "decoder.layers.0.norm"
    entries = [
        pair(figures_of(x), figures_of(x), name=module),
        pair(figures_of(dy), figures_of(dy), name=module, kind="gradient", phase="backward"),
        pair(
            *(
                {"sumsq": value**2, "sum": value, "min": value, "max": value, "absmax": abs(value)}
                for value in (1e-8, -2e-8)
            ),
            **{"name": f"{module}.bias", "kind": "grad_reduced", "io": "weight", "microbatch": np.nan},
        ),
    ]
    for entry in entries[:2]:
        entry |= {"global_shape_l": [64, 8], "global_shape_r": [64, 8]}
    pairs = pairs_of(*entries)
    expected = np.sqrt((x**2).sum() * (dy**2).sum() / 64)
    assert scales(pairs)[2] == pytest.approx(expected)
    assert not judge(pairs, tolerances(pairs, _SCENE)).diverged.any()
    alone = pairs_of(entries[2])
    assert judge(alone, tolerances(alone, _SCENE)).diverged.all()


def test_measured_noise_raises_what_is_allowed():
    allowed = Allowed(np.array([1e-3, 1e-3]), np.array([2e-3, 2e-3]), np.array([4e-3, 4e-3]))
    raised = allowed.at_least(np.array([5e-3, 0.0]), np.array([0.0, 9e-3]))
    assert raised.average.tolist() == [5e-3, 1e-3]
    assert raised.extreme.tolist() == [2e-3, 9e-3]
    assert raised.element.tolist() == [4e-3, 9e-3]
