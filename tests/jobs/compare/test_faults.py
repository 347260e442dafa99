"""Seeded faults of distributed training: each is found, and the first divergence names where it is."""

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run

# fault -> (layout, golden, module to look at, name of the first tensor, kind, ranks, steps)
_FAULTS = {
    "no_reduction": (
        *("tp2", "single", "decoder.layers.2.mlp.linear_fc2", "decoder.layers.2.mlp.linear_fc2"),
        *("activation", [0, 1], 1),
    ),
    "norms_not_reduced": (
        *("tp2_sp", "single", "decoder.final_layernorm", "decoder.final_layernorm.weight"),
        *("grad_reduced", [0, 1], 1),
    ),
    "attention_scale": (
        *("tp2", "tp2", "decoder.layers.1.self_attention.core_attention"),
        *("decoder.layers.1.self_attention.core_attention.scale_mask_softmax", "activation", [1], 1),
    ),
    "rotary_without_offset": ("rope_cp2", "rope", "rotary_pos_emb", "rotary_pos_emb", "activation", [0, 1], 1),
    "loss_by_wrong_count": ("cp2", "single", "loss", "model", "gradient", [0, 1], 1),
    "gate_and_up": (
        *("tp2", "single", "decoder.layers.1.mlp", "decoder.layers.1.mlp.linear_fc2"),
        *("activation", [0, 1], 1),
    ),
    "dropped_microbatch": (
        *("dp2", "single", "decoder.layers.2.self_attention.linear_proj"),
        *("decoder.layers.2.self_attention.linear_proj.weight", "grad_reduced", [0, 1], 1),
    ),
    "stale_weight": (
        *("dp2_distopt", "single", "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc1.weight"),
        *("parameter", [1], 3),
    ),
    "expert_not_loaded": (
        *("ep2", "moe", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1"),
        *("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", "parameter", [1], 1),
    ),
    "layer_offset": (
        *("pp2_vpp2", "single", "decoder.layers.2.input_layernorm", "decoder.layers.2.input_layernorm.weight"),
        *("parameter", [0, 1], 1),
    ),
    "no_max_over_ranks": ("tp2", "single", "model", "model", "activation", [0, 1], 1),
    "flipped_bit": (
        *("tp2", "tp2", "decoder.layers.2.self_attention.linear_proj"),
        *("decoder.layers.2.self_attention.linear_proj.weight", "parameter", [1], 1),
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_fault_is_found_and_named(runs, fault):
    layout, golden, module, name, kind, ranks, steps = _FAULTS[fault]
    run = runs.faulty(layout, fault, steps=steps)
    result = compare(open_run(runs.clean(golden)), open_run(run))
    assert result.verdict == "diverged"
    first = result.first_divergence
    assert (first.module, first.name, first.kind, first.ranks) == (module, name, kind, ranks)
    assert first.step == (2 if steps == 3 else 0)
    assert first.microbatch in (0, None)
    assert first.error > first.tolerance
    assert first.state == "diverged"
    # After the only weight whose gradient lost a microbatch comes nothing in its step but the norm of all gradients.
    after = [suspect.name for suspect in result.suspects]
    assert after == ["grad_norm"] if fault == "dropped_microbatch" else len(after) == 10


def test_a_wrong_loss_scale_is_called_by_its_factor(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty("cp2", "loss_by_wrong_count")))
    assert any("0.5 times" in text for text in result.hints)


def test_a_wrong_layer_offset_is_called_by_its_layers(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty("pp2_vpp2", "layer_offset")))
    assert any("layer 0 is held by more than one stage" in text for text in result.hints)


def test_replicas_that_differ_are_listed_with_their_ranks(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty("dp2_distopt", "stale_weight", steps=3)))
    assert result.replicas[0]["name"] == "decoder.layers.1.mlp.linear_fc1.weight"
    assert result.replicas[0]["ranks"] == [1]


def test_what_follows_from_a_fault_is_inherited(runs):
    result = compare(open_run(runs.clean("single")), open_run(runs.faulty("tp2", "no_reduction")))
    assert result.counts["inherited"] > 10 * result.counts["diverged"]
    table = result.table.to_pylist()
    forward = [row for row in table if row["phase"] == "forward"]
    after = {row["state"] for row in forward if row["name"].startswith("decoder.layers.3")}
    before = {row["state"] for row in forward if row["name"].startswith("decoder.layers.1")}
    assert before == {"agree"}
    assert "inherited" in after
    assert "diverged" not in after
