"""The verdict from figures alone: what has no size says nothing, whatever the figures beside it."""

import math

import numpy as np
import pytest

from msprobe_megatron.probes.perturb.figures import PLACE, WIDTH
from msprobe_megatron.probes.perturb.verdict import Examined, judge


def examined(mode="add_noise"):
    return Examined(
        0,
        0,
        0,
        "layers.0",
        "torch.add",
        0,
        0,
        "forward",
        0,
        "0",
        "elementwise",
        1,
        "float32",
        (4,),
        mode,
        "forward",
        "ulp",
    )


def line_of(**figures):
    line = np.full(WIDTH, np.nan)
    zeros = ("nan_apart", "inf_apart", "nan_live", "different", "max_ulp", "input_sum")
    for name, value in {**dict.fromkeys(zeros, 0.0), "elements": 4.0, **figures}.items():
        line[PLACE[name]] = value
    return line


def test_the_condition_number_is_that_of_the_norms():
    line = line_of(diff_squares=9.0, live_squares=4.0, dx_squares=0.25, x_squares=16.0)
    assert judge(examined(), line).figures["kappa"] == pytest.approx((3 / 2) / (0.5 / 4))


def test_a_nudge_whose_square_is_hardly_a_number_still_has_a_size():
    line = line_of(diff_squares=1e-300, live_squares=1e280, dx_squares=1e-300, x_squares=1e280)
    found = judge(examined(), line)
    assert found.figures["kappa"] == pytest.approx(1.0)
    assert found.word == "ok"


@pytest.mark.parametrize("size", [math.inf, 0.0])
def test_inputs_without_a_size_are_no_fault(size):
    """A mask of -inf among the inputs, or nothing but zeros: no relative size of the nudge, so no condition number."""
    found = judge(examined(), line_of(diff_squares=9.0, live_squares=4.0, dx_squares=1.0, x_squares=size))
    assert "kappa" not in found.figures
    assert (found.word, found.severity) == ("ok", 0.0)


def test_results_without_a_size_are_no_fault():
    found = judge(examined(), line_of(diff_squares=math.inf, live_squares=math.inf, dx_squares=1.0, x_squares=4.0))
    assert "kappa" not in found.figures
    assert found.word == "ok"


def test_a_result_that_moves_far_more_than_its_inputs_is_fragile():
    line = line_of(diff_squares=1e8, live_squares=4.0, dx_squares=1e-8, x_squares=4.0)
    assert judge(examined(), line).word == "fragile"
