"""Names of API calls: documented path of the function, running module and a number; and their call stacks.

`decoder.layers.1.mlp/torch.nn.functional.silu.0` is the first call of silu in one pass (phase and microbatch) of that
module, so the name means the same call in every parallel layout. Which functions are recorded depends on the preset:

    core    what computes: products, attention, softmax, norms, activations, losses, embeddings, reductions,
            and every `autograd.Function` (Megatron's mappings and fused kernels)
    focus   everything with a tensor in and a tensor out, except what only moves, shapes or copies (the default)
    all     that too

No preset has calls without a tensor among their arguments, calls that return none (`size`, `item`) or one without
values (`empty_like`), properties (`shape`, `dtype`), or calls made inside another recorded call.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from msprobe_megatron.job.clock import Clock, Moment
from msprobe_megatron.job.sites.calls import mode_stack
from msprobe_megatron.job.sites.calls.arguments import may_leave_unread
from msprobe_megatron.job.sites.module.hooks import HookedSite, ModuleHooks
from msprobe_megatron.topology import names
from msprobe_megatron.topology.shards import Place, ShardSpec

OUTSIDE = "outside"
"""Stands for the module in the name of a call that is made outside of all modules."""
Fault = Callable[[BaseException, str], None]

_CORE = re.compile(
    r"linear|matmul|(^|_|\.)(b?mm|baddbmm|addmm|dot|mv|einsum)$|conv|attention|softmax|sigmoid|norm|gelu|silu|relu|glu"
    r"|swish|tanh|softplus|loss|cross_entropy|embedding|dropout|cumsum|logsumexp|topk"
    r"|(^|\.)(exp|log|sum|mean|var|std|pow|rsqrt|sqrt|max|min|amax|amin|erf|sin|cos)_?$"
)
# Data movement: the values of the result are values of the input.
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
# Queries and bookkeeping: no result worth a row, and they are called all the time.
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
# Entry points of backward: recomputed modules inside switch the mode on again for themselves.
_BACKWARD = frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"})

_DEPTH = 24
_OMITTED = (
    "/torch/nn/modules/",
    "/torch/overrides.py",
    "/torch/nn/functional.py",
    "/torch/_tensor.py",
)
_PACKAGE = os.path.abspath(__file__).rsplit(os.sep, 4)[0]
_DEMO = os.path.join(_PACKAGE, "lab", "demo") + os.sep  # training code like any other


def name_of(function: Callable[..., Any], preset: str) -> str | None:
    """Documented path of a function; None if the preset leaves it out.

    Example::

        >>> name_of(torch.nn.functional.silu, "core")
        'torch.nn.functional.silu'
    """
    short = getattr(function, "__name__", "")
    if short in ("__get__", "__set__", "__delete__") or short in _SILENT:
        return None
    name = torch.overrides.resolve_name(function) or _own_name(function)
    # Communication has a site of its own, which knows that a receive buffer holds nothing yet.
    if name in _BACKWARD or name.startswith("torch.distributed."):
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
    """Cache of function names; None for functions that are left out.

    Example::

        >>> names = Names(lambda function: name_of(function, "focus"))
        >>> names[torch.softmax]
        'torch.softmax'
    """

    def __init__(self, resolve: Callable[[Any], str | None]) -> None:
        super().__init__()
        self._resolve = resolve

    def __missing__(self, function: Any) -> str | None:
        """Resolve a function that is looked up for the first time."""
        found = self[function] = self._resolve(function)
        return found


class Places(dict[str, Place]):
    """Places of the tensors of a call, of one kind and direction, by path; made when first needed."""

    __slots__ = ("_of",)

    def __init__(self, kind: str, name: str, io: str, op: str, chunk: int, site: int) -> None:
        super().__init__()
        self._of = (kind, name, io, op, chunk, site)

    def __missing__(self, path: str) -> Place:
        kind, name, io, op, chunk, site = self._of
        found = self[path] = Place(kind, name, io, path, op, chunk, site, _unknown_layout, _one)
        return found


class NumberedCall:
    """One numbered call of a module: the places of its inputs, its outputs and their gradients."""

    __slots__ = ("api", "input_gradients", "inputs", "output_gradients", "outputs", "partly_read", "site")

    def __init__(self, name: str, op: str, chunk: int, site: int) -> None:
        self.api, self.site, self.partly_read = op, site, may_leave_unread(op)
        self.inputs, self.outputs, self.input_gradients, self.output_gradients = (
            Places(kind, name, io, op, chunk, site) for kind in ("activation", "gradient") for io in ("input", "output")
        )


_UNKNOWN_LAYOUT = ShardSpec.unmergeable("API call")


def _unknown_layout(shape: tuple[int, ...]) -> ShardSpec:
    return _UNKNOWN_LAYOUT


def _one(axis: str) -> int:
    return 1


class Running(NamedTuple):
    """A module in one pass: name, chunk, phase, moment, and how often each API was called so far.

    The compiled hooks unpack exactly these five.
    """

    name: str
    chunk: int
    phase: str
    moment: Moment
    counts: dict[str, int]


class _Thread(threading.local):
    """The modules that one host thread is running. Threads are independent of each other."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.round = 0
        # Stack heights at which the mode was switched, and whether it was switched on.
        self.switched: list[tuple[int, bool]] = []


Follow = Callable[[Running, tuple[Any, ...]], Any]


