"""How intermediate tensors of Megatron's modules are sharded over ranks.

`activations` covers inputs and outputs of modules; this module covers the tensors between them, such as biases being
added, heads after rotary embedding, attention scores. Their dimensions are derived from the sizes that the module was
built with, in the shorthand of `activations`, never from values; if the sizes are ambiguous or unknown, the result is
None. Used by perturb, so that an element gets the same noise however the model is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msprobe_megatron.topology.index_map import Numbering, index_map
from msprobe_megatron.topology.names import NamedModule
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec
from msprobe_megatron.topology.shards_of.activations import ChunkLayout, activation_spec, spec_of_words

AxisLookup = Callable[[str], int]
_MATRIX, _TOKENS, _HEADS, _BATCHES = 2, 3, 4, 3


def inner_numbering(
    entry: NamedModule,
    shape: Sequence[int],
    layout: ChunkLayout,
    rank: AxisLookup,
    size: AxisLookup,
    *,
    factor: str = "",
) -> Numbering | None:
    """Global indices of the elements of a tensor of local ``shape`` that ``entry`` computes with; None if unknown.

    ``factor`` marks the first factor of a product, in "forward" or "backward": for a linear layer, that is its input or
    the gradient of its output, and not its output.
    """
    kinds = {cls.__name__ for cls in type(entry.module).__mro__}
    if "DotProductAttention" in kinds and len(shape) == _BATCHES:
        return _of_heads_in_batches(entry.module, shape, layout, rank, size)
    if any(kind.endswith(("ColumnParallelLinear", "RowParallelLinear")) for kind in kinds):
        spec = _of_linear(entry, kinds, shape, layout, factor)
    else:
        words = _words(entry, kinds, shape, size)
        spec = None if words is None else spec_of_words(words, layout)
    return None if spec is None else index_map(spec.only(lambda axis: size(axis) > 1), tuple(shape), rank, size)


def _of_linear(
    entry: NamedModule, kinds: set[str], shape: Sequence[int], layout: ChunkLayout, factor: str
) -> ShardSpec | None:
    module, last = entry.module, shape[-1] if shape else 0
    column = any(kind.endswith("ColumnParallelLinear") for kind in kinds)
    outputs = getattr(module, "output_size_per_partition", None) or getattr(module, "output_size", None)
    side = getattr(module, "input_size", None) if factor == "forward" else outputs
    if len(shape) == _MATRIX and factor != "forward" and shape[-1 if not factor else 0] == side:
        # The gradient of the output as a matrix of all positions and samples; transposed where it is a factor.
        columns = activation_spec(entry, "output", "0", _TOKENS, layout).dims[-1:]
        tokens = (Dim("s*b", (Cut("cp", layout.cp_order),)),)
        return ShardSpec((*columns, *tokens) if factor else (*tokens, *columns)) if columns else None
    if last != side or len(shape) != _TOKENS:
        return None
    if factor == ("forward" if column else "backward") and layout.sequence_parallel:
        return spec_of_words("s b h", layout)  # after the all-gather
    return None if factor == "forward" else activation_spec(entry, "output", "0", len(shape), layout)


def _words(entry: NamedModule, kinds: set[str], shape: Sequence[int], size: AxisLookup) -> str | None:
    module, last = entry.module, shape[-1] if shape else 0
    if "Attention" in kinds:
        return _of_heads(module, shape, size)
    if len(shape) != _TOKENS:
        return None
    if "MLP" in kinds and ".experts." not in entry.name:
        return _of_mlp(module, last)
    if "GPTModel" in kinds:
        vocabulary = getattr(getattr(module, "output_layer", None), "output_size_per_partition", None)
        return "s b v/tp" if last == vocabulary else None
    if last != getattr(getattr(module, "config", None), "hidden_size", None):
        return None
    return "S b h" if "TransformerLayer" in kinds else "b s h" if "LanguageModelEmbedding" in kinds else None


def _of_mlp(module: Any, last: int) -> str | None:
    """Input of the activation function, gate and value side by side, and its output."""
    first = getattr(getattr(module, "linear_fc1", None), "output_size_per_partition", None)
    second = getattr(getattr(module, "linear_fc2", None), "input_size_per_partition", None)
    if last == second:
        return "s b f/tp"
    return "s b f/tp:gated" if last == first else None


def _of_heads(module: Any, shape: Sequence[int], size: AxisLookup) -> str | None:
    """Queries, keys and values: positions, samples, heads of this rank, head dimension."""
    queries = getattr(module, "num_attention_heads_per_partition", None)
    groups = getattr(module, "num_query_groups_per_partition", None)
    if len(shape) != _HEADS or shape[2] not in (queries, groups):
        return None
    whole = getattr(getattr(module, "config", None), "num_query_groups", None)
    # Fewer groups than ranks: some ranks share one.
    if shape[2] == groups and groups != queries and (whole is None or groups * size("tp") != whole):
        return None
    # The rotary table has one row per position, for all samples and heads.
    return None if shape[1] == shape[2] == 1 else "s b n/tp d"


def _of_heads_in_batches(
    module: Any, shape: Sequence[int], layout: ChunkLayout, rank: AxisLookup, size: AxisLookup
) -> Numbering | None:
    """Attention scores as batched matrix products have them: samples and heads in one dimension, heads sharded."""
    heads = getattr(module, "num_attention_heads_per_partition", None)
    if not heads or shape[0] % heads:
        return None
    spec = spec_of_words("b n/tp s k", layout).only(lambda axis: size(axis) > 1)
    found = index_map(spec, (shape[0] // heads, heads, *shape[1:]), rank, size)
    if found is None:
        return None
    (over, _), (step, held), *rest = found
    merged = tuple(
        (sample * heads + first, count, sample * over + offset)
        for sample in range(shape[0] // heads)
        for first, count, offset in held
    )
    return ((step, merged), *rest)
