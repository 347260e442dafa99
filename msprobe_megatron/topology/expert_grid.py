"""Where a rank stands in the grid of the experts, told from the experts that were built.

The accessors of a release do not always tell. Before 0.10 there is none for the cut of an expert over ranks;
`moe_extended_tp` (0.7 to 0.9) cuts every expert over the expert parallel ranks as well, and MindSpeed's
`moe_tp_extend_ep` spreads whole experts over the tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from msprobe_megatron.topology.coordinates import Coordinates

# Options of the job that decide for stages without an expert of their own: the tensor parallel ranks cut experts
# together with the expert parallel ones, or hold experts of their own.
_CUT_BY_ALL, _SPREAD_OVER_ALL = "moe_extended_tp", "moe_tp_extend_ep"


def placed(where: Coordinates, chunks: Sequence[nn.Module]) -> Coordinates:
    """`where` with the axes `ep` and `etp` as the experts of `chunks` have them; unchanged if nothing contradicts it.

    `where` is what the accessors of Megatron say. The ranks that share the experts of a layer are the same in every
    way of sharing them: `etp` times `ep` of them.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if _holds_experts(module)]
    ranks = where.etp_size * where.ep_size
    spread = _spread(layers[0]) if layers else _declared_spread(chunks, where)
    if spread is None or ranks % spread:
        return where
    cut = _cut(layer.modules() for layer in layers)
    if cut is None:
        cut = ranks // spread
    together = where.ep * where.etp_size + where.etp
    if spread == where.ep_size and cut == where.etp_size:
        return where
    if spread * cut == ranks:
        return replace(where, ep=together // cut, ep_size=spread, etp=together % cut, etp_size=cut)
    if cut == 1 and spread == where.ep_size:
        # Whole on every tensor parallel rank.
        return replace(where, etp=0, etp_size=1)
    return where


def first_expert(experts: nn.Module, where: Coordinates) -> int:
    """Global number of the first of the local experts."""
    local, spread = int(getattr(experts, "num_local_experts", 0) or 0), _spread(experts)
    ranks = where.etp_size * where.ep_size
    if spread is None or spread == where.ep_size or ranks % spread:
        return where.ep * local
    return (where.ep * where.etp_size + where.etp) // (ranks // spread) * local


def _holds_experts(module: nn.Module) -> bool:
    return _spread(module) is not None


def _spread(module: nn.Module) -> int | None:
    """Over how many ranks the experts of a layer are spread; None of a module that has none."""
    local = getattr(module, "num_local_experts", None)
    every = getattr(getattr(module, "config", None), "num_moe_experts", None)
    if not isinstance(local, int) or not isinstance(every, int) or local < 1 or every % local:
        return None
    return every // local


def _declared_spread(chunks: Sequence[nn.Module], where: Coordinates) -> int | None:
    configs = [config for chunk in chunks for config in _configs(chunk)]
    if any(getattr(config, _CUT_BY_ALL, False) is True for config in configs):
        return 1
    if any(getattr(config, _SPREAD_OVER_ALL, False) is True for config in configs):
        return where.ep_size * where.etp_size
    return None


def _configs(chunk: nn.Module) -> Iterable[Any]:
    for module in chunk.modules():
        config = getattr(module, "config", None)
        if config is not None:
            return [config]
    return []


def _cut(groups: Iterable[Iterable[nn.Module]]) -> int | None:
    """Over how many ranks one expert is cut, where its layers say how wide they are in whole and here."""
    for modules in groups:
        for module in modules:
            if not getattr(module, "is_expert", False):
                continue
            for side in ("output_size", "input_size"):
                whole, part = getattr(module, side, None), getattr(module, f"{side}_per_partition", None)
                if isinstance(whole, int) and isinstance(part, int) and part > 0 and whole % part == 0:
                    return whole // part
    return None
