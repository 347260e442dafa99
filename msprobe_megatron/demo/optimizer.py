"""Megatron's optimizer from the flags; the last thing built before training."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import nn

from msprobe_megatron.demo.installed import known
from msprobe_megatron.demo.transformer import parameter_dtype


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
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**known(OptimizerConfig, **values)), chunks)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
