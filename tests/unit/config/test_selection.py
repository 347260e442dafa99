"""Selections against the plain set of numbers they stand for."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_megatron.config import ConfigError, RankSelection, parse_steps
from msprobe_megatron.config.document import Context, Node
from msprobe_megatron.config.selection import STEPS, parse_ranks, parse_selection

HORIZON = 120


def select(value):
    return parse_selection(Node(value, "steps", Context("probe.yaml")))


def node(value):
    return Node(value, "steps", Context("probe.yaml"))


def ranks(value):
    return parse_ranks(Node(value, "ranks", Context("probe.yaml")))


_items = st.one_of(
    st.integers(0, 50).map(lambda a: (a, {a})),
    st.integers(0, 50).map(lambda a: (str(a), {a})),
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(
        lambda t: (f"{t[0]}-{t[0] + t[1]}", set(range(t[0], t[0] + t[1] + 1)))
    ),
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60)).map(
        lambda t: (f"{t[0]}-{t[0] + t[1]}/{t[2]}", set(range(t[0], t[0] + t[1] + 1, t[2])))
    ),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(_items, min_size=1, max_size=8))
def test_selection_is_the_set_it_describes(items):
    chosen = select([text for text, _ in items])
    numbers = set().union(*(members for _, members in items))
    assert {n for n in range(-3, HORIZON) if n in chosen} == numbers
    for n in range(-3, HORIZON):
        assert chosen.next_from(n) == min((m for m in numbers if m >= n), default=None)
    assert chosen.last == max(numbers)
    assert chosen.is_finite
    # What it says about itself is in its own grammar and means the same.
    again = parse_steps(chosen.describe())
    assert {n for n in range(HORIZON) if n in again} == numbers


def test_all_steps():
    chosen = select("all")
    assert chosen.next_from(0) == 0
    assert chosen.next_from(10**15) == 10**15
    assert 7 in chosen
    assert -1 not in chosen
    assert not chosen.is_finite
    assert chosen.last is None
    assert chosen.describe() == "all"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        ("7", "7"),
        ("20-22", "20-22"),
        ([10, "20-22", "100-1000/100"], "10, 20-22, 100-1000/100"),
        ([3, 1, 2, 2], "1-3"),
        (["1-5", "4-9", 10], "1-10"),
        (["0-9", "2-3"], "0-9"),
        ("10-12/5", "10"),
        ("0-10/4", "0-8/4"),
        ("0, 5-7", "0, 5-7"),
        ((1, 3), "1, 3"),
    ],
)
def test_described(value, text):
    assert select(value).describe() == text


def test_a_huge_range_costs_nothing():
    chosen = select("0-999999999999999999/7")
    assert chosen.next_from(10**17) == 10**17 + (-(10**17)) % 7
    assert len(chosen.spans) == 1
    assert len(select(list(range(20_000))).spans) == 1


@pytest.mark.parametrize(
    ("value", "where", "problem"),
    [
        ("abc", "steps", "'abc' is not a number or a range"),
        (["abc"], "steps[0]", "'abc' is not"),
        ([1, True], "steps[1]", "true is not"),
        (True, "steps", "true is not"),
        (None, "steps", "null is not"),
        (1.0, "steps", "1.0 is not"),
        ({"a": 1}, "steps", "{'a': 1} is not"),
        ([[1]], "steps[0]", "[1] is not"),
        (-1, "steps", "-1 is out of range"),
        ("-1", "steps", "'-1' is not"),
        (10**18, "steps", "out of range"),
        ("9" * 30, "steps", "is not a number"),
        ("7-3", "steps", "ends before it begins"),
        ("1-5/0", "steps", "stride 0"),
        ("1-5/-1", "steps", "is not"),
        ("5-", "steps", "is not"),
        ("1-2-3", "steps", "is not"),
        ("١-٢", "steps", "is not"),
        (["all"], "steps[0]", "'all' is not"),
        ("1,", "steps", "'' is not"),
        ("", "steps", "'' is not"),
        ([], "steps", "[] selects nothing"),
    ],
)
def test_refused(value, where, problem):
    with pytest.raises(ConfigError) as caught:
        select(value)
    message = str(caught.value)
    assert message.startswith(f"probe.yaml: {where}: ")
    assert problem in message
    assert '; accepted: numbers from 0 up, ranges "a-b"' in message


def test_command_line_names_the_flag():
    assert parse_steps("0,5-7").describe() == "0, 5-7"
    with pytest.raises(ConfigError, match="^command line: --msprobe-steps: 'x' is not"):
        parse_steps("0,x")


WORLD = {"tp": 2, "pp": 2, "dp": 3, "cp": 1, "ep": 1, "etp": 2, "edp": 6}


def coordinates(rank):
    return {
        "tp": rank % 2,
        "pp": rank // 6,
        "dp": rank // 2 % 3,
        "cp": 0,
        "ep": 0,
        "etp": rank % 2,
        "edp": rank // 2,
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("all", set(range(12))),
        (3, {3}),
        ([0, "8-11"], {0, 8, 9, 10, 11}),
        ({"tp": 0}, {0, 2, 4, 6, 8, 10}),
        ({"tp": 1, "dp": 0}, {1, 7}),
        ({"dp": [0, 2], "pp": 1}, {6, 7, 10, 11}),
        ({"dp": ["0-1"], "tp": 0, "pp": 0}, {0, 2}),
    ],
)
def test_ranks(value, expected):
    chosen = ranks(value)
    chosen.check(12, WORLD)
    assert {rank for rank in range(12) if chosen.selects(rank, coordinates(rank))} == expected


def test_default_is_every_rank():
    chosen = RankSelection()
    chosen.check(1, {})
    assert chosen.selects(0, {})
    assert chosen.describe() == "all"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (8, "probe.yaml: ranks: 8 does not exist; accepted: 0..3 (world size 4)"),
        ([0, "2-9"], "probe.yaml: ranks: 9 does not exist; accepted: 0..3 (world size 4)"),
        ({"tp": 2}, "probe.yaml: ranks.tp: 2 does not exist; accepted: 0..1 (tp size 2)"),
        ({"tp": 0, "dp": [0, 5]}, "probe.yaml: ranks.dp: 5 does not exist; accepted: 0..1 (dp size 2)"),
        ({"etp": 0}, "probe.yaml: ranks.etp: this job has no such axis; accepted: tp, pp, dp"),
    ],
)
def test_what_the_world_does_not_have(value, message):
    with pytest.raises(ConfigError) as caught:
        ranks(value).check(4, {"tp": 2, "pp": 1, "dp": 2})
    assert str(caught.value) == message


def test_last_rank_of_a_strided_range_is_the_one_that_counts():
    ranks("0-4/3").check(4, {})
    with pytest.raises(ConfigError, match="4 does not exist"):
        ranks("0-4/4").check(4, {})


def test_unknown_coordinate_is_not_silently_false():
    with pytest.raises(ConfigError, match=r"ranks\.ep: this job has no such axis"):
        ranks({"ep": 0}).selects(0, {"tp": 0})


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([], ["ranks: [] selects nothing", "mapping over tp, pp"]),
        ({}, ["ranks: {} selects nothing", "mapping over tp, pp"]),
        ({"tp": []}, ["ranks.tp: [] selects nothing"]),
        ({"tpp": 0}, ["ranks.tpp: unknown key (did you mean tp?)", "tp, pp, dp, cp, ep, etp, edp"]),
        ({"vpp": 0}, ["ranks.vpp: unknown key"]),
        ({"tp": True}, ["ranks.tp: true is not"]),
        ({"tp": {"a": 1}}, ["ranks.tp: {'a': 1} is not"]),
        ({0: 1}, ["ranks: key 0 is not text"]),
        ("none", ["ranks: 'none' is not", "mapping over tp, pp"]),
        ([-1], ["ranks[0]: -1 is out of range"]),
    ],
)
def test_refused_ranks(value, parts):
    with pytest.raises(ConfigError) as caught:
        ranks(value)
    for part in parts:
        assert part in str(caught.value)


def test_ranks_described():
    assert ranks([0, "8-15"]).describe() == "0, 8-15"
    assert ranks({"dp": [0, 2], "tp": 0}).describe() == "{tp: 0, dp: [0, 2]}"


def test_order_of_writing_does_not_matter():
    items = [1, "5-20/5", 2, "30-40", 41, 3]
    expected = select(items)
    for seed in range(10):
        shuffled = random.Random(seed).sample(items, len(items))
        assert select(shuffled) == expected


def test_after_start_counts_from_the_first_step():
    steps = STEPS.read(node({"after_start": [0, "4-8/2"]}))
    assert steps.describe() == "{after_start: [0, 4-8/2]}"
    assert steps.next_from(0) == 0  # not begun: from 0
    steps.begin_at(4000)
    assert [n for n in range(3990, 4020) if n in steps] == [4000, 4004, 4006, 4008]
    assert (steps.next_from(0), steps.next_from(4001), steps.next_from(4009), steps.last) == (4000, 4004, None, 4008)
    steps.begin_at(4002)
    assert steps.next_from(0) == 4000  # only the first call counts
    assert (steps.count(4004, None), steps.count(0, 4005)) == (3, 2)
    again = steps.anew()
    again.begin_at(7)
    assert (again.next_from(0), again == steps, steps.next_from(0)) == (7, True, 4000)


def test_begin_at_leaves_other_selections_alone():
    steps = STEPS.read(node([0, 4]))
    steps.begin_at(3)
    assert steps.next_from(0) == 0


@pytest.mark.parametrize("value", [{}, {"after_begin": [0]}, {"after_start": []}, {"after_start": "none"}])
def test_after_start_refused(value):
    with pytest.raises(ConfigError, match="accepted"):
        STEPS.read(node(value))


@pytest.mark.parametrize(
    ("value", "first", "text"),
    [([0, 4], 0, "none"), ([0, 4], 1, "0"), (["0-100/10"], 35, "0-30/10"), ([0, 7], 9, "0, 7"), ("all", 2, "0-1")],
)
def test_before(value, first, text):
    assert STEPS.read(node(value)).before(first).describe() == text
