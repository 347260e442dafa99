"""Shard specs of the inputs and outputs of Megatron's own modules.

Two tables list the dimensions of each tensor; a new module is one more line. Dimensions are written in a shorthand:

    s    sequence, cut over CP (zig-zag)             S     the same, and over TP where sequence parallel holds
    b    batch, other samples on other DP ranks      S*b   tokens, sequence outermost
    n/tp heads cut over TP                           x     tokens sent to experts: no fixed order
    t    positions, samples and heads of TP in one dimension
    g    heads of keys and values, cut over TP or shared by neighbours where they are fewer than its ranks
    M    the sequence once for the model and once for each layer of multi-token prediction, one after the other
    k, h, d, v, e, r, 1                              whole

A norm over the hidden size has the layout of the hidden states wherever it stands. A tensor whose number of dimensions
does not fit, or whose module is not listed, is `unmergeable` with the reason; it is never guessed from values.
`compare` derives its layout from both runs (analysis/compare/call_layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from msprobe_megatron.topology.host.blind_spots import context_parallel_order
from msprobe_megatron.topology.host.framework import megatron_arguments
from msprobe_megatron.topology.names import NamedModule, unwrap
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec
from msprobe_megatron.topology.shards_of import legacy
from msprobe_megatron.topology.shards_of.declared import output_cut

_HIDDEN = "S b h"
_MASK = "1 1 s k"
_IDS = "b s"
_ROTARY = "s 1 1 d"
_BIAS = "h"  # of a row-parallel layer, left to whoever adds the residual
_KEYS = "s b g d"
_TRANSFORMER = {
    "hidden_states": _HIDDEN,
    "attention_mask": _MASK,
    "rotary_pos_emb": _ROTARY,
    "rotary_pos_emb.0": _ROTARY,
    "rotary_pos_emb.1": _ROTARY,
    "context": _HIDDEN,
    "context_mask": _MASK,
}

_LANGUAGE_MODEL = {
    "input": {
        "input_ids": _IDS,
        "position_ids": _IDS,
        "labels": _IDS,
        "loss_mask": _IDS,
        "attention_mask": _MASK,
        "decoder_input": _HIDDEN,
    },
    "output": {"": "b s | b s v/tp"},
}
_MIXER = {"input": _TRANSFORMER, "output": {"0": _HIDDEN, "": _HIDDEN}}

# class name -> io -> path -> dimensions. Path "" is a bare tensor; "*" is any path. For a tuple output the
# path is the index. Subclasses are found through their MRO.
_BY_CLASS: dict[str, dict[str, dict[str, str]]] = {
    "GPTModel": _LANGUAGE_MODEL,
    "MambaModel": _LANGUAGE_MODEL,
    "HybridModel": _LANGUAGE_MODEL,
    "LanguageModelEmbedding": {"input": {"*": _IDS}, "output": {"": _HIDDEN}},
    "RotaryEmbedding": {"output": {"": _ROTARY, "0": _ROTARY}},
    "TransformerBlock": {"input": _TRANSFORMER, "output": {"": _HIDDEN}},
    "TransformerLayer": {"input": _TRANSFORMER, "output": {"0": _HIDDEN, "": _HIDDEN}},
    "Attention": {"input": {**_TRANSFORMER, "key_value_states": _HIDDEN}, "output": {"0": _HIDDEN, "1": _BIAS}},
    "MambaStack": _MIXER,
    "HybridStack": _MIXER,
    "MambaLayer": _MIXER,
    "MambaMixer": _MIXER,
    "ExtendedRMSNorm": {"input": {"*": "s b h/tp"}, "output": {"": "s b h/tp"}},
    "GatedDeltaNet": _MIXER,
    "DotProductAttention": {
        "input": {"query": "s b n/tp d", "key": _KEYS, "value": _KEYS, "attention_mask": _MASK},
        "output": {"": "s b h/tp"},
    },
    "MultiTokenPredictionLayer": {
        "input": {"input_ids": _IDS, "position_ids": _IDS, **_TRANSFORMER},
        "output": {"0": _HIDDEN, "1": _IDS, "2": _IDS},
    },
    "MultiTokenPredictionBlock": {
        "input": {"input_ids": _IDS, "position_ids": _IDS, **_TRANSFORMER},
        "output": {"": "M b h"},
    },
    "FusedScaleMaskSoftmax": {"input": {"input": "b n/tp s k", "mask": _MASK}, "output": {"": "b n/tp s k"}},
    "MLP": {"input": {"hidden_states": _HIDDEN}, "output": {"0": _HIDDEN, "1": _BIAS}},
    "MoELayer": {"input": {"hidden_states": _HIDDEN}, "output": {"0": _HIDDEN}},
    "SharedExpertMLP": {"input": {"hidden_states": _HIDDEN}, "output": {"": _HIDDEN}},
    "TopKRouter": {"input": {"input": _HIDDEN}, "output": {"0": "S*b e", "1": "S*b e"}},
    "SequentialMLP": {
        "input": {
            "permuted_local_hidden_states": "x/ep h",
            "permuted_probs": "x/ep",
            "tokens_per_expert": "e/ep",
        },
        "output": {"0": "x/ep h"},
    },
    **legacy.BY_CLASS,
}

# (class of the parent, attribute) -> io -> dimensions of every tensor: torch modules, whose class does not tell them.
_BY_PLACE: dict[tuple[str, str], dict[str, str]] = {
    ("LanguageModelEmbedding", "position_embeddings"): {"input": _IDS, "output": "b s h"},
    ("LanguageModelEmbedding", "tokentype_embeddings"): {"input": _IDS, "output": "b s h"},
    ("LanguageModelEmbedding", "embedding_dropout"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "input_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "pre_mlp_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "pre_cross_attn_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerBlock", "final_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("MultiLatentAttention", "q_layernorm"): {"input": "S b r", "output": "S b r"},
    ("MultiLatentAttention", "kv_layernorm"): {"input": "S b r", "output": "S b r"},
    ("Attention", "q_layernorm"): {"input": "s b n/tp d", "output": "s b n/tp d"},
    ("Attention", "k_layernorm"): {"input": _KEYS, "output": _KEYS},
    ("GatedDeltaNet", "conv1d"): {"input": "b c/tp:unordered s", "output": "b c/tp:unordered s"},
    ("GatedDeltaNet", "out_norm"): {"input": "t d", "output": "t d"},
    ("DotProductAttention", "attention_dropout"): {"input": "b n/tp s k", "output": "b n/tp s k"},
    **legacy.BY_PLACE,
}
_CONTAINERS = frozenset({"TransformerBlock", "MambaStack", "HybridStack", *legacy.CONTAINERS})


@dataclass(frozen=True)
class ChunkLayout:
    """Properties of a model chunk that its specs depend on: sequence parallel, and which ends of the model it holds."""

    sequence_parallel: bool = False
    pre_process: bool = True
    post_process: bool = True
    cp_order: str = "zigzag"
    shared_groups: int = 0
    """Number of query groups where the ranks of TP outnumber them; else 0."""
    predictions: int = 0
    """Number of layers of multi-token prediction."""

    @classmethod
    def of(cls, chunk: nn.Module) -> ChunkLayout:
        """Read from a (wrapped) model chunk; a model that is not Megatron's counts as whole."""
        model = unwrap(chunk)
        config = getattr(model, "config", None)
        groups, ranks = (_number(config, name) for name in ("num_query_groups", "tensor_model_parallel_size"))
        return cls(
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
            pre_process=bool(getattr(model, "pre_process", True)),
            post_process=bool(getattr(model, "post_process", True)),
            cp_order=context_parallel_order(megatron_arguments()),
            shared_groups=groups if groups < ranks else 0,
            predictions=_number(config, "mtp_num_layers"),
        )


