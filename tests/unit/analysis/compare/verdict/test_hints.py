"""Hints: what a user is told to think of first, and only where it applies."""

from pathlib import Path

from msprobe_megatron.analysis.compare.verdict.causes import hints
from msprobe_megatron.analysis.load.run import Run
from tests.unit.analysis.compare.pairs_of_rows import pair, pairs_of


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


def test_tokens_that_layouts_drop_differently():
    def given(factor, other_size, micro=2):
        runs = [
            Run(
                Path(name), {"arguments": {"moe_expert_capacity_factor": factor, "micro_batch_size": size}, "sizes": at}
            )
            for name, at, size in (("a", {"tp": 1}, 2), ("b", {"tp": other_size}, micro))
        ]
        found = hints(runs[0], runs[1], pairs_of(pair()), ["diverged"], [0])
        return [hint for hint in found if "drop different tokens" in hint]

    assert given(1.25, 2) and given(1.25, 1, micro=4)
    assert not given(1.25, 1)
    assert not given(None, 2)
