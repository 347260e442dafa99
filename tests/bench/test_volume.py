"""How much the task `tensor` writes: the calculation finds known coefficients, and meets a run it has not seen."""

import numpy as np
import pytest

from msprobe_megatron.bench.volume import CALIBRATION, HELD_OUT, MODELS, calculation, fitted, recorded, speeds
from tests.forked import run_forked


def test_coefficients_are_found_from_the_small_models():
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 60, len(HELD_OUT.terms())).astype(float)
    sizes = [round(float(np.array(shape.terms()) @ weights)) for shape in CALIBRATION]
    found = fitted(CALIBRATION, sizes)
    assert np.allclose(found, weights, atol=0.3)
    for shape in (HELD_OUT, *MODELS.values()):
        assert calculation(found, shape) == pytest.approx(float(np.array(shape.terms()) @ weights), rel=1e-3)


def of_one(level):
    import torch

    torch.set_num_threads(1)
    sizes = [recorded(shape, level)[0] for shape in CALIBRATION]
    weights = fitted(CALIBRATION, sizes)
    actual, _ = recorded(HELD_OUT, level)
    return calculation(weights, HELD_OUT) / actual - 1


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_the_calculation_meets_a_model_that_was_not_used(level):
    (error,) = run_forked(1, of_one, level, timeout=600)
    assert abs(error) < 0.02


def test_speeds_are_of_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("msprobe_megatron.bench.volume._SPEED_BYTES", 1 << 20)
    monkeypatch.setattr("msprobe_megatron.bench.volume._SPEED_TENSOR", 1 << 16)
    found = speeds(tmp_path, turns=1)
    assert found["bytes"] == 1 << 20 and found["share"] > 0
    assert list(tmp_path.iterdir()) == []
