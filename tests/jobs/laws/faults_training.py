"""Faults of gradients, optimizer and weights that one run alone shows."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.compare.faults import Chunks, weight
from tests.jobs.laws.planting import Fault, nothing, rank_on, wrap

# Gradients.


def _bucket(change: Callable[..., Any]) -> Callable[[], None]:
    def before() -> None:
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        wrap(_ParamAndGradBucketGroup, "finish_grad_sync", change)

    return before


def _twice(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    self.buckets[0].grad_data.mul_(2)
    return result


def _sum_not_mean(chunks: Chunks, optimizer: Any) -> None:
    for chunk in chunks:
        for group in chunk.bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0


def _without_last(chunks: Chunks, optimizer: Any) -> None:
    """Every gradient loses what the last of two microbatches adds."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            seen: list[None] = []

            def hook(gradient: torch.Tensor, seen: list[None] = seen) -> torch.Tensor | None:
                seen.append(None)
                return torch.zeros_like(gradient) if len(seen) % 2 == 0 else None

            parameter.register_hook(hook)


def _cut_off(chunks: Chunks, optimizer: Any) -> None:
    value = weight(chunks, "decoder.layers.1.mlp.linear_fc1.weight")
    value.register_hook(torch.zeros_like)


def _norm_of(factor: float) -> Callable[[], None]:
    def before() -> None:
        from megatron.core.optimizer import optimizer

        original = optimizer.get_grad_norm_fp32
        optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: original(*args, **kwargs) * factor

    return before


def _one_unclipped() -> None:
    from megatron.core.optimizer import optimizer

    original = optimizer.clip_grad_by_total_norm_fp32
    optimizer.clip_grad_by_total_norm_fp32 = lambda parameters, *args, **kwargs: original(
        list(parameters)[1:], *args, **kwargs
    )


def _embedding_not_reduced() -> None:
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = nothing


# Optimizer and weights.


def _inner(optimizer: Any) -> list[Any]:
    from msprobe_megatron.topology.shards_of.optimizers import inner, leaves

    return [inner(leaf) for leaf in leaves(optimizer)]


def _no_bias_correction(chunks: Chunks, optimizer: Any) -> None:
    """Updates are as large as if the moments were not corrected."""
    for base in _inner(optimizer):
        kept: dict[int, torch.Tensor] = {}

        def before(opt: Any, *ignored: Any, kept: dict[int, torch.Tensor] = kept) -> None:
            for group in opt.param_groups:
                kept.update({id(p): p.detach().clone() for p in group["params"]})

        def step(original: Any, *args: Any, base: Any = base, kept: dict[int, Any] = kept, **kwargs: Any) -> Any:
            before(base)
            result = original(*args, **kwargs)
            for group in base.param_groups:
                for p in group["params"]:
                    if p in base.state:
                        t = float(base.state[p]["step"])
                        factor = (1 - 0.9**t) / (1 - 0.999**t) ** 0.5
                        p.data.copy_(kept[id(p)] + (p.data - kept[id(p)]) * factor)
            return result

        # Under the hooks of torch, which wrap the class's own step.
        _replace_step(base, step)


def _replace_step(base: Any, change: Callable[..., Any]) -> None:
    kind = type(base)
    plain = kind.step.__wrapped__ if hasattr(kind.step, "__wrapped__") else kind.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(functools.partial(plain, self), *args, **kwargs)

    changed = type(kind.__name__, (kind,), {"step": torch.optim.Optimizer.profile_hook_step(step)})
    base.__class__ = changed


def _group(key: str, value: Any, part: int = 0) -> Callable[[Chunks, Any], None]:
    def ready(chunks: Chunks, optimizer: Any) -> None:
        for base in _inner(optimizer):
            base.param_groups[min(part, len(base.param_groups) - 1)][key] = value

    return ready


def _no_group(chunks: Chunks, optimizer: Any) -> None:
    for base in _inner(optimizer):
        base.param_groups[0]["params"].pop(3)


def _one_rate(chunks: Chunks, optimizer: Any) -> None:
    """One matrix of one layer has a group of its own, with a rate that nobody gave."""
    for base in _inner(optimizer):
        group = next(g for g in base.param_groups if any(p.dim() == 2 for p in g["params"]))
        index = next(i for i, p in enumerate(group["params"]) if tuple(p.shape) == (32, 64))
        moved = group["params"].pop(index)
        base.param_groups.append({**group, "params": [moved], "lr": group["lr"] * 3})


