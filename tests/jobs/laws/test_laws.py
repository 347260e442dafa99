"""Every law: silent on clean runs of many layouts, and broken by the fault that it is for, with its place."""

import json
from collections import Counter

import pytest

from msprobe_megatron.analysis.diagnose.diagnose import diagnose
from msprobe_megatron.analysis.laws.registry import LAWS, examine
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.cli import main
from tests.jobs.laws.faults import FAULTS
from tests.jobs.laws.runs import CLEAN, SWEEP

NAMES = {law.name for law in LAWS}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_run_breaks_no_law(law_runs, name):
    result = diagnose(open_run(law_runs.clean(name)))
    assert result.findings == []
    states = Counter(state.partition(":")[0] for state in result.laws.values())
    assert set(result.laws) == NAMES
    assert states["broken"] == 0
    assert states["holds"] >= (10 if CLEAN[name][2] == "monitor" else 20)


def test_every_law_is_checked_on_some_clean_run(law_runs):
    held = {law for name in CLEAN for law in examine(open_run(law_runs.clean(name))).held}
    assert held == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEP)
def test_no_law_is_broken_in_the_sweep(law_runs, name):
    assert diagnose(open_run(law_runs.clean(name))).findings == []


_L2 = "decoder.layers.2"
_L0 = "decoder.layers.0.self_attention.core_attention"
_ATTENTION = "decoder.layers.1.self_attention.core_attention"
# fault -> (law, layout, further flags, the name that is told; None where the law names none)
BROKEN = {
    "same_samples": ("distinct-samples", "dp2", "", "model"),
    "repeated_microbatch": ("distinct-samples", "single", "", "model"),
    "unshifted_labels": ("labels", "single", "", "model"),
    "positions_without_offset": ("positions", "cp2", "", "embedding"),
    "mask_off_by_one": (
        *("no-future-token", "single", ""),
        "decoder.layers.0.self_attention.core_attention.scale_mask_softmax",
    ),
    "layer_without_mask": (
        *("no-future-token", "single", ""),
        f"{_L2}.self_attention.core_attention.scale_mask_softmax",
    ),
    "probabilities_scaled": ("attention-sums-to-one", "single", "", f"{_ATTENTION}.scale_mask_softmax"),
    "softmax_scale_everywhere": (
        *("constants", "single", ""),
        "decoder.layers.*.self_attention.core_attention.softmax_scale",
    ),
    "softmax_scale_of_a_rank": ("constants", "tp2", "", f"{_ATTENTION}.softmax_scale"),
    "scores_out_of_bounds": ("attention-bound", "single", "", f"{_ATTENTION}.scale_mask_softmax"),
    "norm_epsilon": ("constants", "single", "", "decoder.layers.1.pre_mlp_layernorm.eps"),
    "norm_left_out": ("norm-size", "single", "", "decoder.layers.1.pre_mlp_layernorm"),
    "half_residual": ("residual-sum", "single", "", "decoder.layers.1"),
    "attention_scaled_between": ("residual-sum", "single", "", "decoder.layers.1.pre_mlp_layernorm"),
    "embedding_scaled_between": ("wiring", "single", "", "decoder"),
    "queries_scaled": ("rotation-keeps-norms", "rope", "", "decoder.layers.1.self_attention.linear_qkv"),
    "attention_doubled": ("attention-averages", "single", "", _ATTENTION),
    "vocabulary_not_masked": ("embedding", "tp2", "", "embedding.word_embeddings"),
    "dropout_rate": (
        *("dropout-rate", "single", "dropout"),
        "decoder.layers.0.self_attention.core_attention.attention_dropout",
    ),
    "layer_in_half_precision": ("dtypes", "single", "", f"{_L2}.self_attention.core_attention"),
    "rng_not_restored": (
        *("recompute", "recompute", "dropout"),
        "decoder.layers.3.self_attention.core_attention.attention_dropout",
    ),
    "stale_receive": ("handed-on", "pp2", "", _L2),
    "rotary_base": ("rotary-table", "rope", "", "rotary_pos_emb"),
    "rotary_without_offset": ("rotary-table", "rope_cp2", "", "rotary_pos_emb"),
    "router_not_normalised": ("routing", "moe", "", "decoder.layers.1.mlp.router"),
    "one_expert_less": ("routing", "moe", "", "decoder.layers.1.mlp.router"),
    "token_lost": ("tokens-arrive", "ep2", "", "decoder.layers.1.mlp.experts"),
    "negative_loss": ("loss-not-negative", "single", "", "model"),
    "mask_ignored": ("loss-mask", "single", "", "model"),
    "loss_by_twice_the_tokens": ("loss-scale", "single", "", "model"),
    "loss_by_microbatches_again": ("loss-scale", "single", "", "model"),
    "loss_by_context_ranks": ("loss-scale", "cp2", "", "model"),
    "reported_half": ("loss-reported", "single", "", "model"),
    "label_forgotten": ("logits-gradient", "tp2", "", "output_layer"),
    "label_counts_less": ("label-gradient", "tp2", "", "output_layer"),
    "bucket_reduced_twice": ("gradient-accumulation", "dp2", "", "embedding.word_embeddings.weight"),
    "sum_not_mean": ("gradient-accumulation", "dp2", "", "embedding.word_embeddings.weight"),
    "without_last_microbatch": ("gradient-accumulation", "dp2", "", "embedding.word_embeddings.weight"),
    "gradients_kept": ("gradient-accumulation", "single", "", "embedding.word_embeddings.weight"),
    "one_rank_louder": ("gradient-accumulation", "dp2", "", "embedding.word_embeddings.weight"),
    "weight_cut_off": ("every-weight-learns", "single", "", "decoder.layers.1.mlp.linear_fc1.weight"),
    "mlp_skipped": ("every-weight-learns", "single", "", f"{_L2}.mlp.linear_fc1.weight"),
    "norm_counted_twice": ("gradient-norm", "single", "", "grad_norm"),
    "one_gradient_not_clipped": ("clip-factor", "single", "", "embedding.word_embeddings.weight"),
    "not_unscaled": ("clip-factor", "single", "--fp16 --loss-scale 1024", None),
    "other_clip_limit": ("clip-factor", "single", "", None),
    "no_bias_correction": ("update-formula", "single", "", "embedding.word_embeddings.weight"),
    "other_betas": ("sampled-moments", "single", "", "embedding.word_embeddings.weight"),
    "other_epsilon": ("optimizer-constants", "single", "", "embedding.word_embeddings.weight"),
    "decay_left_out": ("optimizer-constants", "single", "", "embedding.word_embeddings.weight"),
    "rate_of_one_weight": ("optimizer-constants", "single", "", "decoder.layers.0.mlp.linear_fc2.weight"),
    "weight_in_no_group": ("every-weight-updated", "single", "", "decoder.layers.0.self_attention.linear_qkv.weight"),
    "shard_not_updated": ("update-formula", "dp2_distopt", "", None),
    "stepped_twice": ("counted-steps", "single", "", "embedding.word_embeddings.weight"),
    "stale_master": ("rounded-master", "single", "--bf16", "embedding.word_embeddings.weight"),
    "weights_not_written_back": ("rounded-master", "single", "--bf16", "embedding.word_embeddings.weight"),
    "corrupted_weight": ("replicas", "dp2", "", "decoder.layers.2.mlp.linear_fc1.weight"),
    "one_rank_rounds_otherwise": ("replicated-activations", "tp2", "", "decoder.layers.1.pre_mlp_layernorm"),
    "same_seed": ("distinct-weights", "tp2", "", "embedding.word_embeddings.weight"),
    "same_dropout_every_time": ("dropout-masks", "single", "dropout", "embedding.embedding_dropout"),
    "one_dropout_for_all_ranks": ("dropout-masks", "tp2", "dropout --bf16", f"{_L0}.attention_dropout"),
    "relu_for_silu": ("constants", "single", "", f"{_L2}.mlp.activation_func"),
    "weights_truncated": ("rounded-master", "single", "--bf16", None),
    "overwritten_gradient": ("gradient-accumulation", "single", "--bf16", "decoder.layers.1.mlp.linear_fc2.bias"),
    "norms_averaged": ("weight-gradients", "tp2_sp", "--bf16", "decoder.layers.0.input_layernorm.weight"),
    "experts_not_scaled": (
        *("weight-gradients", "ep2", ""),
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
    ),
    "dropped_microbatch": ("weight-gradients", "single", "", "decoder.layers.2.self_attention.linear_proj.weight"),
    "home_in_other_order": ("tokens-come-home", "moe", "", "decoder.layers.0.mlp"),
    "copied_layer": ("distinct-weights", "single", "", f"{_L2}.self_attention.linear_qkv.weight"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_breaks_its_law(law_runs, fault):
    law, layout, flags, name = BROKEN[fault]
    result = diagnose(open_run(law_runs.faulty(fault, layout, flags)))
    found = {finding.where["law"]: finding for finding in result.findings if finding.what == "law"}
    assert law in found, result.findings
    assert result.laws[law] == "broken"
    where = found[law].where
    assert name is None or where["name"] == name
    assert found[law].text.startswith(f"{law}: ")
    assert found[law].next


def test_samples_of_an_earlier_step_are_a_note(law_runs):
    """A data iterator that never moves on looks like a job that trains on one batch on purpose: said, no finding."""
    result = diagnose(open_run(law_runs.faulty("every_step_the_same", "dp2", "")))
    assert [note.where["law"] for note in result.notes] == ["distinct-samples"]
    assert "reads samples of step" in result.notes[0].text
    assert result.laws["distinct-samples"] == "holds"
    assert not [found for found in result.findings if found.where.get("law") == "distinct-samples"]


@pytest.mark.parametrize(
    ("fault", "layout"), [("no_reduction", "tp2"), ("norms_not_reduced", "tp2_sp"), ("embedding_not_reduced", "pp2")]
)
def test_replicas_that_part_are_told_once(law_runs, fault, layout):
    result = diagnose(open_run(law_runs.faulty(fault, layout)))
    assert result.laws["replicas"] == "broken"
    told = [f for f in result.findings if f.what == "replicas" or f.where.get("law", "").startswith("replica")]
    assert [finding.what for finding in told] == ["replicas"]


# Laws that only the monitor's rows decide: fault -> (law, layout, name)
WATCHED = {
    "bucket_reduced_twice": ("gradient-reduction", "dp2", "decoder.final_layernorm.weight"),
    "one_gradient_not_clipped": ("clipping", "single", "embedding.word_embeddings.weight"),
    "other_betas": ("moments", "single", None),
    "no_bias_correction": ("weights-move", "single", "embedding.word_embeddings.weight"),
}


@pytest.mark.parametrize("fault", WATCHED)
def test_a_fault_breaks_its_law_in_the_monitor(law_runs, fault):
    law, layout, name = WATCHED[fault]
    found = {law.name: breach for law, breach in examine(open_run(law_runs.faulty(fault, layout, probe="full"))).broken}
    assert law in found
    assert name is None or found[law].where["name"] == name


def test_messages_that_change_on_their_way_break_the_law_of_communication(law_runs):
    run = open_run(law_runs.faulty("changed_on_the_way", "pp2", probe="mix"))
    found = {law.name: breach for law, breach in examine(run).broken}
    assert found["communication"].where["ranks"] == [0, 1]
    assert "rank 1 received norm" in found["communication"].text
    assert "handed-on" in found


def test_every_law_has_a_fault_that_breaks_it():
    broken = {law for law, *_ in BROKEN.values()} | {law for law, *_ in WATCHED.values()} | {"communication"}
    assert broken == NAMES
    assert set(BROKEN) <= set(FAULTS)


def test_the_command_says_which_laws_are_broken_and_which_were_not_checked(law_runs, capsys):
    path = str(law_runs.faulty("half_residual", "single"))
    assert main(["diagnose", path]) == 1
    text = capsys.readouterr().out
    assert "! residual-sum: decoder.layers.1: " in text
    assert "not checked: " in text
    assert main(["diagnose", path, "--json"]) == 1
    laws = json.loads(capsys.readouterr().out)["laws"]
    assert laws["residual-sum"] == "broken"
    assert laws["recompute"].startswith("not checked: needs a job that recomputes")
    assert main(["diagnose", str(law_runs.clean("single"))]) == 0
    assert "laws hold; not checked: " in capsys.readouterr().out


def test_the_page_shows_the_law_that_is_broken(law_runs, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["report", str(law_runs.faulty("half_residual", "single")), "--out", str(page)]) == 1
    assert "Law broken: residual-sum in decoder.layers.1" in page.read_text(encoding="utf-8")
    assert main(["report", str(law_runs.clean("single")), "--out", str(page)]) == 0
    assert "Law broken" not in page.read_text(encoding="utf-8")
