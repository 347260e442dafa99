"""The models that people train, small: megatron-core's own classes, trained by the demo's loop in forked ranks.

A model is a command line, what its configuration has beyond that, and how its chunks are built. `train` puts both in
the place of the demo's own before it runs it.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.jobs.models import faults, kernels

_BASE = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2"
    " --global-batch-size 4 --train-iters 2 --lr 1e-2 --seed 7 --vocab-size 64 --swiglu --normalization RMSNorm"
    " --untie-embeddings-and-output-weights --disable-bias-linear --position-embedding-type rope"
    " --attention-dropout 0 --hidden-dropout 0 --no-check-for-nan-in-loss-and-grad"
)
_GROUPS = {"num_query_groups": 2, "qk_layernorm": True}
_EXPERTS = " --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 32"


@dataclass(frozen=True)
class Model:
    """Flags of the demo, more settings of the configuration, and a builder of chunks where GPTModel will not do."""

    flags: str
    settings: dict[str, Any] = field(default_factory=dict)
    latent: bool = False
    chunk: Callable[[Namespace, Any, int | None], torch.nn.Module] | None = None
    prepare: Callable[[], None] | None = None


def _place(stage: int | None) -> dict[str, Any]:
    from megatron.core import parallel_state

    if stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    where = {"ignore_virtual": False, "vp_stage": stage}
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(**where),
        "post_process": parallel_state.is_pipeline_last_stage(**where),
    }


def gpt(args: Namespace, config: Any, stage: int | None) -> torch.nn.Module:
    """GPTModel with Megatron's own block specs: dense and MoE layers, latent attention, multi-token prediction."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    place = _place(stage)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=stage
    )
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
        if mtp is not None:
            _rms_norms(mtp, spec)
    chunk: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=config.__dict__.get("demo_positions", args.position_embedding_type),
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
        vp_stage=stage,
        **place,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk


def _rms_norms(mtp: Any, spec: Any) -> None:
    """Without TransformerEngine Megatron gives multi-token prediction layers the norm of the wrong kind."""
    norm = spec.layer_specs[-1].submodules.input_layernorm
    for layer in mtp.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norm


_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
    "rope_type": "rope",
    "qk_layernorm": True,
    "multi_latent_attention": True,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-2,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.1,
}
_SINKS = {
    "num_query_groups": 2,
    "softmax_type": "learnable",
    "window_size": (4, 0),
    "window_attn_skip_freq": 2,
    "add_bias_linear": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}


def _quick_gelu() -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {"activation_func": quick_gelu}


def mamba(args: Namespace, config: Any, stage: int | None) -> torch.nn.Module:
    """MambaModel of Mamba, attention, MLP and MoE layers, with norms of torch in the place of TransformerEngine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.ssm import mamba_block, mamba_layer, mamba_mixer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mamba_block.TENorm = WrappedTorchNorm
    dense = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    experts = get_gpt_layer_local_spec(num_experts=args.num_experts, normalization="RMSNorm").submodules
    nothing = {"mlp": IdentityOp, "pre_mlp_layernorm": IdentityOp, "mlp_bda": IdentityFuncOp}
    attention = dataclasses.replace(dense, **nothing)
    mlps = [
        TransformerLayerSubmodules(pre_mlp_layernorm=one.pre_mlp_layernorm, mlp=one.mlp, mlp_bda=one.mlp_bda)
        for one in (dense, experts)
    ]
    mixer = ModuleSpec(
        module=mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    layer = ModuleSpec(
        module=mamba_layer.MambaLayer,
        submodules=mamba_layer.MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add),
    )
    spec = ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=layer,
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlps[0]),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=mlps[1]),
        ),
    )
    chunk: torch.nn.Module = MambaModel(
        config=config,
        mamba_stack_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_override_pattern="M*ME",
        **_place(stage),
    )
    return chunk


def delta_net(args: Namespace, config: Any, stage: int | None) -> torch.nn.Module:
    """GPTModel whose first three layers of four have a gated delta net in the place of attention."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    build = gpt_layer_specs.get_gpt_decoder_block_spec
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)

    def with_delta_nets(config: Any, *more: Any, **named: Any) -> Any:
        spec = build(config, *more, **named)
        first = get_transformer_layer_offset(config, named.get("vp_stage"))
        for number, layer in enumerate(spec.layer_specs):
            if (first + number) % 4 != 3:
                mixer = ModuleSpec(module=GatedDeltaNet, submodules=parts)
                own = dataclasses.replace(layer.submodules, self_attention=mixer, sharded_state_dict_keys_map={})
                spec.layer_specs[number] = ModuleSpec(module=layer.module, submodules=own)
        return spec

    gpt_layer_specs.get_gpt_decoder_block_spec = with_delta_nets
    try:
        return gpt(args, config, stage)
    finally:
        gpt_layer_specs.get_gpt_decoder_block_spec = build


_MAMBA = {
    "mamba_state_dim": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_num_heads": 8,
    "is_hybrid_model": True,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
    "num_query_groups": 2,
    "qk_layernorm": True,
}
MODELS = {
    "qwen3": Model(_BASE, _GROUPS),
    "qwen3_moe": Model(_BASE + _EXPERTS, _GROUPS),
    "deepseek": Model(_BASE + _EXPERTS, _LATENT, latent=True),
    "gpt_oss": Model(_BASE + _EXPERTS, _SINKS),
    "nemotron_h": Model(_BASE + _EXPERTS, _MAMBA, chunk=mamba, prepare=kernels.install),
    "qwen3_next": Model(_BASE + _EXPERTS, _DELTA, chunk=delta_net, prepare=kernels.install),
}


def train(model: str, argv: list[str], fault: str = "none") -> dict[str, Any]:
    """Train a model in this rank, with a fault inside, and return every number that the kit must not change."""
    from msprobe_megatron.lab.demo import model as demo_model
    from msprobe_megatron.lab.demo import transformer
    from tests.jobs.distributed.layouts import train_and_keep

    chosen = MODELS[model]
    if chosen.prepare is not None:
        chosen.prepare()
    build = transformer.build_config

    def build_config(args: Namespace) -> Any:
        # Checked when the model's own settings are there.
        modules, args.recompute_modules = args.recompute_modules, None
        return _with(build(args), chosen, {"recompute_modules": modules} if modules else {})

    def chunk(args: Namespace, config: Any, spec: Any, stage: int | None) -> torch.nn.Module:
        return (chosen.chunk or gpt)(args, config, stage)

    transformer.build_config, demo_model._chunk = build_config, chunk
    faults.repair()
    return train_and_keep(argv, ready=faults.FAULTS[fault])


def _with(config: Any, model: Model, chosen: dict[str, Any]) -> Any:
    """The configuration with the model's own settings, checked by Megatron again."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    given = {item.name: getattr(config, item.name) for item in dataclasses.fields(config) if item.init}
    more = dict(model.settings)
    if "softmax_type" in more:
        more |= _quick_gelu()
    for made in ("init_method", "output_layer_init_method", "embedding_init_method"):
        given.pop(made, None)
    cls = MLATransformerConfig if model.latent else type(config)
    return cls(**(given | more | chosen))


def flags_of(model: str, layout: str = "") -> list[str]:
    """Command line of a model in a layout."""
    return f"{MODELS[model].flags} {layout}".split()
