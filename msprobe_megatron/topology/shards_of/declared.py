"""Shard specs that Megatron itself declares for its parameters: those of its distributed checkpoints.

A module's ``sharded_state_dict`` says for every parameter which part of the whole this rank holds, also where several
tensors are packed into one (gate and up of an MLP, [z|x|B|C|dt] of Mamba, [q|k|v|z|b|a] of a gated delta net) and where
the parameter carries no attribute that says so (the sinks of an attention). So a new module needs no line of ours. It
is asked once per model; nothing is copied, and nothing communicates.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.topology import coordinates
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec

_Table = dict[int, tuple["weakref.ref[torch.Tensor]", ShardSpec]]
_TABLES: weakref.WeakKeyDictionary[nn.Module, _Table] = weakref.WeakKeyDictionary()
_ASKED: weakref.WeakKeyDictionary[nn.Module, dict[int, weakref.ref[torch.Tensor]]] = weakref.WeakKeyDictionary()
"""Tensors that a model held when it was asked."""
_UNANSWERED: dict[str, str] = {}
"""Classes whose ``sharded_state_dict`` raised, and what it raised; their children were asked instead."""


def unanswered() -> dict[str, str]:
    """Classes of the host that could not declare their shards, with the error of each.

    Their children were asked one by one, and what those do not declare comes from attributes and class tables.
    """
    return dict(_UNANSWERED)


def declared_spec(parameter: torch.Tensor, model: nn.Module | None) -> ShardSpec | None:
    """Spec that Megatron declares for a parameter or buffer of the (unwrapped) model; None where it declares none.

    A spec over ranks that do not hold equal shares, or that are not those of TP or expert TP, counts as none.
    """
    if model is None or not hasattr(model, "sharded_state_dict") or coordinates.parallel_state() is None:
        return None
    asked = _ASKED.get(model, {}).get(id(parameter))
    if asked is None or asked() is not parameter:
        # Asked again for a tensor that was not there: rounding a model to half precision replaces its buffers.
        _TABLES[model] = _table(model)
        held = (parameter, *model.parameters(), *model.buffers())
        _ASKED[model] = {id(tensor): weakref.ref(tensor) for tensor in held}
    reference, spec = _TABLES[model].get(id(parameter), (None, None))
    return spec if reference is not None and reference() is parameter else None


def output_cut(weight: object) -> Cut | None:
    """How the output of a linear layer is cut whose weight Megatron declares as packed: like the rows of the weight."""
    for table in list(_TABLES.values()):
        reference, spec = table.get(id(weight), (None, None))
        if spec is not None and reference is not None and reference() is weight:
            return next((cut for cut in spec.dims[0].cuts if cut.order == "packed"), None)
    return None


class _Piece(NamedTuple):
    """What of a parameter is one tensor of the checkpoint: its key, and extent, whole extent, offset per dimension."""

    key: str
    dims: tuple[tuple[int, int, int], ...]


def _table(model: nn.Module) -> _Table:
    state = _ask(model)  # first: routers exchange the memory of their bias when they are asked
    tensors = [*model.buffers(), *(p for p in model.parameters() if type(p) is nn.Parameter)]
    own = {_memory(tensor): tensor for tensor in tensors if tensor.numel()}
    found: _Table = {}
    for value in _values(state):
        data = getattr(value, "data", None)
        if not isinstance(data, torch.Tensor) or not data.numel():
            continue
        parameter = own.get(_memory(data))
        if parameter is None or parameter.shape != data.shape:
            continue
        pieces = _pieces(value, data)
        spec = None if pieces is None else _spec(pieces, parameter)
        if spec is not None:
            found[id(parameter)] = (weakref.ref(parameter), spec)
    return found


def _memory(tensor: torch.Tensor) -> tuple[Any, int]:
    return (tensor.device, tensor.data_ptr())


def _ask(module: nn.Module) -> dict[str, Any]:
    """The sharded state of a module; of its children, where it cannot say its own."""
    ask = getattr(module, "sharded_state_dict", None)
    if ask is not None:
        arguments = {"metadata": _metadata()} if "metadata" in inspect.signature(ask).parameters else {}
        try:
            return dict(ask(**arguments))
        except Exception as error:  # noqa: BLE001 (a module of the host that cannot say is asked part by part)
            _UNANSWERED[type(module).__name__] = f"{type(error).__name__}: {error}"[:200]
    found: dict[str, Any] = {}
    for name, child in module.named_children():
        found.update({f"{name}.{key}": value for key, value in _ask(child).items()})
    return found


def _metadata() -> dict[str, Any]:
    state: Any = coordinates.parallel_state()
    return {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}


def _values(state: Any) -> Iterator[Any]:
    """The tensors and factories of a nested state, in order."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for item in state:
            yield from _values(item)
    else:
        yield state


def _pieces(value: Any, data: torch.Tensor) -> list[_Piece] | None:
    """The tensors that a parameter is stored as; those of a factory are built without memory."""
    if hasattr(value, "build_fn"):
        try:
            empty = torch.empty_like(data.detach(), device="meta")
            stored = list(_values(value.build_fn(value.key, empty, value.replica_id, None)))
        except Exception:  # noqa: BLE001 (a factory that reads values)
            return None
    else:
        stored = [value]
    found = []
    for one in stored:
        if not hasattr(one, "global_offset") or len(one.local_shape) != data.dim():
            return None
        first = int(getattr(one, "prepend_axis_num", 0))
        whole, offset = one.global_shape[first:], one.global_offset[first:]
        found.append(_Piece(one.key, tuple(zip(one.local_shape, whole, offset, strict=True))))
    return found or None


def _spec(pieces: list[_Piece], parameter: torch.Tensor) -> ShardSpec | None:
    here = coordinates.current()
    axis = "tp" if getattr(parameter, "allreduce", True) else "etp"
    place, size = here.of(axis), here.size(axis)
    dims = []
    for index, extent in enumerate(parameter.shape):
        ranges = [piece.dims[index] for piece in pieces]
        split = any(held != extent for held, _, _ in ranges)
        if split and sum(held for held, _, _ in ranges) != extent:
            return None
        keys = [piece.key for piece in pieces] if split else []
        order = _order(ranges if split else ranges[:1], keys, place, size)
        if order is None:
            return None
        cuts = (Cut(axis, *order),) if order[0] else ()
        dims.append(Dim(f"d{index}", cuts))
    return ShardSpec(tuple(dims))


def _order(
    ranges: list[tuple[int, int, int]], keys: list[str], place: int, size: int
) -> tuple[str, tuple[int, ...]] | None:
    """How a dimension of these ranges is cut; an empty order if it is whole, None if these ranks do not cut it."""
    if len(set(keys)) == 1 and len(keys) > 1:
        # Parts of one stored tensor: the shares of all ranks of the first part come before those of the second.
        total = sum(held for held, _, _ in ranges) * size
        expected, at = [], 0
        for held, _, _ in ranges:
            expected.append((held, total, at + place * held))
            at += held * size
        whole = size == 1
    else:
        expected = [(held, held * size, place * held) for held, _, _ in ranges]
        whole = all(held == everything for held, everything, _ in ranges)
    if whole:
        return "", ()
    if ranges != expected:
        return None
    sizes = tuple(held for held, _, _ in ranges)
    if len(sizes) == 1:
        return "contiguous", ()
    return ("gated", ()) if len(sizes) == 2 and sizes[0] == sizes[1] else ("packed", sizes)
