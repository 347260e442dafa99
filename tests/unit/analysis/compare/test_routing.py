"""Routers of two runs, decided from made-up records."""

import numpy as np

from msprobe_megatron.analysis.compare import routing
from msprobe_megatron.analysis.compare.routing import _compared, _Noise, _room

_KEY = (0, "decoder.layers.0.mlp.router")
_NOISE = _Noise(expected=0.01, last_place=2.0**-7, same_input=True)


def _side(codes, margins, fits=0):
    words = np.stack((np.asarray(codes, np.int32) * 2 + fits, np.asarray(margins, np.float32).view(np.int32)), -1)
    return {sample: words[sample] for sample in range(len(words))}


def _random(tokens=(4, 32), seed=3):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, tokens), rng.uniform(0.1, 1.0, tokens), rng


def test_tokens_on_the_edge_may_go_elsewhere():
    codes, margins, rng = _random()
    margins[1, 5] = 0.004
    other = codes.copy()
    other[1, 5] += 1
    found = _compared(
        _KEY, _side(codes, margins), _side(other, margins + rng.normal(0, 0.002, margins.shape)), _NOISE, {}
    )
    assert found is not None
    assert (found.otherwise, found.tokens, found.wrong) == (1, 128, False)
    assert found.text == "1 of 128 tokens routed otherwise, all within rounding of the edge"
    assert found.by_sample[1] == (1, 32)
    assert found.by_sample[0] == (0, 32)


def test_a_token_far_from_the_edge_is_the_fault_of_the_router():
    codes, margins, _ = _random()
    margins[1, 5] = 0.4
    other = codes.copy()
    other[1, 5] += 1
    found = _compared(_KEY, _side(codes, margins), _side(other, margins), _NOISE, {})
    assert found is not None
    assert found.wrong
    assert "1 of them too far from the edge for rounding (margin 0.4 of the scores" in found.text


def test_noise_that_was_measured_does_not_excuse_more_than_theory():
    """A wrong bias moves all margins: that they differ is no reason to expect it."""
    codes, margins, rng = _random()
    other = codes.copy()
    other[2, 7] += 1
    margins[2, 7] = 0.5
    found = _compared(
        _KEY, _side(codes, margins), _side(other, margins + rng.normal(0, 0.3, margins.shape)), _NOISE, {}
    )
    assert found is not None
    assert found.wrong


def _earlier(sample, position):
    return {(0, sample): np.arange(32) == position}


def test_a_token_that_went_elsewhere_before_says_nothing_about_the_next_router():
    codes, margins, _ = _random()
    margins[1, 5] = 3.0
    other = codes.copy()
    other[1, 5] += 1
    own, of_another = (
        _compared(_KEY, _side(codes, margins), _side(other, margins), _NOISE, _earlier(1, position))
        for position in (5, 6)
    )
    assert own is not None
    assert of_another is not None
    assert (own.wrong, of_another.wrong) == (False, True)
    assert own.otherwise == 1


def test_after_weights_have_drifted_measured_noise_counts():
    codes, margins, rng = _random()
    margins[1, 5] = 0.4
    other = codes.copy()
    other[1, 5] += 1
    right = _side(other, margins + rng.normal(0, 0.1, margins.shape))
    first, later = (
        _compared(_KEY, _side(codes, margins), right, _Noise(0.01, 2.0**-7, True, drifted=drifted), {})
        for drifted in (False, True)
    )
    assert first is not None
    assert later is not None
    assert (first.wrong, later.wrong) == (True, False)


def test_behind_a_moved_token_scores_may_move_further():
    codes, margins, rng = _random()
    other = codes.copy()
    other[1, 5] += 1
    margins[1, 5] = 0.2
    right = _side(other, margins + rng.normal(0, 0.05, margins.shape))
    clean, behind = (_compared(_KEY, _side(codes, margins), right, _NOISE, moved) for moved in ({}, _earlier(1, 2)))
    assert clean is not None
    assert behind is not None
    assert (clean.wrong, behind.wrong) == (True, False)


def test_scores_in_bfloat16_are_seen():
    codes, margins, _ = _random()
    found = _compared(_KEY, _side(codes, margins), _side(codes, margins, fits=1), _NOISE, {})
    assert found is not None
    assert found.text == "the scores have the precision of bfloat16 in the second run only"
    other_precision = _Noise(0.01, 2.0**-7, same_input=False)
    assert not _compared(_KEY, _side(codes, margins), _side(codes, margins, fits=1), other_precision, {}).wrong


def test_no_room_without_moved_tokens():
    assert _room(np.array([0.0, 0.01, 0.9])).tolist() == [0.0, 0.01 + 0.1 / 8, routing._ANYTHING]
