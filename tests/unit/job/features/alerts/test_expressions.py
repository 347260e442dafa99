"""The language of custom rules: what it reads, what it refuses, and that it computes what NumPy computes."""

import numpy as np
import pytest

from msprobe_megatron.config.expressions import NUMBERS, TEXTS, ExpressionError, parse_expression

COLUMNS = {
    "norm": np.array([1.0, 20.0, np.nan]),
    "zeros": np.array([0.0, 0.75, 0.5]),
    "absmax": np.array([1.0, -2.0, 3.0]),
    "n_nan": np.array([0.0, 0.0, 3.0]),
    "kind": np.array(["loss", "gradient", "loss"], object),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("norm > 10", [False, True, False]),
        ("norm > 10 or n_nan > 0", [False, True, True]),
        ("not norm > 10 and zeros == 0", [True, False, False]),
        ("not (norm > 10 and zeros > 0.5)", [True, False, True]),
        ("norm - 2 * zeros >= 18.5", [False, True, False]),
        ("norm / absmax < -5", [False, True, False]),
        ("abs(absmax) == 2", [False, True, False]),
        ("-absmax > 1.5e0", [False, True, False]),
        ('kind == "loss" and n_nan != 0', [False, False, True]),
        ("kind != 'loss'", [False, True, False]),
        ("norm > 0.5 and norm < 2 or zeros > .7", [True, True, False]),
        ("1 - 1 - 1 < 0 and zeros < 1", [True, True, True]),
    ],
)
def test_value(text, expected):
    expression = parse_expression(text)
    assert np.asarray(expression.holds(COLUMNS)).tolist() == expected
    assert set(expression.columns) <= {*NUMBERS, *TEXTS}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the end is no column"),
        ("norm", "is a number and not a condition"),
        ("norm >", "the end is no column"),
        ("norm > 1 2", "cannot go on at '2'"),
        ("size > 1", "'size' is no column; accepted: norm"),
        ("__import__('os') > 1", "'__import__' is no column"),
        ("norm.real > 1", "cannot read '.real > 1'"),
        ("norm > 1; zeros > 1", "cannot read '; zeros > 1'"),
        ("(norm > 1", "not closed"),
        ("norm > 'a'", "> between texts"),
        ("norm == 'a'", "== of a number; accepted: a text"),
        ("(norm > 1) + 1 > 0", "+ of a truth"),
        ("not norm", "not of a number"),
        ("norm > 1 > 0", "cannot go on at '>'"),
        ("(" * 100 + "norm > 1" + ")" * 100, "nested too deeply"),
        ("norm > 1 or " * 200 + "norm > 1", "characters"),
        ("[norm]", "cannot read"),
    ],
)
def test_refused(text, said):
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text)
    assert said in str(caught.value)


def test_kinds_are_those_of_rows():
    from msprobe_megatron.config.sections.alerts import KINDS
    from msprobe_megatron.run_directory import schema

    assert KINDS == schema.KINDS


def test_columns_are_those_that_rows_give():
    from msprobe_megatron.job.features.alerts.series import Columns
    from tests.unit.job.features.alerts.steps import row, step

    assert {*NUMBERS, *TEXTS} == set(Columns(step(0, (row(), [1.0]))))
