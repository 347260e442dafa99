"""Small models of transformers, and the settings that make megatron-core build the same one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

HIDDEN, FFN, LAYERS, HEADS, VOCABULARY, TOKENS, SAMPLES = 64, 96, 2, 4, 96, 12, 2


class Architecture(NamedTuple):
    """A class of transformers with its settings, and those of Megatron."""

    model: str
    theirs: dict[str, Any]
    ours: dict[str, Any]
    kind: str = "dense"
    model_kwargs: dict[str, Any] = {}


def _dense(model, theirs=None, ours=None, **model_kwargs):
    base = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "head_dim": HIDDEN // HEADS,
    }
    return Architecture(model, {**base, **(theirs or {})}, ours or {}, "dense", model_kwargs)


def _experts(model, theirs, ours, kind="experts", **model_kwargs):
    dense = _dense(model, theirs)
    return Architecture(model, dense.theirs, {"num_moe_experts": 4, "moe_router_topk": 2, **ours}, kind, model_kwargs)


_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_MLA_OURS = {
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "rotary_base": 10000.0,
    "qk_layernorm": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_query_groups": HEADS,
}

ARCHITECTURES = {
    "llama": _dense("Llama"),
    "llama_mha": _dense("Llama", {"num_key_value_heads": HEADS}, {"num_query_groups": HEADS}),
    "llama_tied": _dense("Llama", {"tie_word_embeddings": True}, share_embeddings_and_output_weights=True),
    "mistral": _dense("Mistral", {"sliding_window": None}),
    "qwen2": _dense("Qwen2", {}, {"add_qkv_bias": True}),
    "qwen3": _dense("Qwen3", {}, {"qk_layernorm": True}),
    "glm": _dense(
        "Glm",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        {"add_qkv_bias": True, "rotary_interleaved": True},
        rotary_percent=0.5,
    ),
    "mixtral": _experts(
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {"moe_ffn_hidden_size": FFN},
    ),
    "qwen3_moe": _experts(
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        {"moe_ffn_hidden_size": 32, "qk_layernorm": True},
    ),
    "deepseek_v3": _experts("DeepseekV3", _MLA, _MLA_OURS, "mla"),
}


def hugging_face(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model of transformers with random weights; norms and biases are random too, so that no fault hides in ones."""
    import transformers

    made = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{made.model}Config")(**{**made.theirs, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"{made.model}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in key else 0.0))
            else:
                weight.copy_(torch.randn_like(weight) * (0.3 if "gate.weight" in key else 0.08))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.05)
    return model.to(dtype)


def tokens(seed: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (SAMPLES, TOKENS), generator=generator)


def megatron_settings(name: str, **changes: Any) -> dict[str, Any]:
    """Arguments of TransformerConfig."""
    made = ARCHITECTURES[name]
    return {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_attention_heads": HEADS,
        "num_query_groups": 2,
        "kv_channels": HIDDEN // HEADS,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_grouped_gemm": False,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "attention_softmax_in_fp32": True,
        **made.ours,
        **changes,
    }