def _number(config: object, name: str) -> int:
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def at_stage_boundary(entry: NamedModule, io: str, path: str, layout: ChunkLayout) -> bool:
    """Whether a tensor of a container exists only because a pipeline stage ends here.

    The model and its block end at the last layer of the stage. The row of that layer already holds the tensor, and a
    run with PP=1 has no such tensor under the name of the container.
    """
    if entry.parent is not None and not _CONTAINERS.intersection(_kinds(entry.module)):
        return False
    if io == "output":
        return not layout.post_process
    return path == "hidden_states" and not layout.pre_process


def calls_before(entry: NamedModule, layout: ChunkLayout) -> int:
    """Number of calls of a module, within one pass of the model, that another pipeline stage makes.

    Multi-token prediction embeds the tokens again: with PP=1 those are the second and later calls of the embedding, and
    on the last stage of a pipeline the only ones of its copy.
    """
    again = layout.predictions > 0 and not layout.pre_process
    return int(again and entry.name.partition(".")[0] == "embedding")


def activation_spec(
    entry: NamedModule, io: str, path: str, ndim: int, layout: ChunkLayout, *, gradient: bool = False
) -> ShardSpec:
    """Spec of one input or output tensor of a module, or of its gradient."""
    texts = _linear(entry, io, path) or _listed(entry, io, path) or _norm(entry, path)
    if texts is None:
        kind, place = type(entry.module).__name__, f"{io} {path}".strip()
        return ShardSpec.unmergeable(f"the layout of {kind} {place} is not known")
    for text in texts.split(" | "):
        words = text.split()
        if len(words) == ndim:
            partial = ("etp",) if _not_yet_reduced(entry, io, path, gradient) else ()
            if gradient and layout.shared_groups and "g" in words:
                partial = ("tp",)  # each rank's queries add to the gradient of the group that they share
            dims = tuple(_dim(word, layout) for word in words)
            if (packed := _packed(entry, io)) is not None:
                dims = (*dims[:-1], Dim(dims[-1].name, (packed,)))
            return ShardSpec(dims, partial=partial)
    return ShardSpec.unmergeable(f"{ndim} dimensions where '{texts}' was expected")


