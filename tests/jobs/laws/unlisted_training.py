"""Faults of optimizer and gradients that were invented after the laws; see `unlisted`."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, weight
from tests.jobs.laws.faults_training import _inner as inner_optimizers
from tests.jobs.laws.faults_training import _replace_step as replace_step
from tests.jobs.laws.planting import rank_on, wrap


def finalize() -> Any:
    """The module; the package has a function of its name."""
    return importlib.import_module("megatron.core.distributed.finalize_model_grads")


# Optimizer.


def coupled_decay(chunks: Chunks, optimizer: Any) -> None:
    """Decay goes through the moments, as in Adam and not in AdamW."""
    for base in inner_optimizers(optimizer):

        def step(original: Any, *args: Any, base: Any = base, **kwargs: Any) -> Any:
            kept = [group["weight_decay"] for group in base.param_groups]
            for group in base.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p.detach(), alpha=group["weight_decay"])
                group["weight_decay"] = 0.0
            result = original(*args, **kwargs)
            for group, decay in zip(base.param_groups, kept, strict=True):
                group["weight_decay"] = decay
            return result

        replace_step(base, step)


def step_stands_still(chunks: Chunks, optimizer: Any) -> None:
    for base in inner_optimizers(optimizer):

        def step(original: Any, *args: Any, base: Any = base, **kwargs: Any) -> Any:
            for state in base.state.values():
                state["step"] = state["step"] * 0
            return original(*args, **kwargs)

        replace_step(base, step)


def rate_of_a_stage(chunks: Chunks, optimizer: Any) -> None:
    if rank_on("pp") == 1:
        for base in inner_optimizers(optimizer):
            for group in base.param_groups:
                group["lr"] *= 2


def truncated(chunks: Chunks, optimizer: Any) -> None:
    """The model's weight is the master copy with its last bits cut off instead of rounded."""
    from msprobe_megatron.topology.shards_of.optimizers import leaves

    for leaf in leaves(optimizer):
        original = leaf._copy_main_params_to_model_params

        def copy(leaf: Any = leaf, original: Any = original) -> None:
            original()
            for models, mains in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
                for model, main in zip(models, mains, strict=True):
                    model.data.copy_((main.data.view(torch.int32) & -65536).view(torch.float32))

        leaf._copy_main_params_to_model_params = copy


def clipped_by_its_own_norm() -> None:
    """Every parameter is clipped by its own norm."""
    from megatron.core.optimizer import optimizer

    def clip(parameters: Any, max_norm: float, *rest: Any, **more: Any) -> None:
        for p in parameters:
            if p.grad is not None:
                p.grad.mul_(min(1.0, max_norm / (float(p.grad.norm()) + 1e-6)))

    optimizer.clip_grad_by_total_norm_fp32 = clip


def norm_counts_replicas() -> None:
    """Weights that every tensor-parallel rank holds whole are counted on each of them."""
    from megatron.core import tensor_parallel

    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *args, **kwargs: True


def shard_not_gathered() -> None:
    """One data-parallel rank keeps its old weights of one bucket."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def sync(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        bucket = self.buckets[0]
        kept = bucket.param_data.clone()
        result = original(self, *args, **kwargs)
        if rank_on("dp") == 1:
            handle = self.param_gather_handle
            if handle is not None:
                handle.wait()
                self.param_gather_handle = None
            half = kept.numel() // 2
            bucket.param_data[:half].copy_(kept[:half])
        return result

    wrap(_ParamAndGradBucketGroup, "start_param_sync", sync)


# Gradients.


def last_bucket_local() -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        mine = self.buckets[-1].grad_data.clone()
        result = original(self, *args, **kwargs)
        if self.buckets[-1].offset == 0:
            self.buckets[-1].grad_data.copy_(mine)
        return result

    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", finish)


def reduced_too_early() -> None:
    """The reduction of a bucket starts after the first microbatch; what comes later stays local."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def ready(original: Any, self: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
        counts = self.__dict__.setdefault("planted_counts", {})
        counts[param] = counts.get(param, 0) + 1
        if len(counts) == len(self.params) and all(count == 1 for count in counts.values()):
            from torch import distributed

            for bucket in self.buckets:
                bucket.grad_data.mul_(0.5)
                distributed.all_reduce(bucket.grad_data, group=self.data_parallel_group)
        return original(self, param, *args, **kwargs) if self.is_last_microbatch else None

    def finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.planted_counts = {}
        self.grad_reduce_handle = None
        return None

    wrap(_ParamAndGradBucketGroup, "register_grad_ready", ready)
    wrap(_ParamAndGradBucketGroup, "start_grad_sync", lambda original, self, *a, **k: None)
    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", finish)


def accumulated_in_bf16(chunks: Chunks, optimizer: Any) -> None:
    for chunk in chunks:
        for buffer in chunk.buffers:
            for parameter in buffer.params:
                parameter.register_hook(
                    lambda g, p=parameter: p.main_grad.copy_(p.main_grad.bfloat16().float()) is None or None
                )


def overwritten(chunks: Chunks, optimizer: Any) -> None:
    """One weight keeps the gradient of the last microbatch only."""
    value = weight(chunks, "decoder.layers.1.mlp.linear_fc2.bias")
    if value is not None:
        value.register_hook(lambda gradient: value.main_grad.zero_() is None or None)


def tied_twice() -> None:
    module = finalize()
    original = module._allreduce_word_embedding_grads

    def twice(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        original(*args, **kwargs)

    module._allreduce_word_embedding_grads = twice


def norms_averaged() -> None:
    module = finalize()
    original = module._allreduce_non_tensor_model_parallel_grads

    def averaged(model: Any, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        for chunk in model:
            for parameter in chunk.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    parameter.main_grad.mul_(0.5)

    module._allreduce_non_tensor_model_parallel_grads = averaged


def not_over_context() -> None:
    """Gradients are averaged over data-parallel ranks, not over context-parallel ones."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    def start(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        for bucket in self.buckets:
            bucket.grad_data.mul_(bucket.gradient_scaling_factor)

    wrap(_ParamAndGradBucketGroup, "start_grad_sync", start)
    wrap(_ParamAndGradBucketGroup, "finish_grad_sync", lambda original, self, *a, **k: start(original, self))


def experts_not_scaled(chunks: Chunks, optimizer: Any) -> None:
    for chunk in chunks:
        for group in chunk.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0


def frozen_layer(chunks: Chunks, optimizer: Any) -> None:
    for name, parameter in chunks[0].named_parameters():
        if "layers.1.mlp.linear_fc2.weight" in name:
            parameter.requires_grad_(False)


def stale_gradient() -> None:
    """A stage gets the gradient of the microbatch before, once."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    last: list[torch.Tensor] = []

    def received(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        got = original(self, *args, **kwargs)
        tensor = got[0] if isinstance(got, list) else got
        if tensor is not None:
            last.append(tensor.detach().clone())
            if len(last) == 2:
                tensor.data.copy_(last[0])
        return got

    wrap(P2PCommunicator, "recv_backward", received)
    wrap(P2PCommunicator, "send_forward_recv_backward", received)


def loss_not_scaled(chunks: Chunks, optimizer: Any) -> None:
    """The loss is not multiplied by the loss scale, the gradients are divided by it."""
    for chunk in chunks:
        config = chunk.config
        config.grad_scale_func = lambda loss: loss
