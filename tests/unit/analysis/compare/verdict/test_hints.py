"""Hints: what a user is told to think of first, and only where it applies."""

from pathlib import Path

from msprobe_megatron.analyse.hints import hints
from msprobe_megatron.analyse.load import Run
from tests.analyse.pairs import pair, pairs_of


def told(left, right, **content):
    runs = [
        Run(Path(name), {"arguments": facts, "probe": {"content": content}})
        for name, facts in (("a", left), ("b", right))
    ]
    return hints(runs[0], runs[1], pairs_of(pair()), ["diverged"], [0])


def test_vocabularies_of_another_padding():
    (text,) = [hint for hint in told({"padded_vocab_size": 4408}, {"padded_vocab_size": 4416}) if "padded" in hint]
    assert "4408 and to 4416" in text
    assert "--make-vocab-size-divisible-by" in text
    assert not [hint for hint in told({"padded_vocab_size": 64}, {"padded_vocab_size": 64}) if "padded" in hint]
    assert not [hint for hint in told({}, {"padded_vocab_size": 64}) if "padded" in hint]


def test_dropout_that_the_kit_has_switched_off_is_no_hint():
    on = {"attention_dropout": 0.1}
    assert [hint for hint in told(on, on) if "dropout" in hint]
    assert not [hint for hint in told(on, on, reproduce={"seed": 1}) if "dropout" in hint]
    assert [hint for hint in told(on, on, reproduce={"dropout": True}) if "dropout" in hint]
