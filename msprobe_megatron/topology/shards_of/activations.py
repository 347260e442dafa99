"""Shard specs of the inputs and outputs of Megatron's own modules.

Two tables say which dimensions a tensor has; a new module is one more line. Dimensions are written in a shorthand:

    s    sequence, cut over CP (zig-zag)             S     the same, and over TP where sequence parallel holds
    b    batch, other samples on other DP ranks      S*b   tokens, sequence outermost
    n/tp heads cut over TP                           x     tokens sent to experts: no fixed order
    k, h, d, v, e, 1                                 whole

A tensor whose number of dimensions does not fit, or whose module is not listed, is `unmergeable` with the reason; it
is never guessed from values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from msprobe_megatron.topology import legacy_modules
from msprobe_megatron.topology.blind_spots import context_parallel_order
from msprobe_megatron.topology.host import megatron_arguments
from msprobe_megatron.topology.names import NamedModule, unwrap
from msprobe_megatron.topology.shards import Cut, Dim, ShardSpec

_HIDDEN = "S b h"
_MASK = "1 1 s k"
_IDS = "b s"
_ROTARY = "s 1 1 d"
_TRANSFORMER = {
    "hidden_states": _HIDDEN,
    "attention_mask": _MASK,
    "rotary_pos_emb": _ROTARY,
    "rotary_pos_emb.0": _ROTARY,
    "rotary_pos_emb.1": _ROTARY,
}

# class name -> io -> path -> dimensions. Path "" is a bare tensor; "*" is any path. For a tuple output the
# path is the index. Subclasses are found through their MRO.
_BY_CLASS: dict[str, dict[str, dict[str, str]]] = {
    "GPTModel": {
        "input": {
            "input_ids": _IDS,
            "position_ids": _IDS,
            "labels": _IDS,
            "loss_mask": _IDS,
            "attention_mask": _MASK,
            "decoder_input": _HIDDEN,
        },
        "output": {"": "b s | b s v/tp"},
    },
    "LanguageModelEmbedding": {"input": {"*": _IDS}, "output": {"": _HIDDEN}},
    "RotaryEmbedding": {"output": {"": _ROTARY}},
    "TransformerBlock": {"input": _TRANSFORMER, "output": {"": _HIDDEN}},
    "TransformerLayer": {"input": _TRANSFORMER, "output": {"0": _HIDDEN, "": _HIDDEN}},
    "Attention": {"input": _TRANSFORMER, "output": {"0": _HIDDEN}},
    "DotProductAttention": {
        "input": {"query": "s b n/tp d", "key": "s b n/tp d", "value": "s b n/tp d", "attention_mask": _MASK},
        "output": {"": "s b h/tp"},
    },
    "FusedScaleMaskSoftmax": {"input": {"input": "b n/tp s k", "mask": _MASK}, "output": {"": "b n/tp s k"}},
    "MLP": {"input": {"hidden_states": _HIDDEN}, "output": {"0": _HIDDEN}},
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
    **legacy_modules.BY_CLASS,
}

# (class of the parent, attribute) -> io -> dimensions of every tensor: modules of torch, whose class says nothing.
_BY_PLACE: dict[tuple[str, str], dict[str, str]] = {
    ("LanguageModelEmbedding", "position_embeddings"): {"input": _IDS, "output": "b s h"},
    ("LanguageModelEmbedding", "tokentype_embeddings"): {"input": _IDS, "output": "b s h"},
    ("LanguageModelEmbedding", "embedding_dropout"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "input_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "pre_mlp_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerLayer", "pre_cross_attn_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("TransformerBlock", "final_layernorm"): {"input": _HIDDEN, "output": _HIDDEN},
    ("Attention", "q_layernorm"): {"input": "s b n/tp d", "output": "s b n/tp d"},
    ("Attention", "k_layernorm"): {"input": "s b n/tp d", "output": "s b n/tp d"},
    ("DotProductAttention", "attention_dropout"): {"input": "b n/tp s k", "output": "b n/tp s k"},
    **legacy_modules.BY_PLACE,
}
_CONTAINERS = frozenset({"TransformerBlock", *legacy_modules.CONTAINERS})


@dataclass(frozen=True)
class ChunkLayout:
    """What the specs of a model chunk depend on: sequence parallel, and which ends of the model it holds."""

    sequence_parallel: bool = False
    pre_process: bool = True
    post_process: bool = True
    cp_order: str = "zigzag"

    @classmethod
    def of(cls, chunk: nn.Module) -> ChunkLayout:
        """Read it from a (wrapped) model chunk; a model that is not Megatron's is whole."""
        model = unwrap(chunk)
        config = getattr(model, "config", None)
        return cls(
            sequence_parallel=bool(getattr(config, "sequence_parallel", False)),
            pre_process=bool(getattr(model, "pre_process", True)),
            post_process=bool(getattr(model, "post_process", True)),
            cp_order=context_parallel_order(megatron_arguments()),
        )


