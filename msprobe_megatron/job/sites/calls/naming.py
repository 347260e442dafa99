"""Names of API calls, and which of them a preset leaves out.

    core    what computes: products, attention, softmax, norms, activations, losses, embeddings, reductions,
            and every `autograd.Function` (Megatron's mappings and fused kernels)
    focus   everything with a tensor in and a tensor out, except what only moves, shapes or copies (the default)
    all     that too

No preset has calls without a tensor among their arguments, calls that give none (`size`, `item`) or one without values
(`empty_like`), properties (`shape`, `dtype`), or calls made inside another recorded call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

PRESETS = ("core", "focus", "all")

_CORE = re.compile(
    r"linear|matmul|(^|_|\.)(b?mm|baddbmm|addmm|dot|mv|einsum)$|conv|attention|softmax|sigmoid|norm|gelu|silu|relu|glu"
    r"|swish|tanh|softplus|loss|cross_entropy|embedding|dropout|cumsum|logsumexp|topk"
    r"|(^|\.)(exp|log|sum|mean|var|std|pow|rsqrt|sqrt|max|min|amax|amin|erf|sin|cos)_?$"
)
# What gives back numbers that it was given.
_MOVES = frozenset(
    """
    view reshape view_as reshape_as transpose permute t swapaxes movedim moveaxis contiguous clone detach detach_ to
    type type_as float half bfloat16 double int long bool byte cpu cuda expand expand_as repeat repeat_interleave
    unsqueeze unsqueeze_ squeeze squeeze_ split tensor_split chunk unbind narrow select getitem setitem cat concat
    stack flatten unflatten unfold as_strided index_select gather roll flip tile pad copy_ zero_ fill_ zeros_like
    ones_like full_like rand_like randn_like new_zeros new_ones new_full new_tensor
    share_memory_ pin_memory record_stream broadcast_to broadcast_tensors ravel hsplit vsplit dsplit alias
    view_as_real view_as_complex real imag data resize_ set_ masked_select
    """.split()  # noqa: SIM905
)
# No result of theirs is a tensor worth a row; they are called all the time.
_SILENT = frozenset(
    """
    size dim stride numel nelement storage_offset element_size is_contiguous is_floating_point is_complex is_signed
    is_inference is_conj is_neg is_set_to is_same_size is_pinned is_shared is_storage untyped_storage storage
    data_ptr get_device type_ item tolist numpy __len__ __hash__ __repr__ __format__ __bool__ __int__ __float__
    __index__ register_hook register_post_accumulate_grad_hook has_names ndimension dtype __reduce_ex__
    __deepcopy__ __contains__ __iter__ __dir__ _is_view is_nonzero is_tensor result_type can_cast promote_types
    equal allclose requires_grad_ retain_grad empty_like new_empty new_empty_strided
    """.split()  # noqa: SIM905
)
# Their work is that of others: recomputed modules switch the mode on again for themselves.
_PASSAGES = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})


def name_of(function: Callable[..., Any], preset: str) -> str | None:
    """Name of a call under its documented path; None if the preset leaves it out.

    Example::

        >>> name_of(torch.nn.functional.silu, "core")
        'torch.nn.functional.silu'
    """
    short = getattr(function, "__name__", "")
    if short in ("__get__", "__set__", "__delete__") or short in _SILENT:
        return None
    name = torch.overrides.resolve_name(function) or _own_name(function)
    # Communication has a site of its own, which knows that a buffer to receive into holds nothing yet.
    if name in _PASSAGES or name.startswith("torch.distributed."):
        return None
    bare = short.strip("_") if short.startswith("__") else short
    if preset == "core" and _CORE.search(bare) is None:
        return None
    if preset == "focus" and (short in _MOVES or bare in _MOVES):
        return None
    return name


def _own_name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None) or "torch"
    return f"{module}.{getattr(function, '__qualname__', getattr(function, '__name__', repr(function)))}"


class Names(dict[Any, str | None]):
    """Names of functions, each asked for once; None for those that are left out.

    Example::

        names = Names(lambda function: name_of(function, "focus"))
        names[torch.softmax]       # 'torch.softmax'
    """

    def __init__(self, ask: Callable[[Any], str | None]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, function: Any) -> str | None:
        """Called by a look-up that finds nothing."""
        found = self[function] = self._ask(function)
        return found
