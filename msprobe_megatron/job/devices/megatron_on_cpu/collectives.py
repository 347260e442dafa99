"""NCCL calls as gloo understands them: the backend's name, arguments only NCCL knows, memory that is given
back under a running send, and the uneven sizes that MoE dispatchers use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msprobe_megatron.job.devices.megatron_on_cpu import older_gloo
from msprobe_megatron.job.devices.megatron_on_cpu.substitute import substitute

_OWNERS = (dist, dist.distributed_c10d)


def _gloo(backend: str | None) -> str | None:
    """Turn "nccl", "hccl", "cpu:gloo,cuda:nccl" into "gloo"; None (inherit) and others stay."""
    if backend is None:
        return None
    return "gloo" if any(name in backend for name in ("nccl", "hccl", "ucc")) else backend


def _even(tensors: Sequence[torch.Tensor]) -> bool:
    first = tensors[0].shape
    return all(tensor.shape == first for tensor in tensors)


def _as_ints(sizes: Any) -> list[int] | None:
    """Split sizes as integers: Megatron passes tensors where it expects them on a device."""
    if sizes is None or isinstance(sizes, list):
        return sizes
    return [int(size) for size in sizes]


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original(_gloo(backend) or "gloo", *args, **kwargs)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("device_id", None)
        # Before 2.2 None is no timeout; it is what a call without one would take.
        timeout = older_gloo.DEFAULT_TIMEOUT if timeout is None else timeout
        return original(None if ranks is None else list(ranks), timeout, _gloo(backend), None, *args, **kwargs)

    return new_group


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,  # noqa: A002
    ) -> Any:
        return original(output, input, _as_ints(output_split_sizes), _as_ints(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if _even(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        own = dist.get_rank(group)
        for source, (rank, target) in enumerate(
            zip(dist.get_process_group_ranks(group or dist.group.WORLD), tensor_list, strict=True)
        ):
            part = (tensor if source == own else target).clone(memory_format=torch.contiguous_format)
            dist.broadcast(part, rank, group=group)
            target.copy_(part)
        return older_gloo.Finished() if async_op else None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _even(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        own = dist.get_rank(group)
        for owner, tensor in enumerate(input_list):
            part = tensor.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(part, op=op, group=group)
            if owner == own:
                output.copy_(part)
        return older_gloo.Finished() if async_op else None

    return reduce_scatter


def _isend(original: Callable[..., Any]) -> Callable[..., Any]:
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron gives an output's memory back (`out.data = ...`) once its send is under way. NCCL has it
        # ordered on a stream; gloo would send freed memory. The alias keeps it until the send is done.
        return original(tensor.detach(), *args, **kwargs)

    return isend


_WRAPPERS = (
    _isend,
    _init_process_group,
    _new_group,
    _barrier,
    _all_to_all_single,
    _all_gather,
    _reduce_scatter,
)


def install() -> None:
    """Wrap the entry points; gloo takes everything else as it is."""
    older_gloo.install()
    for wrapper in _WRAPPERS:
        name = wrapper.__name__[1:]
        substitute(_OWNERS, name, wrapper(getattr(dist, name)))
