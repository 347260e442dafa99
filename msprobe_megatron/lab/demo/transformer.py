"""Megatron's TransformerConfig from the flags. It refuses bad values, so it is built early."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F

from msprobe_megatron.lab.demo.arguments import UsageError
from msprobe_megatron.lab.demo.installed import known


def parameter_dtype(args: Namespace) -> torch.dtype:
    """Give the dtype of weights and activations."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def build_config(args: Namespace) -> Any:
    """Megatron's TransformerConfig; what it refuses becomes a UsageError."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = parameter_dtype(args)
    values: dict[str, Any] = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups,
        "kv_channels": args.kv_channels,
        "normalization": args.normalization,
        "layernorm_epsilon": args.norm_epsilon,
        "add_bias_linear": args.add_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "qk_layernorm": args.qk_layernorm,
        "attention_dropout": args.attention_dropout,
        "hidden_dropout": args.hidden_dropout,
        "init_method_std": args.init_method_std,
        "attention_softmax_in_fp32": args.attention_softmax_in_fp32,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": args.bf16,
        "fp16": args.fp16,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": args.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        # Their names until 0.10; known() keeps those that the release has.
        "first_pipeline_num_layers": args.decoder_first_pipeline_num_layers,
        "last_pipeline_num_layers": args.decoder_last_pipeline_num_layers,
        "context_parallel_size": args.context_parallel_size,
        "sequence_parallel": args.sequence_parallel,
        "overlap_p2p_comm": args.overlap_p2p_comm,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "deallocate_pipeline_outputs": True,
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "recompute_modules": args.recompute_modules,
        "distribute_saved_activations": args.distribute_saved_activations,
        # Weights are set afterwards; drawing them on the host needs no device generator.
        "use_cpu_initialization": True,
        # Fused kernels need packages that are not here, or change bits between devices.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        **_activation(args),
        **_experts(args),
    }
    try:
        return TransformerConfig(**known(TransformerConfig, **values))
    except (ValueError, AssertionError) as fault:
        raise UsageError(" ".join(str(fault).split())) from fault


def _activation(args: Namespace) -> dict[str, Any]:
    if args.swiglu:
        return {"gated_linear_unit": True, "activation_func": F.silu}
    if args.squared_relu:
        return {"activation_func": lambda x: torch.pow(F.relu(x), 2)}
    return {"activation_func": F.gelu}


def _experts(args: Namespace) -> dict[str, Any]:
    if args.num_experts is None:
        return {}
    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
        "moe_router_topk": args.moe_router_topk,
        "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
        "moe_expert_capacity_factor": args.moe_expert_capacity_factor,
        "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }
