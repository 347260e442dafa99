"""The verdict from figures alone: what has no size says nothing, whatever the figures beside it."""

import math

import numpy as np
import pytest

from msprobe_megatron.job.features.perturb.judge.verdict import COLUMN, WIDTH, Examined, judge


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
        line[COLUMN[name]] = value
    return line


def test_the_condition_number_is_that_of_the_norms():
    line = line_of(diff_squares=9.0, live_squares=4.0, dx_squares=0.25, x_squares=16.0)
    assert judge(examined(), line).details["kappa"] == pytest.approx((3 / 2) / (0.5 / 4))


def test_a_nudge_whose_square_is_hardly_a_number_still_has_a_size():
    line = line_of(diff_squares=1e-300, live_squares=1e280, dx_squares=1e-300, x_squares=1e280)
    found = judge(examined(), line)
    assert found.details["kappa"] == pytest.approx(1.0)
    assert found.word == "ok"


@pytest.mark.parametrize("size", [math.inf, 0.0])
def test_inputs_without_a_size_are_no_fault(size):
    """A mask of -inf among the inputs, or nothing but zeros: no relative size of the nudge, so no condition number."""
    found = judge(examined(), line_of(diff_squares=9.0, live_squares=4.0, dx_squares=1.0, x_squares=size))
    assert "kappa" not in found.details
    assert (found.word, found.severity) == ("ok", 0.0)


def test_results_without_a_size_are_no_fault():
    found = judge(examined(), line_of(diff_squares=math.inf, live_squares=math.inf, dx_squares=1.0, x_squares=4.0))
    assert "kappa" not in found.details
    assert found.word == "ok"


def test_a_result_that_moves_far_more_than_its_inputs_is_fragile():
    line = line_of(diff_squares=1e8, live_squares=4.0, dx_squares=1e-8, x_squares=4.0)
    assert judge(examined(), line).word == "fragile"


def word(line, mode="improve_precision", threshold=None, **changes):
    found = judge(examined(mode)._replace(**changes), line, threshold)
    return found.word, found.severity


def test_further_from_the_exact_result_than_allowed_is_wrong_and_says_where():
    found = judge(examined("improve_precision"), line_of(ref_over=1.5, ref_where=3.0, where=1.0))
    assert (found.word, found.severity, found.details["where"]) == ("wrong", 1.5, 3.0)
    found = judge(examined("improve_precision"), line_of(ref_over=1.0, ref_where=3.0, where=1.0))
    assert (found.word, found.severity, found.details["where"]) == ("ok", 1.0, 1.0)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"nan_live": 2.0}, "nan"),
        ({"nan_live": 2.0, "input_sum": math.nan}, "ok"),
        ({"nan_live": 2.0, "input_sum": math.inf}, "ok"),
        ({"nan_live": 2.0, "input_sum": math.nan, "nan_apart": 1.0}, "nan"),
        ({"ref_nan_apart": 1.0}, "nan"),
        ({"inf_apart": 1.0}, "inf"),
        ({"ref_inf_apart": 1.0}, "inf"),
        ({"different": 3.0, "max_ulp": 2.0}, "nondeterministic"),
        ({"ref_over": 2.0, "different": 3.0}, "wrong"),
        ({"ref_over": 2.0, "ref_inf_apart": 3.0}, "inf"),
    ],
)
def test_the_worst_word_comes_first(figures, expected):
    assert word(line_of(**figures), "no_change")[0] == expected


def test_rows_in_another_order_may_be_some_units_apart():
    unit = 2.0**-23  # of numbers whose root mean square is 1
    for apart, expected in ((15.9, "ok"), (16.1, "changed")):
        line = line_of(live_squares=4.0, max_abs=apart * unit, different=1.0)
        found = word(line, "change_value", terms=16)
        assert found == (expected, pytest.approx(apart / 16))
    assert word(line_of(live_squares=0.0, max_abs=1e-30), "change_value")[0] == "ok", "nothing has no size"


@pytest.mark.parametrize(
    ("mode", "dtype", "figures", "expected"),
    [
        ("no_change", "float32", {"ratio": 1.0001}, "changed"),
        ("no_change", "float32", {"ratio": 1.0}, "ok"),
        ("add_noise", "float32", {"ratio": 1.0001}, "ok"),
        ("add_noise", "float32", {"ratio": 1.0003}, "changed"),
        ("add_noise", "float16", {"ratio": 1.0019}, "ok"),
        ("add_noise", "float16", {"ratio": 1.0021}, "changed"),
        ("add_noise", "bfloat16", {"ratio": 1.0039}, "ok"),
        ("add_noise", "bfloat16", {"ratio": 1.0041}, "changed"),
        ("add_noise", "float32", {"ratio": 1.0, "flipped": 1.0}, "sign"),
        ("add_noise", "float32", {"ratio": 1.0, "flipped": 1.0, "nan_apart": 1.0}, "nan"),
        ("add_noise", "float32", {"ratio": 1.0, "inf_apart": 1.0}, "inf"),
        ("to_cpu", "float32", {"cpu_abs": 0.0, "cpu_rel": 0.0, "cpu_balance": -1.1e-4}, "changed"),
        ("to_cpu", "float32", {"cpu_abs": 0.0, "cpu_rel": 0.0, "cpu_balance": 0.9e-4}, "ok"),
        ("to_cpu", "float32", {"cpu_abs": 2.0**-13, "cpu_rel": 0.0, "cpu_balance": 0.0}, "changed"),
        ("to_cpu", "bfloat16", {"cpu_abs": 2.0**-9, "cpu_rel": math.nan, "cpu_balance": 0.0}, "ok"),
    ],
)
def test_the_thresholds_of_msprobe(mode, dtype, figures, expected):
    line = line_of(**{"flipped": 0.0, **figures})
    assert word(line, mode, profile="msprobe", dtype=dtype)[0] == expected


def test_a_limit_that_was_learned_comes_before_the_others():
    assert word(line_of(ratio=1.5, ref_over=9.0), threshold=1.2) == ("changed", pytest.approx(2.5))
    assert word(line_of(ratio=1.1, ref_over=9.0), threshold=1.2)[0] == "wrong"
    assert word(line_of(ratio=1.1, flipped=0.0), "add_noise", 1.2, profile="msprobe")[0] == "ok"
