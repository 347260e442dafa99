"""First cause, not first symptom: order of cause and what is inherited."""

import numpy as np
import pytest

from msprobe_megatron.analysis.compare.verdict.causes import causal_order, classify, culprit
from msprobe_megatron.analysis.compare.verdict.judge import Judgement
from tests.unit.analysis.compare.pairs_of_rows import pair, pairs_of

_LAYER = "decoder.layers.0"
_PLACES = {
    ("embedding", "output", ""): 0.0,
    (_LAYER, "input", "x"): 1.0,
    (f"{_LAYER}.mlp", "input", "x"): 2.0,
    (f"{_LAYER}.mlp", "output", ""): 3.0,
    (_LAYER, "output", ""): 4.0,
    ("output_layer", "input", "x"): 5.0,
    ("output_layer", "output", ""): 6.0,
}


def entries():
    """All tensors of two microbatches of a tiny model, in the order of the dictionary above."""
    found = []
    for block in (1, 0):
        for name, io, path in _PLACES:
            where = {"name": name, "io": io, "path": path, "block": block, "microbatch": float(block)}
            found.append(pair(**where))
            found.append(pair(**where, kind="gradient", phase="backward"))
    for name in ("embedding.weight", f"{_LAYER}.mlp.weight"):
        whole = {"name": name, "io": "weight", "block": 0, "microbatch": np.nan, "phase": "optimizer"}
        found += [pair(**whole, kind="parameter"), pair(**whole, kind="grad_reduced")]
    return found


def states(*wrong):
    """States of what differs, in order of cause; `wrong` are (kind, name, io, block, excess)."""
    pairs = pairs_of(*entries())
    excess = np.zeros(len(pairs))
    for kind, name, io, block, factor in wrong:
        at = (pairs["kind"] == kind) & (pairs["name"] == name) & (pairs["io"] == io)
        excess[at & (pairs["block"] == block)] = factor
    nothing = np.zeros(len(pairs), bool)
    judgement = Judgement(
        excess, np.ones(len(pairs)), excess > 1, nothing, nothing, np.array([""] * len(pairs), object)
    )
    order = causal_order(pairs, _PLACES)
    found = classify(pairs, judgement, order)
    return [(pairs["kind"][i], pairs["name"][i], pairs["io"][i], found[i]) for i in order if excess[i] > 1]


def test_order_of_cause():
    pairs = pairs_of(*entries())
    order = causal_order(pairs, _PLACES)
    seen = [(pairs["kind"][i], int(pairs["block"][i]), pairs["name"][i], pairs["io"][i]) for i in order]
    names = [(name, io) for name, io, _ in _PLACES]
    expected = [("parameter", 0, "embedding.weight", "weight"), ("parameter", 0, f"{_LAYER}.mlp.weight", "weight")]
    for block in (0, 1):
        expected += [("activation", block, *name) for name in names]
        expected += [("gradient", block, *name) for name in reversed(names)]
    expected += [
        ("grad_reduced", 0, f"{_LAYER}.mlp.weight", "weight"),
        ("grad_reduced", 0, "embedding.weight", "weight"),
    ]
    assert seen == expected


def test_an_output_diverges_where_its_inputs_agree():
    mlp, layer = (("activation", name, "output", 0, 9) for name in (f"{_LAYER}.mlp", _LAYER))
    assert [state[-1] for state in states(mlp, layer)] == ["diverged", "inherited"]


def test_a_module_around_does_not_hide_the_one_inside():
    """The layer's input agrees and its output does not, but the module inside it explains that."""
    found = states(("activation", _LAYER, "output", 0, 99), ("activation", f"{_LAYER}.mlp", "output", 0, 9))
    assert found[0][1:] == (f"{_LAYER}.mlp", "output", "diverged")
    assert found[1][1:] == (_LAYER, "output", "inherited")


def test_a_weight_explains_what_is_computed_with_it():
    weight = ("parameter", f"{_LAYER}.mlp.weight", "weight", 0, 2)
    output = ("activation", f"{_LAYER}.mlp", "output", 0, 99)
    assert [state[-1] for state in states(weight, output)] == ["diverged", "inherited"]


def test_backward_follows_the_forward_that_causes_it():
    forward = ("activation", "output_layer", "output", 0, 9)
    backward = ("gradient", "output_layer", "output", 0, 99)
    found = states(forward, backward)
    assert [(state[0], state[-1]) for state in found] == [("activation", "diverged"), ("gradient", "inherited")]


def test_a_gradient_diverges_where_the_gradient_that_arrives_agrees():
    made = ("gradient", f"{_LAYER}.mlp", "input", 0, 9)
    after = ("gradient", _LAYER, "input", 0, 9)
    assert [state[-1] for state in states(made, after)] == ["diverged", "inherited"]


def test_microbatches_are_independent():
    found = states(*(("activation", f"{_LAYER}.mlp", "output", block, 9) for block in (0, 1)))
    assert [state[-1] for state in found] == ["diverged", "diverged"]


def test_a_reduced_gradient_diverges_where_everything_before_it_agrees():
    gradient = ("grad_reduced", f"{_LAYER}.mlp.weight", "weight", 0, 9)
    assert [state[-1] for state in states(gradient)] == ["diverged"]
    arriving = ("gradient", f"{_LAYER}.mlp", "output", 1, 9)
    assert [state[-1] for state in states(arriving, gradient)] == ["diverged", "inherited"]


def test_what_differs_less_than_something_before_it_is_inherited():
    """The difference passed below the tolerance on its way, so that inputs seem to agree."""
    large, small = ("activation", "embedding", "output", 0, 90), ("activation", "output_layer", "output", 0, 3)
    assert [state[-1] for state in states(large, small)] == ["diverged", "inherited"]
    larger = ("activation", "output_layer", "output", 0, 900)
    assert [state[-1] for state in states(large, larger)] == ["diverged", "diverged"]


@pytest.mark.parametrize(
    ("kind", "name", "io", "module"),
    [
        ("activation", "decoder.layers.1.mlp", "output", "decoder.layers.1.mlp"),
        ("activation", "decoder.layers.1.mlp", "input", "decoder.layers.1"),
        ("activation", "decoder.layers.1", "input", "decoder"),
        ("activation", "model", "input", "data"),
        ("activation", "embedding", "input", "model"),
        ("gradient", "decoder.layers.1.mlp", "input", "decoder.layers.1.mlp"),
        ("gradient", "decoder.layers.1.mlp", "output", "decoder.layers.1"),
        ("gradient", "model", "output", "loss"),
        ("parameter", "decoder.layers.1.mlp.linear_fc1.weight", "weight", "decoder.layers.1.mlp.linear_fc1"),
        ("loss", "lm loss", "output", "lm loss"),
    ],
)
def test_the_module_to_look_at(kind, name, io, module):
    assert culprit(kind, name, io) == module
