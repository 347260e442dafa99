"""The models that people train agree with their single run in every layout, and faults in their own parts are named.

Short here, all of it with ``-m slow``; docs/hosts/table.md has the figures.
"""

import pytest
import torch

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.run_directory.directory import read_events

_SUMMANDS = {
    "partial sums over tp; only their sum is the whole tensor",
    "partial sums over etp; only their sum is the whole tensor",
}
_ROUTED = "most of its tokens may be others: routed otherwise, within rounding of the edge"
_TURNED = "state of routers that sent tokens elsewhere, within rounding"
_DENSE = ("tp2", "tp2_sp", "tp4", "pp2", "pp2_vpp2", "cp2", "dp2_distopt", "recompute", "recompute_norms", "tp2_pp2")
_SPARSE = ("ep2", "tp2_ep2", "pp2", "pp2_vpp2", "dp2_distopt", "recompute", "recompute_norms", "tp2_pp2")
_ALL = [
    *(("qwen3", layout) for layout in (*_DENSE, "recompute_attention")),
    *(("qwen3_moe", layout) for layout in (*_SPARSE, "tp2_etp2", "cp2", "tp4_sp")),
    *(("deepseek", layout) for layout in (*_SPARSE, "tp2_etp2", "cp2", "recompute_latents")),
    *(("gpt_oss", layout) for layout in (*_SPARSE[:-1],)),
    *(("nemotron_h", layout) for layout in ("ep2", "tp2_ep2", "tp2_etp2", "pp2", "dp2_distopt")),
    *(("qwen3_next", layout) for layout in (*_SPARSE, "tp2_etp2")),
]
_SHORT = {
    *(("qwen3", layout) for layout in ("tp4", "recompute_norms")),
    *(("deepseek", layout) for layout in ("tp2_ep2", "pp2", "cp2")),
    *(("gpt_oss", "tp2_ep2"), ("nemotron_h", "tp2_ep2"), ("qwen3_next", "tp2_ep2")),
}
_SHORT_BF16 = {("deepseek", "ep2")}


def _cases():
    for bf16, short in ((False, _SHORT), (True, _SHORT_BF16)):
        for model, layout in _ALL:
            marks = [] if (model, layout) in short else [pytest.mark.slow]
            yield pytest.param(model, layout, bf16, marks=marks, id=f"{model}-{layout}-{'bf16' if bf16 else 'fp32'}")


@pytest.mark.parametrize(("model", "layout", "bf16"), list(_cases()))
def test_a_clean_layout_agrees_with_the_single_run(models, model, layout, bf16):
    golden, run = (models.recorded(model, one, bf16=bf16) for one in ("single", layout))
    result = compare(open_run(golden), open_run(run))
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    assert result.replicas == []
    # Nothing is left out without a reason that is true of the layout.
    assert {state for state, count in result.counts.items() if count} <= {"agree", "layout"}
    assert set(result.layout) <= (_SUMMANDS | {_ROUTED, _TURNED})
    assert result.counts["agree"] > 0.75 * result.table.num_rows
    assert result.counts["agree"] > 700
    assert [event for event in read_events(run) if event["event"] == "alert"] == []