def spec_of_words(text: str, layout: ChunkLayout) -> ShardSpec:
    """Spec of dimensions in the shorthand of this module."""
    return ShardSpec(tuple(_dim(word, layout) for word in text.split()))


def _kinds(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _packaged(module: nn.Module) -> list[str]:
    """Class names qualified by package: some share their name with a Megatron class of another layout."""
    return [f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(module).__mro__]


def _listed(entry: NamedModule, io: str, path: str) -> str | None:
    if entry.parent is not None:
        for kind in _kinds(entry.parent):
            by_io = _BY_PLACE.get((kind, entry.attribute))
            if by_io is not None:
                return by_io.get(io)
    if _inside_experts(entry):
        return _expert(io, path)
    for kind in (*_packaged(entry.module), *_kinds(entry.module)):
        paths = _BY_CLASS.get(kind, {}).get(io)
        if paths is not None:
            return paths.get(path, paths.get("*"))
    return None


# kind of linear layer -> (input, output); the second pair is for the experts' layers, whose tokens have no fixed order.
_COLUMN = ((_HIDDEN, "s b f/tp"), ("x h", "x f/etp"))
_ROW = (("s b f/tp", _HIDDEN), ("x f/etp", "x h"))


def _linear(entry: NamedModule, io: str, path: str) -> str | None:
    """Column, row and vocabulary parallel layers, whose sharding depends on how the layer was built."""
    kinds, module = _kinds(entry.module), entry.module
    column = any(kind.endswith("ColumnParallelLinear") for kind in kinds)
    row = any(kind.endswith("RowParallelLinear") for kind in kinds)
    if io == "output" and path not in ("", "0", "1"):
        return None
    if "VocabParallelEmbedding" in kinds:
        scattered = getattr(module, "reduce_scatter_embeddings", False)
        return _IDS if io == "input" else _HIDDEN if scattered else "b s h"
    if not column and not row:
        return None
    text = (_COLUMN if column else _ROW)[_inside_experts(entry)][io == "output"]
    bias = io == "output" and path == "1"
    if bias:
        text = text.split()[-1]
    if column and io == "output":
        if getattr(module, "gather_output", False) and not bias:
            return text.partition("/")[0]
        return f"{text}:gated" if _gated(entry) else text
    return text


def _packed(entry: NamedModule, io: str) -> Cut | None:
    """The cut of the last dimension of a column-parallel layer that computes several tensors at once."""
    module = entry.module
    if io != "output" or getattr(module, "gather_output", False):
        return None
    column = any(kind.endswith("ColumnParallelLinear") for kind in _kinds(module))
    return output_cut(getattr(module, "weight", None)) if column else None


def _norm(entry: NamedModule, path: str) -> str | None:
    """A norm over the hidden size that no table lists."""
    if not type(entry.module).__name__.endswith("Norm") or path not in ("", "0", "x", "input", "hidden_states"):
        return None
    weight = getattr(entry.module, "weight", None)
    hidden = _number(getattr(entry.parent, "config", None), "hidden_size")
    return _HIDDEN if hidden and tuple(getattr(weight, "shape", ())) == (hidden,) else None


def _gated(entry: NamedModule) -> bool:
    config = getattr(entry.parent, "config", None)
    return entry.attribute in ("linear_fc1", legacy.GATED) and bool(getattr(config, "gated_linear_unit", False))


def _inside_experts(entry: NamedModule) -> bool:
    return ".local_experts." in entry.name


def _not_yet_reduced(entry: NamedModule, io: str, path: str, gradient: bool) -> bool:
    """Whether ranks of one expert hold summands: its layers leave the reduction to the token dispatcher.

    The output of fc2, and in the backward pass that of fc1, is summed outside the experts.
    """
    kinds = _kinds(entry.module)
    if not _inside_experts(entry) and "SequentialMLP" not in kinds:
        return False
    if path == "tokens_per_expert" or (io == "output" and path == "1"):
        return False
    if gradient:
        return io == "input" and entry.attribute != "linear_fc2"
    return io == "output" and entry.attribute != "linear_fc1"


def _expert(io: str, path: str) -> str | None:
    if io == "input":
        return {"hidden_states": "x h", "per_token_scale": "x"}.get(path)
    return {"0": "x h", "1": _BIAS}.get(path)


def _sequence(name: str, layout: ChunkLayout) -> Dim:
    over_cp, over_tp = Cut("cp", layout.cp_order), Cut("tp")
    if name == "M":
        pieces = (1,) * (1 + layout.predictions)
        over_cp = Cut("cp", "zigzag" if layout.cp_order == "zigzag" else "packed", pieces)
        over_tp = Cut("tp", "packed", pieces)
    cuts = [over_cp, over_tp] if name != "s" and layout.sequence_parallel else [over_cp]
    if name == "t":
        cuts = [Cut("cp", "unordered"), Cut("tp", "unordered")]
    if name in ("S*b", "t"):
        return Dim("s*b", (*cuts, Cut("dp", "samples")))
    return Dim("s", tuple(cuts))


def _dim(word: str, layout: ChunkLayout) -> Dim:
    name, _, cut = word.partition("/")
    if name in ("S", "s", "S*b", "M", "t"):
        return _sequence(name, layout)
    if name == "b":
        return Dim("b", (Cut("dp", "samples"),))
    if name == "g":
        shared = layout.shared_groups
        return Dim("n", (Cut("tp", "groups", (shared,)) if shared else Cut("tp"),))
    if name == "x":
        return Dim("x", (Cut(cut or "dp", "unordered" if cut else "samples"),))
    if cut:
        axis, _, order = cut.partition(":")
        return Dim(name, (Cut(axis, order or "contiguous"),))
    return Dim(name)
