"""Layouts of Megatron's legacy model (`megatron.legacy`, until 0.17), which ModelLink's recipes use.

The same dimensions as megatron-core's modules, under other names; the shorthand is explained there.
"""

from __future__ import annotations

_HIDDEN = "S b h"
_MASK = "1 1 s k"
_IDS = "b s"
_HEADS = "s b n/tp d"
_LAYER = {"hidden_states": _HIDDEN, "attention_mask": _MASK, "rotary_pos_emb": "s 1 1 d"}
_SAME = {"input": _HIDDEN, "output": _HIDDEN}

# ModelLink's and MindSpeed's take and give the sequence first, Megatron's own the batch.
_FLASH = {
    "input": {"q": _HEADS, "k": _HEADS, "v": _HEADS, "attention_mask": _MASK},
    "output": {"": f"s b h/tp | {_HEADS}"},
}
_FLASH_OF_MEGATRON = {
    "input": {"q": "b s n/tp d", "k": "b s n/tp d", "v": "b s n/tp d"},
    "output": {"": "b s n/tp d"},
}

BY_CLASS: dict[str, dict[str, dict[str, str]]] = {
    "TransformerLanguageModel": {
        "input": {"enc_input_ids": _IDS, "enc_position_ids": _IDS, "enc_attn_mask": _MASK},
        "output": {"": _HIDDEN},
    },
    "ParallelTransformer": {"input": _LAYER, "output": {"": _HIDDEN}},
    "ParallelTransformerLayer": {"input": _LAYER, "output": {"": _HIDDEN, "0": _HIDDEN}},
    "ParallelAttention": {"input": _LAYER, "output": {"0": _HIDDEN, "1": "h"}},
    "ParallelMLP": {"input": {"hidden_states": _HIDDEN}, "output": {"0": _HIDDEN, "1": "h"}},
    "CoreAttention": {
        "input": {"query_layer": _HEADS, "key_layer": _HEADS, "value_layer": _HEADS, "attention_mask": _MASK},
        "output": {"": "s b h/tp"},
    },
    "FlashSelfAttention": _FLASH_OF_MEGATRON,
    **{f"{package}.FlashSelfAttention": _FLASH for package in ("modellink", "mindspeed", "mindspeed_llm")},
}

BY_PLACE: dict[tuple[str, str], dict[str, str]] = {
    ("TransformerLanguageModel", "embedding"): {"input": _IDS, "output": _HIDDEN},
    ("Embedding", "position_embeddings"): {"input": _IDS, "output": "b s h"},
    ("Embedding", "embedding_dropout"): _SAME,
    ("VocabParallelEmbedding", "norm"): {"input": "b s h", "output": "b s h"},  # ModelLink's --embed-layernorm
    ("ParallelTransformerLayer", "input_norm"): _SAME,
    ("ParallelTransformerLayer", "input_layernorm"): _SAME,
    ("ParallelTransformerLayer", "post_attention_norm"): _SAME,
    ("ParallelTransformerLayer", "post_attention_layernorm"): _SAME,
    ("ParallelTransformer", "final_norm"): _SAME,
    ("ParallelTransformer", "final_layernorm"): _SAME,
    ("CoreAttention", "attention_dropout"): {"input": "b n/tp s k", "output": "b n/tp s k"},
}

# Containers that end where the pipeline is cut.
CONTAINERS = ("ParallelTransformer", "TransformerLanguageModel")
# The linear layer that holds gate and up halves together.
GATED = "dense_h_to_4h"