@pytest.mark.parametrize("model", ["qwen3", "deepseek", "gpt_oss", "nemotron_h", "qwen3_next"])
def test_every_row_of_a_single_run_has_a_layout(models, model):
    rows = open_run(models.recorded(model, "single")).rows()
    assert rows.filter("shard like '?%' and kind <> 'loss'").project("name, io, path, shard").fetchall() == []


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("deepseek", "tp2_ep2"),
        *(pytest.param(model, "tp2_ep2", marks=pytest.mark.slow) for model in ("gpt_oss", "nemotron_h", "qwen3_next")),
        *(pytest.param("deepseek", one, marks=pytest.mark.slow) for one in ("pp2_vpp2", "recompute_norms")),
    ],
)
def test_the_kit_changes_no_bit(models, model, layout):
    _, with_kit = models.ranks(model, layout)
    _, without = models.ranks(model, layout, kit=False)
    for one, other in zip(with_kit, without, strict=True):
        assert one["losses"] == other["losses"]
        assert one["grad_norms"] == other["grad_norms"]
        assert all(torch.equal(a, b) for a, b in zip(one["gradients"], other["gradients"], strict=True))
        for name, value in one["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name


# model -> fault -> the module that is named
_FAULTS = {
    "qwen3": {
        "key_norm": "decoder.layers.1.self_attention.k_layernorm",
        "query_norm": "decoder.layers.2.self_attention.q_layernorm",
        "qkv_order": "decoder.layers.1.self_attention.linear_qkv",
    },
    "deepseek": {
        "latent": "decoder.layers.1.self_attention.linear_kv_down_proj",
        "shared_expert": "decoder.layers.2.mlp.shared_experts",
        "predictions": "output_layer",
        "expert_bias": "decoder.layers.2.mlp.router",
    },
    "gpt_oss": {
        "sink": "decoder.layers.1.self_attention.core_attention",
        "window": "decoder.layers.2.self_attention.core_attention.scale_mask_softmax",
        "bias_of_an_expert": "decoder.layers.1.mlp.experts.local_experts.1.linear_fc2",
    },
    "nemotron_h": {
        "mixer_order": "decoder.layers.2.mixer.in_proj",
        "decay": "decoder.layers.0.mixer",
        "mixer_norm": "decoder.layers.2.mixer.norm",
    },
    "qwen3_next": {
        "delta_order": "decoder.layers.1.self_attention.in_proj",
        "delta_conv": "decoder.layers.2.self_attention.conv1d",
        "delta_norm": "decoder.layers.0.self_attention.out_norm",
    },
}
_SHORT_FAULTS = {"latent", "sink", "mixer_order", "delta_conv", "expert_bias"}


@pytest.mark.parametrize(
    ("model", "fault", "place"),
    [
        pytest.param(model, fault, place, marks=[] if fault in _SHORT_FAULTS else [pytest.mark.slow])
        for model, faults in _FAULTS.items()
        for fault, place in faults.items()
    ],
)
def test_a_fault_in_a_special_part_is_named(models, model, fault, place):
    layout = "tp4" if model == "qwen3" else "tp2_ep2"
    result = compare(open_run(models.recorded(model, "single")), open_run(models.recorded(model, layout, fault=fault)))
    assert result.verdict == "diverged"
    assert result.first_divergence.step == 0
    assert place in (result.first_divergence.module, result.first_divergence.name), result.first_divergence


def test_biases_of_routers_are_rows_and_a_wrong_update_is_named(models):
    """Megatron moves each expert's bias by the configured 0.01 against its load, after the gradients are reduced."""
    golden = open_run(models.recorded("deepseek", "single"))
    for step in (0, 1):
        rows = golden.rows(step=step).filter("kind = 'buffer'").project("name, max, absmax").fetchall()
        assert len(rows) == 4
        assert all(name.endswith("mlp.router.expert_bias") for name, _, _ in rows)
        assert max(largest for _, _, largest in rows) == pytest.approx(0.01 * (step + 1))
    wrong = compare(golden, open_run(models.recorded("deepseek", "ep2", fault="expert_bias_update")))
    first = wrong.first_divergence
    assert (wrong.verdict, first.kind, first.step) == ("diverged", "buffer", 0)
    assert first.name.endswith("mlp.router.expert_bias")


@pytest.mark.parametrize(
    ("model", "layout", "name", "kind"),
    [
        ("deepseek", "tp2_ep2", "mtp.layers.0.transformer_layer.self_attention.linear_kv_down_proj", "gradient"),
        pytest.param("deepseek", "cp2", "output_layer", "gradient", marks=pytest.mark.slow),
        ("gpt_oss", "tp2_ep2", "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.bias", "grad_reduced"),
    ],
)
def test_megatrons_own_faults(models, model, layout, name, kind):
    """Gradients of k_pos_emb are not summed, losses divided by a rank's own count, biases of other experts added."""
    golden = open_run(models.recorded(model, "single"))
    result = compare(golden, open_run(models.recorded(model, layout, repaired=False)))
    assert result.verdict == "diverged"
    assert (result.first_divergence.name, result.first_divergence.kind) == (name, kind)
