"""Names and cuts of Megatron's weights, for those who have only their files.

A live model says of each weight how it is cut (`topology.parameters`); a checkpoint does not. The tables below hold the
layers of Megatron that are cut; a weight that is in none and differs between tensor-parallel ranks is not guessed at.
"""

from __future__ import annotations

import re

TIED = "embedding.word_embeddings.weight"
LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*)$")
EXPERT = re.compile(r"^(.*\.local_experts)\.(\d+)\.(.*)$")
_STACKED_LAYER = re.compile(r"^(.*\blayers)\.(?!\d)(.*)$")
_STACKED_EXPERT = re.compile(r"^(.*\.experts)\.experts\.(?!\d)(.*)$")

# Layers whose weight and bias are cut along their first dimension, and those whose weight is along its second.
_COLUMN = re.compile(
    r"(linear_qkv|linear_fc1|linear_q_up_proj|linear_kv_up_proj|linear_q_proj|query_key_value|query|key_value"
    r"|dense_h_to_4h|word_embeddings|output_layer|lm_head)\.(weight|bias)$"
)
_ROW = re.compile(r"(linear_proj|linear_fc2|self_attention\.dense|inter_attention\.dense|dense_4h_to_h)\.weight$")
_GATED = re.compile(r"(linear_fc1|dense_h_to_4h)\.(weight|bias)$")
# Norms that some layers keep inside the linear layer that follows.
_FUSED_NORMS = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
)
_WRAPPERS = re.compile(r"^(module\.)+")
# One state of the optimizer, under the names of several optimizers.
KINDS = {"param": "master", "fp32_param": "master", "fp32_from_fp16_params": "master"}


def canonical(name: str) -> str:
    """The name that the same weight has in every format.

    Example::

        >>> canonical("module.decoder.layers.3.self_attention.linear_qkv.layer_norm_weight")
        'decoder.layers.3.input_layernorm.weight'
    """
    name = _WRAPPERS.sub("", name)
    for pattern, plain in _FUSED_NORMS:
        name = pattern.sub(plain, name)
    return name


def cut_of(name: str, gated: bool) -> tuple[int, str] | None:
    """Dimension along which a weight is cut over tensor-parallel ranks, and in which order; None if it is whole.

    Example::

        >>> cut_of("decoder.layers.0.mlp.linear_fc1.weight", gated=True)
        (0, 'gated')
    """
    if _ROW.search(name):
        return (1, "contiguous")
    if _COLUMN.search(name) and "position_embeddings" not in name:
        return (0, "gated" if gated and _GATED.search(name) else "contiguous")
    return None


def stacked(name: str) -> tuple[str, int]:
    """A name with a place for each number that torch_dist keeps as a leading dimension, and how many those are.

    Example::

        >>> stacked("decoder.layers.mlp.experts.experts.linear_fc1.weight")
        ('decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc1.weight', 2)
    """
    found = 0
    for pattern, text in ((_STACKED_LAYER, r"\1.{}.\2"), (_STACKED_EXPERT, r"\1.local_experts.{}.\2")):
        name, hits = pattern.subn(text, name)
        found += hits
    return name, found
