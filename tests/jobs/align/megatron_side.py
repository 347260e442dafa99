"""The same models in megatron-core, and an independent converter of weights: written from the two implementations, with
nothing of the kit in it."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from tests.jobs.align.architectures import ARCHITECTURES, HEADS, TOKENS, VOCABULARY, megatron_settings


class LatentCore(nn.Module):
    """Attention with values of another width than keys, which Megatron has with TransformerEngine only."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, k_channels=None, **rest
    ):
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else (k_channels or 1) ** -0.5

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, **rest):
        scores = torch.einsum("sbnd,tbnd->bnst", query.float(), key.float()) * self.scale
        hidden = torch.triu(torch.ones(scores.shape[-2:], dtype=torch.bool), 1)
        probs = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(value.dtype)
        return torch.einsum("bnst,tbnd->sbnd", probs, value).flatten(2)


def build(
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    vocabulary: int = VOCABULARY,
    model_kwargs: Any = None,
    **changes: Any,
) -> nn.Module:
    """The stage of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    made = ARCHITECTURES[name]
    latent = made.kind == "mla"
    settings = {
        **megatron_settings(name, **changes),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
    }
    if latent:
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.HAVE_TE = False  # 0.16.1 believes to have TransformerEngine whenever this is imported
        settings.pop("kv_channels")
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=settings.get("num_moe_experts"),
        qk_layernorm=settings.get("qk_layernorm", False),
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    if latent:
        spec.submodules.self_attention.submodules.core_attention = LatentCore
    kwargs = {"share_embeddings_and_output_weights": False, "rotary_base": 10000, "rotary_percent": 1.0}
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=64,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **{**kwargs, **made.model_kwargs, **(model_kwargs or {})},
    )
    return model.to(dtype).eval()


def converted(name: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole weights of Megatron from those of transformers."""
    groups = ARCHITECTURES[name].theirs["num_key_value_heads"]
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state.get("lm_head.weight", state["model.embed_tokens.weight"]),
    }
    for layer in sorted({int(m[1]) for key in state if (m := re.match(r"model\.layers\.(\d+)\.", key))}):
        theirs = {
            k.split(f"layers.{layer}.", 1)[1]: v for k, v in state.items() if k.startswith(f"model.layers.{layer}.")
        }
        for key, weight in _layer(theirs, groups).items():
            found[f"decoder.layers.{layer}.{key}"] = weight
    return found


def grouped(q, k, v, groups):
    """Queries of a group, its key, its value, group after group."""
    parts = []
    for group in range(groups):
        for whole in (q, k, v):
            rows = whole.shape[0] // groups
            parts.append(whole[group * rows : (group + 1) * rows])
    return torch.cat(parts)


_RENAMED = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate_up_proj.weight": "mlp.linear_fc1.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
}


def _layer(theirs: dict[str, torch.Tensor], groups: int) -> dict[str, torch.Tensor]:
    found = {ours: theirs[key] for key, ours in _RENAMED.items() if key in theirs}
    for what in ("weight", "bias"):
        if f"self_attn.k_proj.{what}" in theirs:
            found[f"self_attention.linear_qkv.{what}"] = grouped(
                *(theirs[f"self_attn.{part}_proj.{what}"] for part in "qkv"), groups
            )
    for inside in ("mlp", "mlp.shared_experts"):
        if f"{inside}.gate_proj.weight" in theirs:
            both = [theirs[f"{inside}.{part}_proj.weight"] for part in ("gate", "up")]
            found[f"{inside}.linear_fc1.weight"] = torch.cat(both)
    if "mlp.experts.gate_up_proj" in theirs:
        for expert in range(len(theirs["mlp.experts.gate_up_proj"])):
            local = f"mlp.experts.local_experts.{expert}"
            found[f"{local}.linear_fc1.weight"] = theirs["mlp.experts.gate_up_proj"][expert]
            found[f"{local}.linear_fc2.weight"] = theirs["mlp.experts.down_proj"][expert]
    return found


def load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Put this rank's part of every weight into the model."""
    from megatron.core import parallel_state

    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    first = 0
    if model.decoder.layers:
        first = model.decoder.layers[0].layer_number - 1
    with torch.no_grad():
        for key, target in (*model.named_parameters(), *model.named_buffers()):
            name = re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first}", key, count=1)
            if name not in weights:
                assert not isinstance(target, nn.Parameter) or name == "output_layer.weight", name
                continue
            whole = weights[name]
            if whole.shape != target.shape:
                whole = _cut(name, whole, rank, size)
            target.copy_(whole)


def _cut(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    if re.search(r"linear_(proj|fc2)\.weight$", name):
        return whole.chunk(size, 1)[rank]
    if "linear_fc1" in name:
        gate, up = whole.chunk(2)
        return torch.cat((gate.chunk(size)[rank], up.chunk(size)[rank]))
    return whole.chunk(size)[rank]


def forward(model: nn.Module, ids: torch.Tensor) -> list[Any]:
    """A forward-only pass by Megatron's schedule; the logits on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool), 1)
    positions = torch.arange(TOKENS).expand(ids.shape)

    def step(_reader, chunk):
        return chunk(ids, positions, mask), lambda output: (output.sum(), {"logits": output.detach()})

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=model,
        num_microbatches=1,
        seq_length=TOKENS,
        micro_batch_size=ids.shape[0],
        forward_only=True,
    )


def initialize(tp: int = 1, pp: int = 1) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(1)


__all__ = ["HEADS", "build", "converted", "forward", "initialize", "load"]
