"""Two runs of one layout, bit by bit: a cast that stays within rounding is named, and chance is not."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.compare.silent_casts import CASTS

# fault -> (layout, module to look at, kind of the first tensor, phase, ranks)
_PLACES = {
    "softmax_in_bf16": (
        *("bf16_tp2", "decoder.layers.1.self_attention.core_attention.scale_mask_softmax"),
        *("activation", "forward", [0, 1]),
    ),
    "norm_in_bf16": ("bf16_pp2", "decoder.layers.2.pre_mlp_layernorm", "activation", "forward", [1]),
    "cross_entropy_in_bf16": ("bf16_tp2", "model", "activation", "forward", [0, 1]),
    "accumulation_in_bf16": ("bf16_pp2", "decoder.layers.1.mlp.linear_fc2", "grad_reduced", "optimizer", [0]),
}


@pytest.mark.parametrize("fault", CASTS)
def test_a_cast_within_rounding_is_named_at_its_place(runs, fault):
    layout, module, kind, phase, ranks = _PLACES[fault]
    golden, repeated = open_run(runs.faulty(layout, "none")), open_run(runs.faulty(layout, "again"))
    cast = open_run(runs.faulty(layout, fault))
    alone = compare(golden, cast)
    assert alone.verdict == "agree"
    assert alone.bits["differ"] > 0
    assert any(text.startswith(f"bits differ, within rounding, from {module}") for text in alone.hints)
    result = compare(golden, cast, noise=repeated)
    assert result.verdict == "diverged"
    first = result.first_divergence
    assert (first.module, first.kind, first.phase, first.step, first.ranks) == (module, kind, phase, 0, ranks)
    assert first.error <= first.tolerance
    assert first.what.startswith("differs in bits, within rounding")
    assert result.counts["diverged"] == 1
    assert not any("bits differ" in text for text in result.hints)
    states = {row["state"] for row in result.table.to_pylist() if row["bits"] == "differ"}
    assert states == {"agree", "diverged"} if result.bits["differ"] > 1 else {"diverged"}


@pytest.mark.parametrize("layout", ["bf16_tp2", "bf16_pp2"])
def test_a_repetition_is_equal_in_all_bits(runs, layout):
    golden, repeated = open_run(runs.faulty(layout, "none")), open_run(runs.faulty(layout, "again"))
    result = compare(golden, repeated)
    assert (result.verdict, result.bits["differ"], result.hints) == ("agree", 0, [])
    assert result.bits["equal"] > 0.99 * result.counts["agree"]


def test_a_repetition_that_differs_before_it_decides_nothing(runs):
    """The forward of the repetition is not that of the golden run, so the gradients of any run may differ."""
    golden, cast, unlike = (
        open_run(runs.faulty("bf16_pp2", fault)) for fault in ("none", "accumulation_in_bf16", "norm_in_bf16")
    )
    result = compare(golden, cast, noise=unlike)
    assert (result.verdict, result.first_divergence) == ("agree", None)
    assert any("the computation is not deterministic" in text for text in result.hints)
    # Gradients that differ leave the forward decided.
    result = compare(golden, unlike, noise=cast)
    assert result.verdict == "diverged"
    assert result.first_divergence.module == "decoder.layers.2.pre_mlp_layernorm"


def test_the_golden_run_is_no_repetition_of_itself(runs):
    golden, cast = (open_run(runs.faulty("bf16_pp2", fault)) for fault in ("none", "norm_in_bf16"))
    result = compare(golden, cast, noise=golden)
    assert result.verdict == "agree"
    assert any("--noise is GOLDEN itself" in text for text in result.hints)
    refused = compare(golden, cast, noise=cast)
    assert refused.verdict == "incomparable"
    assert "is the run that is compared" in refused.reason


def test_other_settings_explain_other_bits(runs):
    golden, cast, repeated = (open_run(runs.faulty("bf16_pp2", fault)) for fault in ("none", "norm_in_bf16", "again"))
    cast.facts["versions"] = {**cast.facts["versions"], "torch": "2.14.0"}
    result = compare(golden, cast, noise=repeated)
    assert result.verdict == "agree"
    assert any("settings that change rounding differ: torch" in text for text in result.hints)


def test_a_fault_beyond_rounding_is_named_as_before(runs):
    """Bits part where the divergence is: one finding, no hint beside it."""
    golden, repeated = (open_run(runs.faulty("bf16_tp2", fault)) for fault in ("none", "again"))
    result = compare(golden, open_run(runs.faulty("bf16_tp2", "attention_scale")), noise=repeated)
    assert result.first_divergence.error > result.first_divergence.tolerance
    assert result.first_divergence.module == "decoder.layers.1.self_attention.core_attention"
    assert not any("bits differ" in text for text in result.hints)
