"""What gloo of torch before 2.6 cannot do, made of what it can: bfloat16, and collectives on one tensor.

Such a collective is finished when the call returns, also where it was to be asynchronous: every rank calls it at the
same place, so that nothing waits for anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import substitute

_OWNERS = (dist, dist.distributed_c10d)
_NEEDED_BEFORE = (2, 6)
# Of the same size, where only bytes are moved.
_MOVED_AS = {torch.bfloat16: torch.float16, torch.bool: torch.uint8, torch.int16: torch.float16}

# Before 2.2 `new_group` takes no None for it.
DEFAULT_TIMEOUT = inspect.signature(dist.new_group).parameters["timeout"].default


class Finished:
    """The handle of a collective that has completed."""

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


def needed(version: str) -> bool:
    """Whether gloo of this release of torch lacks what Megatron calls."""
    return tuple(int(part) for part in version.split(".")[:2]) < _NEEDED_BEFORE


def install() -> None:
    """Wrap the collectives of a torch that needs it."""
    if needed(torch.__version__):
        for name, wrapper in _WRAPPERS.items():
            original = getattr(dist, name, None)
            if original is not None:
                substitute(_OWNERS, name, wrapper(original))


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    other = _MOVED_AS.get(tensor.dtype)
    return tensor if other is None else tensor.view(other)


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tensor.dtype not in _MOVED_AS:
            return original(tensor, op=op, group=group, async_op=async_op)
        wide = tensor.float()
        original(wide, op=op, group=group)
        tensor.copy_(wide)
        return Finished() if async_op else None

    return all_reduce


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(tensor: torch.Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        return original(_moved(tensor), src, group=group, async_op=async_op)

    return broadcast


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        moved = [_moved(target) for target in tensor_list]
        return original(moved, _moved(tensor), group=group, async_op=async_op)

    return all_gather


def _all_gather_base(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(
        output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        size = dist.get_world_size(group)
        parts = list(output_tensor.view(-1).chunk(size))
        dist.all_gather(parts, input_tensor.reshape(-1), group=group)
        return Finished() if async_op else None

    return all_gather_into_tensor


def _reduce_scatter_base(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        whole = input.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, op=op, group=group)
        own, size = dist.get_rank(group), dist.get_world_size(group)
        output.copy_(whole.view(-1).chunk(size)[own].view(output.shape))
        return Finished() if async_op else None

    return reduce_scatter_tensor


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        whole = torch.cat([part.reshape(-1) for part in input_list])
        return dist.reduce_scatter_tensor(output, whole, op=op, group=group, async_op=async_op)

    return reduce_scatter


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        sizes = output_split_sizes, input_split_sizes
        return original(_moved(output), _moved(input.contiguous()), *sizes, group=group, async_op=async_op)

    return all_to_all_single


def _gather_or_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """`gather` and `scatter`: a tensor, a list of tensors on one rank or None."""

    def call(tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        for name in ("gather_list", "scatter_list"):
            parts = kwargs.pop(name, parts)
        moved = None if parts is None else [_moved(part) for part in parts]
        return original(_moved(tensor), moved, *args, **kwargs)

    return call


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_base,
    "_all_gather_base": _all_gather_base,
    "reduce_scatter_tensor": _reduce_scatter_base,
    "_reduce_scatter_base": _reduce_scatter_base,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "gather": _gather_or_scatter,
    "scatter": _gather_or_scatter,
}