def _stale_master(chunks: Chunks, optimizer: Any) -> None:
    """The weights were loaded after the optimizer had copied them."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(1.5)


def _not_written_back(chunks: Chunks, optimizer: Any) -> None:
    from msprobe_megatron.topology.shards_of.optimizers import leaves

    for leaf in leaves(optimizer):
        leaf._copy_main_params_to_model_params = nothing


def _corrupted(chunks: Chunks, optimizer: Any) -> None:
    """One weight of one data-parallel rank is off by less than a part in ten thousand."""
    value = weight(chunks, "decoder.layers.2.mlp.linear_fc1.weight")
    if rank_on("dp") == 1:
        value.data[3, 5] *= 1 + 7e-5


def _same_seed(chunks: Chunks, optimizer: Any) -> None:
    """Tensor-parallel ranks drew the same numbers."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    for chunk in chunks:
        for parameter in chunk.parameters():
            torch.distributed.broadcast(
                parameter.data, torch.distributed.get_process_group_ranks(group)[0], group=group
            )


def _copied_layer(chunks: Chunks, optimizer: Any) -> None:
    for name in ("mlp.linear_fc1.weight", "self_attention.linear_qkv.weight"):
        weight(chunks, f"decoder.layers.2.{name}").data.copy_(weight(chunks, f"decoder.layers.1.{name}").data)


def _gradients_kept(chunks: Chunks, optimizer: Any) -> None:
    """Nobody sets the gradients to zero between steps."""
    for chunk in chunks:
        calls: list[None] = []
        original = chunk.zero_grad_buffer

        def zero(calls: list[None] = calls, chunk: Any = chunk, original: Any = original) -> None:
            kept = [buffer.grad_data.clone() for buffer in chunk.buffers]
            original()
            for buffer, data in zip(chunk.buffers, kept, strict=True):
                buffer.grad_data.copy_(data)

        chunk.zero_grad_buffer = zero


def _one_rank_louder(chunks: Chunks, optimizer: Any) -> None:
    """One data-parallel rank puts twice its gradients into the reduction."""
    if rank_on("dp") == 1:
        for chunk in chunks:
            for group in chunk.bucket_groups:
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor *= 2


def _not_unscaled() -> None:
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    def unscale(original: Any, self: Any) -> Any:
        scale = self.grad_scaler.inv_scale.clone()
        self.grad_scaler._scale.fill_(1.0)
        try:
            return original(self)
        finally:
            self.grad_scaler._scale.fill_(1 / scale.item())

    wrap(MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan", unscale)


def _other_limit(chunks: Chunks, optimizer: Any) -> None:
    from msprobe_megatron.topology.shards_of.optimizers import leaves

    for leaf in leaves(optimizer):
        leaf.config.clip_grad = 0.1


def _frozen(chunks: Chunks, optimizer: Any) -> None:
    """One shard of the distributed optimizer, or one weight, is left as it is."""
    for base in _inner(optimizer):

        def step(original: Any, *args: Any, base: Any = base, **kwargs: Any) -> Any:
            kept = base.param_groups[0]["params"][2].detach().clone()
            result = original(*args, **kwargs)
            base.param_groups[0]["params"][2].data.copy_(kept)
            return result

        _replace_step(base, step)


def _stepped_twice(chunks: Chunks, optimizer: Any) -> None:
    for base in _inner(optimizer):

        def step(original: Any, *args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            return original(*args, **kwargs)

        _replace_step(base, step)


FAULTS = {
    "bucket_reduced_twice": Fault(_bucket(_twice)),
    "sum_not_mean": Fault(ready=_sum_not_mean),
    "without_last_microbatch": Fault(ready=_without_last),
    "embedding_not_reduced": Fault(_embedding_not_reduced),
    "weight_cut_off": Fault(ready=_cut_off),
    "norm_counted_twice": Fault(_norm_of(2**0.5)),
    "one_gradient_not_clipped": Fault(_one_unclipped),
    "no_bias_correction": Fault(ready=_no_bias_correction),
    "other_betas": Fault(ready=_group("betas", (0.9, 0.9))),
    "other_epsilon": Fault(ready=_group("eps", 1e-3)),
    "decay_left_out": Fault(ready=_group("weight_decay", 0.0)),
    "weight_in_no_group": Fault(ready=_no_group),
    "rate_of_one_weight": Fault(ready=_one_rate),
    "stale_master": Fault(ready=_stale_master),
    "weights_not_written_back": Fault(ready=_not_written_back),
    "corrupted_weight": Fault(ready=_corrupted),
    "same_seed": Fault(ready=_same_seed),
    "copied_layer": Fault(ready=_copied_layer),
    "gradients_kept": Fault(ready=_gradients_kept),
    "one_rank_louder": Fault(ready=_one_rank_louder),
    "not_unscaled": Fault(_not_unscaled),
    "other_clip_limit": Fault(ready=_other_limit),
    "shard_not_updated": Fault(ready=_frozen),
    "stepped_twice": Fault(ready=_stepped_twice),
}
