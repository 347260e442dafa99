"""Faults that no law was written for: invented after the laws, to measure how many one run alone shows.

Each has its layout and precision. docs/laws.md has the figures of the first run, before a law was mended or added for
any of them, and what is found now.
"""

from __future__ import annotations

from tests.jobs.laws import unlisted_model as model
from tests.jobs.laws import unlisted_training as training
from tests.jobs.laws.planting import Fault

_OVERLAP = "--overlap-grad-reduce --ddp-bucket-size 3000"
_AUX = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1"
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# fault -> (layout, further flags, fault)
UNLISTED: dict[str, tuple[str, str, Fault]] = {
    "coupled_decay": ("single", "", Fault(ready=training.coupled_decay)),
    "step_stands_still": ("dp2", "--bf16", Fault(ready=training.step_stands_still)),
    "rate_of_a_stage": ("pp2", "--bf16", Fault(ready=training.rate_of_a_stage)),
    "weights_truncated": ("single", "--bf16", Fault(ready=training.truncated)),
    "clipped_by_its_own_norm": ("tp2", "", Fault(training.clipped_by_its_own_norm)),
    "norm_counts_replicas": ("tp2", "--bf16", Fault(training.norm_counts_replicas)),
    "shard_not_gathered": ("dp2_distopt", "--bf16", Fault(training.shard_not_gathered)),
    "last_bucket_local": ("dp2", f"--bf16 {_OVERLAP}", Fault(training.last_bucket_local)),
    "reduced_too_early": ("dp2", _OVERLAP, Fault(training.reduced_too_early)),
    "accumulated_in_bf16": ("single", "--bf16", Fault(ready=training.accumulated_in_bf16)),
    "overwritten_gradient": ("single", "--bf16", Fault(ready=training.overwritten)),
    "tied_twice": ("pp2", "", Fault(training.tied_twice)),
    "norms_averaged": ("tp2_sp", "--bf16", Fault(training.norms_averaged)),
    "not_over_context": ("cp2", "", Fault(training.not_over_context)),
    "experts_not_scaled": ("ep2", "", Fault(ready=training.experts_not_scaled)),
    "frozen_layer": ("single", "--bf16", Fault(ready=training.frozen_layer)),
    "stale_gradient": ("pp2", "--bf16", Fault(training.stale_gradient)),
    "loss_not_scaled": ("pp2", "--fp16 --loss-scale 1024", Fault(ready=training.loss_not_scaled)),
    "same_dropout_every_time": ("single", "dropout", Fault(ready=model.same_dropout_every_time)),
    "one_dropout_for_all_ranks": ("tp2", "dropout --bf16", Fault(model.one_dropout_for_all_ranks)),
    "dropout_not_scaled": ("single", "dropout", Fault(model.dropout_not_scaled)),
    "recomputed_from_other_input": ("tp2", f"--bf16 {_RECOMPUTE}", Fault(model.recomputed_from_other_input)),
    "every_step_the_same": ("dp2", "", Fault(model.every_step_the_same)),
    "contiguous_context": ("rope_cp2", "--bf16", Fault(model.contiguous_context)),
    "label_smoothing": ("tp2", "", Fault(model.smoothed)),
    "one_head_unmasked": ("tp2_sp", "--bf16", Fault(ready=model.one_head_unmasked)),
    "home_in_other_order": ("moe", "", Fault(model.home_in_other_order)),
    "weighed_twice": ("ep2", "--bf16", Fault(ready=model.weighed_twice)),
    "aux_loss_scale": (
        "moe",
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
        Fault(ready=model.aux_scale),
    ),
    "tokens_of_wrong_expert": ("moe", "--bf16", Fault(model.tokens_of_wrong_expert)),
    "other_groups": ("rope", "--num-query-groups 2", Fault(model.other_groups)),
    "last_norm_left_out": ("pp2_vpp2", "--bf16", Fault(ready=model.last_norm_left_out)),
    "relu_for_silu": ("single", "", Fault(ready=model.relu_for_silu)),
    "tied_weights_drift": ("pp2", "--bf16", Fault(ready=model.tied_weights_drift)),
    "queries_and_keys_exchanged": ("single", "--bf16", Fault(ready=model.queries_and_keys_exchanged)),
    "dropped_bias": ("tp2", "--bf16", Fault(ready=model.dropped_bias)),
}
