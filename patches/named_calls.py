"""Functions and methods of Megatron that are not torch API: at L1 they appear under their own names.

Every `autograd.Function` (tensor-parallel mappings, cross entropy, fused softmax, router gating) is observed where it
is applied. This file lists the rest: functions that bind `apply` to a name at import, that are compiled as a whole, or
that only combine other calls but deserve a name (rotary embedding, permutation, dispatch and combination of experts'
tokens). Functions that Megatron compares by identity (activations) are not patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_megatron.job.patching.patch_set import Patch, Wrap

_FUNCTIONS = {
    "megatron.core.fusions.fused_bias_gelu": ("bias_gelu_impl",),
    "megatron.core.fusions.fused_bias_swiglu": ("bias_swiglu_impl", "weighted_bias_swiglu_impl"),
    "megatron.core.fusions.fused_bias_geglu": ("bias_geglu_impl", "weighted_bias_quick_geglu_impl"),
    "megatron.core.fusions.fused_weighted_squared_relu": ("weighted_squared_relu_impl",),
    "megatron.core.fusions.fused_bias_dropout": ("bias_dropout_add_fused_train",),
    "megatron.core.models.common.embeddings.rope_utils": ("apply_rotary_pos_emb",),
    "megatron.core.transformer.moe.moe_utils": (
        "permute",
        "unpermute",
        "sort_chunks_by_idxs",
        "topk_routing_with_score_function",
        "topk_softmax_with_capacity",
    ),
}
_DISPATCH = "megatron.core.transformer.moe.token_dispatcher"
_DISPATCHERS = ("MoEAllGatherTokenDispatcher", "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher")
_STAGES = (
    # Older releases.
    "token_permutation",
    "token_unpermutation",
    # Newer ones.
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)


def _named(target: str) -> Wrap:
    name = target.replace(":", ".")

    def wrap(original: Callable[..., Any], site: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return site.called(name, original, args, kwargs)

        return call

    return wrap


_TARGETS = (
    *(f"{module}:{name}" for module, names in _FUNCTIONS.items() for name in names),
    *(f"{_DISPATCH}:{dispatcher}.{stage}" for dispatcher in _DISPATCHERS for stage in _STAGES),
)
PATCHES = [
    Patch(f"named_calls.{t}", (t,), _named(t), phase="calls", why="a named call at L1", sweep=True) for t in _TARGETS
]