class ModuleFrames(HookedSite):
    """Tracks which modules are running, per host thread, through forward hooks that exist while a step is recorded.

    `follow(running, args)` decides what is kept on the stack for a module that is entered: None means that its calls
    are not of interest, and `mode` is switched off for it. Without `follow` every module is of interest, and `mode`
    is switched on only where it is missing at the outermost module: `loss.backward()` is itself a call during which
    the mode is off, so a module that is recomputed inside needs it switched on.
    """

    def __init__(self, chunks: Sequence[nn.Module], clock: Clock, fault: Fault, follow: Follow | None = None) -> None:
        super().__init__()
        self._clock, self._fault, self._follow = clock, fault, follow
        # The hook after the forward also runs when the forward raises, or the stack would keep the module.
        self._hooks = {
            entry.name: ModuleHooks(entry.module, self._enter(entry.name, index), self._leave, always=True)
            for index, chunk in enumerate(chunks)
            for entry in names.modules(chunk)
        }
        self._passes: dict[tuple[str, str, Moment], dict[str, int]] = {}
        self.here = _Thread()
        self._round = 0
        self.mode: TorchFunctionMode | None = None

    @property
    def stack(self) -> list[Any]:
        """What this thread is running, innermost last: `Running`, or what `follow` returned for it."""
        return self._current().stack

    def install(self, watched: Collection[str] | None = None) -> None:
        """Set the hooks of the named modules, or of all; called at the beginning of a recorded step."""
        self.remove()
        self._round += 1
        self._passes.clear()
        self._active = True
        chosen = [hooks for name, hooks in self._hooks.items() if watched is None or name in watched]
        self._handles = [*chosen]
        for hooks in chosen:
            hooks.set()

    def remove(self) -> None:
        """Remove the hooks and forget which modules this thread is running. Safe to call twice."""
        super().remove()
        self.forget()

    def forget(self) -> None:
        """Empty the stack of this thread and undo what was done to the mode; other threads do so at their next use."""
        here = self.here
        here.stack.clear()
        if here.switched and self.mode is not None:
            was_on = not here.switched[0][1]
            mode_stack.take_out(self.mode)
            if was_on and self._active:
                mode_stack.push(self.mode)
        here.switched.clear()

    def outside(self, name: str) -> Running | None:
        """The context of a call outside of all modules; None inside backward, where nothing is recomputed."""
        phase, moment = self._clock.calling()
        return self.running(name, moment.chunk, phase, moment) if phase == "forward" else None

    def running(self, name: str, chunk: int, phase: str, moment: Moment) -> Running:
        """A module in a pass; the numbers of its calls go on from where the pass was left."""
        key = (name, phase, moment)
        counts = self._passes.get(key)
        if counts is None:
            counts = self._passes[key] = {}
        return Running(name, chunk, phase, moment, counts)

    def push(self, frame: Any) -> None:
        """Enter a frame (None: its calls are not of interest) and switch the mode accordingly."""
        here = self._current()
        stack, mode = here.stack, self.mode
        if mode is not None and (self._follow is not None or not stack):
            on = mode_stack.holds(mode)
            if on != (frame is not None):
                here.switched.append((len(stack), not on))
                if on:
                    mode_stack.take_out(mode)
                else:
                    mode_stack.push(mode)
        stack.append(frame)

    def pop(self) -> None:
        """Leave the innermost frame and switch the mode back."""
        here = self._current()
        if here.stack:
            here.stack.pop()
        if here.switched and len(here.stack) == here.switched[-1][0] and self.mode is not None:
            _, was_switched_on = here.switched.pop()
            if was_switched_on:
                mode_stack.take_out(self.mode)
            else:
                mode_stack.push(self.mode)

    def _current(self) -> _Thread:
        """State of the calling thread; what it left unfinished in an earlier step is dropped."""
        here = self.here
        if here.round != self._round:
            here.round = self._round
            if here.stack or here.switched:
                here.stack.clear()
                here.switched.clear()
                if self.mode is not None:
                    mode_stack.take_out(self.mode)
        return here

    def _enter(self, name: str, chunk: int) -> Callable[..., None]:
        # A hook that is removed while torch iterates over the hooks is still called, then without the kwargs.
        def hook(module: nn.Module, args: Any, kwargs: Any = None) -> None:
            if not self._active or (self._clock.away and self._clock.apart()):
                return
            try:
                phase, moment = self._clock.calling()
                running, here = self.running(name, chunk, phase, moment), self.here
                if follow is None and here.stack and here.round == self._round:
                    here.stack.append(running)  # as `push` does, for the usual case
                else:
                    self.push(running if follow is None else follow(running, args))
            except Exception as error:
                self._fault(error, f"call of {name}")

        follow = self._follow
        return hook

    def _leave(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        if not self._active or (self._clock.away and self._clock.apart()):
            return
        try:
            here = self.here
            if here.stack and not here.switched and here.round == self._round:
                here.stack.pop()  # as `pop` does, for the usual case
            else:
                self.pop()
        except Exception as error:
            self._fault(error, "return of a module")


def call_stack(skip: int = 2) -> list[str]:
    """Stack of the training code, innermost first, without frames of torch's module call and of this kit.

    Each line is ``file:line function``.
    """
    frame = sys._getframe(skip)
    lines: list[str] = []
    kit = _own_folders()
    while frame is not None and len(lines) < _DEPTH:
        code = frame.f_code
        file = code.co_filename.replace("\\", "/")
        own = code.co_filename.startswith(kit) and not code.co_filename.startswith(_DEMO)
        if not own and not any(part in file for part in _OMITTED):
            lines.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return lines


def _own_folders() -> tuple[str, ...]:
    """Folders of this kit: the package, and the patches, which a checkout keeps beside it."""
    patches = getattr(sys.modules.get("msprobe_megatron.patches"), "__file__", None)
    folders = [_PACKAGE, *([os.path.dirname(os.path.abspath(patches))] if patches else [])]
    return tuple(folder + os.sep for folder in folders)
