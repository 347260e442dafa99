"""Megatron's optimizer from the flags; the last thing built before training."""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any

import torch
from torch import nn

from msprobe_megatron.lab.demo.arguments import PROGRAM, refuse
from msprobe_megatron.lab.demo.installed import known
from msprobe_megatron.lab.demo.transformer import parameter_dtype

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def build_optimizer(args: Namespace, config: Any, chunks: list[nn.Module]) -> Any:
    """Megatron's optimizer; its master copies are taken from the weights as they are now."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    values = {
        "optimizer": args.optimizer,
        "lr": args.lr,
        "min_lr": args.lr,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_eps,
        "sgd_momentum": args.sgd_momentum,
        "clip_grad": args.clip_grad,
        "bf16": args.bf16,
        "fp16": args.fp16,
        "params_dtype": parameter_dtype(args),
        "loss_scale": args.loss_scale,
        "initial_loss_scale": args.initial_loss_scale,
        "min_loss_scale": args.min_loss_scale,
        "loss_scale_window": args.loss_scale_window,
        "hysteresis": args.hysteresis,
        "use_distributed_optimizer": args.use_distributed_optimizer,
        "overlap_param_gather": args.overlap_param_gather,
        "overlap_grad_reduce": args.overlap_grad_reduce,
        "use_precision_aware_optimizer": args.use_precision_aware_optimizer,
        "main_params_dtype": _DTYPES[args.main_params_dtype],
        "exp_avg_dtype": _DTYPES[args.exp_avg_dtype],
        "exp_avg_sq_dtype": _DTYPES[args.exp_avg_sq_dtype],
    }
    unusual = args.use_precision_aware_optimizer or "muon" in args.optimizer
    try:
        if args.use_precision_aware_optimizer:
            importlib.import_module("transformer_engine.pytorch.optimizers")
        settings = OptimizerConfig(**known(OptimizerConfig, **values))
        if "muon" in args.optimizer:
            from megatron.core.optimizer.muon import get_megatron_muon_optimizer

            spread = args.optimizer == "dist_muon"
            optimizer = get_megatron_muon_optimizer(settings, chunks, layer_wise_distributed_optimizer=spread)
        else:
            optimizer = get_megatron_optimizer(settings, chunks)
    except (AssertionError, ImportError, RuntimeError) as error:
        if not unusual:
            raise
        # What it is built on (TransformerEngine, emerging_optimizers) is missing: Megatron says which.
        refuse(f"{PROGRAM}: error: this Megatron cannot build the optimizer: {error}")
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
