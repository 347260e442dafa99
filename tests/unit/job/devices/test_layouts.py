"""Real multi-process training: every layout must compute what one process computes, and that is checked
against a NumPy model. A loss that falls proves nothing; equal losses and gradient norms do.
"""

import functools

import pytest

from tests.unit.job.devices.forked import run_forked
from tests.unit.job.devices.numpy_gpt import first_loss
from tests.unit.job.devices.tiny_gpt import Layout, train

ROPE = {"positions": "rope"}
MOE = {"experts": 4}
DEEP = {"layers": 4}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# name: (ranks, layout, the undivided model it must equal)
LAYOUTS = {
    "tp2": (2, Layout(tp=2), {}),
    "tp2_sp": (2, Layout(tp=2, sp=True), {}),
    "pp2": (2, Layout(pp=2), {}),
    "pp2_vpp2": (2, Layout(pp=2, vpp=2, **DEEP), DEEP),
    "dp2": (2, Layout(), {}),
    "dp2_distributed_optimizer_overlap": (2, Layout(distributed_optimizer=True, overlap=True), {}),
    "cp2": (2, Layout(cp=2), {}),
    "cp2_rope": (2, Layout(cp=2, **ROPE), ROPE),
    "cp2_recompute_attention": (2, Layout(cp=2, config={"recompute_granularity": "selective"}), {}),
    "ep2_alltoall": (2, Layout(ep=2, **MOE), MOE),
    "ep2_allgather": (2, Layout(ep=2, config={"moe_token_dispatcher_type": "allgather"}, **MOE), MOE),
    "recompute_full": (1, Layout(config=FULL), {}),
    "tp2_cp2_sp_rope": (4, Layout(tp=2, cp=2, sp=True, **ROPE), ROPE),
    "tp2_pp2_recompute": (4, Layout(tp=2, pp=2, config=FULL), {}),
}


@functools.cache
def _undivided(**model):
    (result,) = run_forked(1, lambda: train(Layout(**model)))
    return result


@pytest.mark.parametrize(("model", "rotary", "layers"), [({}, False, 2), (ROPE, True, 2), (DEEP, False, 4)])
def test_one_process_computes_the_model(model, rotary, layers):
    assert _undivided(**model)["loss"][0] == pytest.approx(first_loss(rotary, layers), rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name):
    ranks, layout, model = LAYOUTS[name]
    expected = _undivided(**model)
    for result in run_forked(ranks, lambda: train(layout)):
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(expected["norm"], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(dtype):
    expected = _undivided()
    layout = Layout(dtype=dtype, distributed_optimizer=True)
    for result in run_forked(2, lambda: train(layout)):
        assert result["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert result["norm"] == pytest.approx(expected["norm"], rel=5e-2)
        assert result["loss"] != expected["loss"]