def at_stage_boundary(entry: NamedModule, io: str, path: str, layout: ChunkLayout) -> bool:
    """Whether a tensor of a container exists only because the pipeline is cut here.

    The model and its block end at the last layer of the stage; that layer's own row holds the tensor already,
    and a run with PP=1 has no such tensor under the container's name.
    """
    if entry.parent is not None and not _CONTAINERS.intersection(_kinds(entry.module)):
        return False
    if io == "output":
        return not layout.post_process
    return path == "hidden_states" and not layout.pre_process


def activation_spec(
    entry: NamedModule, io: str, path: str, ndim: int, layout: ChunkLayout, *, gradient: bool = False
) -> ShardSpec:
    """Spec of one input or output tensor of a module, or of its gradient.

    Example: the output of ``linear_qkv`` gives ``s[cp:zigzag] b[dp:samples] h[tp]``.
    """
    texts = _linear(entry, io, path) or _listed(entry, io, path)
    if texts is None:
        return ShardSpec.unmergeable(f"{type(entry.module).__name__} is not a module whose layout is known")
    for text in texts.split(" | "):
        words = text.split()
        if len(words) == ndim:
            partial = ("etp",) if _not_yet_reduced(entry, io, path, gradient) else ()
            return ShardSpec(tuple(_dim(word, layout) for word in words), partial=partial)
    return ShardSpec.unmergeable(f"{ndim} dimensions where '{texts}' was expected")


def spec_of_words(text: str, layout: ChunkLayout) -> ShardSpec:
    """Spec of dimensions in the shorthand of this module.

    Example: ``spec_of_words("S b h", ChunkLayout.of(chunk))``.
    """
    return ShardSpec(tuple(_dim(word, layout) for word in text.split()))


def _kinds(module: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _packaged(module: nn.Module) -> list[str]:
    """Its classes under their package's name: some have a namesake of another layout in Megatron."""
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
    """Column, row and vocabulary parallel layers: what is cut depends on how the layer was built."""
    kinds, module = _kinds(entry.module), entry.module
    column = any(kind.endswith("ColumnParallelLinear") for kind in kinds)
    row = any(kind.endswith("RowParallelLinear") for kind in kinds)
    if io == "output" and path not in ("", "0"):
        return None
    if "VocabParallelEmbedding" in kinds:
        scattered = getattr(module, "reduce_scatter_embeddings", False)
        return _IDS if io == "input" else _HIDDEN if scattered else "b s h"
    if not column and not row:
        return None
    text = (_COLUMN if column else _ROW)[_inside_experts(entry)][io == "output"]
    if column and io == "output":
        if getattr(module, "gather_output", False):
            return text.partition("/")[0]
        return f"{text}:gated" if _gated(entry) else text
    return text


def _gated(entry: NamedModule) -> bool:
    config = getattr(entry.parent, "config", None)
    return entry.attribute in ("linear_fc1", legacy_modules.GATED) and bool(getattr(config, "gated_linear_unit", False))


def _inside_experts(entry: NamedModule) -> bool:
    return ".local_experts." in entry.name


def _not_yet_reduced(entry: NamedModule, io: str, path: str, gradient: bool) -> bool:
    """Whether ranks of one expert hold summands: its layers leave the reduction to the token dispatcher.

    What comes out of fc2, and on the way back what comes out of fc1, is summed up outside the experts.
    """
    kinds = _kinds(entry.module)
    if not _inside_experts(entry) and "SequentialMLP" not in kinds:
        return False
    if path == "tokens_per_expert":
        return False
    if gradient:
        return io == "input" and entry.attribute != "linear_fc2"
    return io == "output" and entry.attribute != "linear_fc1"


def _expert(io: str, path: str) -> str | None:
    if io == "input":
        return {"hidden_states": "x h", "per_token_scale": "x"}.get(path)
    return {"0": "x h"}.get(path)


def _dim(word: str, layout: ChunkLayout) -> Dim:
    name, _, cut = word.partition("/")
    if name in ("S", "s", "S*b"):
        cuts = [Cut("cp", layout.cp_order)]
        if name != "s" and layout.sequence_parallel:
            cuts.append(Cut("tp"))
        if name == "S*b":
            cuts.append(Cut("dp", "samples"))
        return Dim("s" if name != "S*b" else "s*b", tuple(cuts))
    if name == "b":
        return Dim("b", (Cut("dp", "samples"),))
    if name == "x":
        return Dim("x", (Cut(cut or "dp", "unordered" if cut else "samples"),))
    if cut:
        axis, _, order = cut.partition(":")
        return Dim(name, (Cut(axis, order or "contiguous"),))
    return Dim(name)
