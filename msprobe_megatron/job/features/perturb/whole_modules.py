"""Whole modules held against a float64 reference: norms, attention and its softmax, MLP, router, cross entropy.

A cast between two calls is no call, and a module whose `forward` was replaced may make none that is seen. So these
modules are judged by what goes in and what comes out: rows of the inputs are copied before the module runs (it may
write to them), and the output is compared with what `run.references` computes from the rows, the weights and the
settings. None of the module's own code runs a second time.

Modules are recognized by class name and by structure. One whose settings are unknown is left to the other checks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.job.features.perturb import attention_core
from msprobe_megatron.job.features.perturb.examiner import CheckRunner
from msprobe_megatron.job.features.perturb.judge.checks import CheckedCall
from msprobe_megatron.job.features.perturb.judge.module_error import ModuleRows, compare_module
from msprobe_megatron.job.features.perturb.judge.verdict import REFERENCE
from msprobe_megatron.job.features.perturb.run import references
from msprobe_megatron.job.features.perturb.run.references import count_rows, is_rows, take_rows
from msprobe_megatron.job.features.perturb.run.rerun import CannotRun
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.rerunnable import Pass
from msprobe_megatron.topology import names

Arguments = tuple[tuple[Any, ...], dict[str, Any], Any]
"""Positional and keyword arguments of a forward, and its output (None before it)."""
Compared = tuple[torch.Tensor, list[ModuleRows]] | None
"""A live tensor, and the rows of it with their references."""
_LAYER_NORM = re.compile(r"layer_?norm", re.IGNORECASE)
_RMS_NORM = re.compile(r"rms_?norm", re.IGNORECASE)
# Classes whose weight is used as it is. Others may add 1 to it: both forms are tried.
_PLAIN_NORMS = ("LayerNorm", "RMSNorm", "LlamaRMSNorm", "Qwen2RMSNorm", "MixtralRMSNorm", "MistralRMSNorm")
_EPSILONS = ("eps", "epsilon", "variance_epsilon", "norm_eps")


class Watched(NamedTuple):
    """A module, and whether it is watched before or after its forward."""

    module: nn.Module
    after: bool


class WholeModule(NamedTuple):
    """A recognized module: where its inputs are taken, where its output is seen, and how they are compared."""

    kind: str
    op: str
    note: str
    """What a module of this kind is expected to do, for the report."""
    begin: Watched
    end: Watched
    take: Callable[[Arguments], Any]
    """Copies rows of the inputs; None: they are not of the expected form."""
    compare: Callable[[Any, Arguments], Compared]
    scale: Watched | None = None


def recognize(entry: names.NamedModule, tp_size: int) -> WholeModule | None:
    """How a module is held against a reference; None if it is of no known kind.

    Example::

        >>> recognize(names.NamedModule("norm", nn.LayerNorm(4), None), 1).kind
        'norm'
    """
    for kind in (_norm, _softmax, _attention, _router, _mlp, _activation):
        found = kind(entry.module, entry.parent)
        if found is not None:
            return found
    return _loss(entry.module, tp_size)


def _single(kind: str, module: nn.Module, note: str, take: Any, compare: Any) -> WholeModule:
    return WholeModule(kind, type(module).__name__, note, Watched(module, False), Watched(module, True), take, compare)


def _first(given: Arguments) -> Any:
    args, kwargs, _ = given
    return args[0] if args else next(iter(kwargs.values()), None)


def _take_first(given: Arguments) -> torch.Tensor | None:
    x = _first(given)
    return take_rows(x, count_rows(x.numel() // x.shape[-1], x.shape[-1])) if is_rows(x) else None


def _fits(parameter: Any, shape: tuple[int, ...]) -> bool:
    return type(parameter) in (torch.Tensor, nn.Parameter) and tuple(parameter.shape) == shape


def _norm(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    name = type(module).__name__
    rms = bool(_RMS_NORM.search(name))
    eps = next((value for key in _EPSILONS if isinstance(value := getattr(module, key, None), float)), None)
    weighted = getattr(module, "weight", None) is not None
    config = getattr(module, "config", None)
    if name == "FusedLayerNorm" and getattr(config, "normalization", "LayerNorm") != "LayerNorm":
        return None
    if not (rms or _LAYER_NORM.search(name)) or next(module.children(), None) is not None:
        return None
    if eps is None or not (weighted or isinstance(module, nn.LayerNorm | nn.RMSNorm)):
        return None
    zero_centred = getattr(module, "zero_centered_gamma", None)
    shifts = (0.0,) if name in _PLAIN_NORMS else (0.0, 1.0) if zero_centred is None else (float(zero_centred),)

    def compare(rows: torch.Tensor, given: Arguments) -> Compared:
        live = given[2]
        if not is_rows(live) or live.shape[-1] != rows.shape[-1] or _first(given).shape != live.shape:
            return None
        # Read now: a sharded parameter is whole only while its module runs.
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if any(p is not None and not _fits(p, (rows.shape[-1],)) for p in (weight, bias)):
            return None
        part = take_rows(live, rows.shape[0])
        return live, references.norm(rows, part, rms=rms, eps=eps, weight=weight, bias=bias, shifts=shifts)

    return _single("norm", module, "its statistics are computed in float32", _take_first, compare)


def _softmax(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    """Megatron's scale, mask and softmax of the scores of attention."""
    if type(module).__name__ != "FusedScaleMaskSoftmax" or getattr(module, "window_size", None) is not None:
        return None
    own: Any = module
    config = getattr(parent, "config", None)
    in_fp32 = bool(getattr(config, "attention_softmax_in_fp32", own.softmax_in_fp32))
    causal = getattr(own.attn_mask_type, "name", "") == "causal"
    scale = 1.0 if own.scale is None else float(own.scale)

    def take(given: Arguments) -> Any:
        args, kwargs, _ = given
        scores = _first(given)
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        offset = args[2] if len(args) > 2 else kwargs.get("softmax_offset")
        if not is_rows(scores) or scores.dim() != 4 or offset is not None:
            return None
        count = count_rows(scores.numel() // scores.shape[-1], scores.shape[-1])
        hidden = None
        if isinstance(mask, torch.Tensor):
            if mask.dtype is not torch.bool:
                return None
            hidden = take_rows(mask.expand(scores.shape), count)
        elif causal and scores.shape[2] > 1:
            row = references.coordinates(tuple(scores.shape[:-1]), count, scores.device)[2]
            hidden = torch.arange(scores.shape[3], device=scores.device).unsqueeze(0) > row.unsqueeze(1)
        return take_rows(scores, count), hidden

    def compare(taken: Any, given: Arguments) -> Compared:
        (rows, hidden), live = taken, given[2]
        if not is_rows(live) or live.shape != _first(given).shape:
            return None
        part = take_rows(live, rows.shape[0])
        return live, references.softmax(rows, hidden, part, scale, in_fp32=in_fp32)

    note = "computed in float32, as attention_softmax_in_fp32 is set" if in_fp32 else ""
    return _single("softmax", module, note, take, compare)


def _attention(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    scale = attention_core.scale_of(module)
    if scale is None:
        return None

    def take(given: Arguments) -> Any:
        return attention_core.take(module, given[0], given[1])

    def compare(taken: Any, given: Arguments) -> Compared:
        return attention_core.compare(taken, given[2], scale)

    return _single("attention", module, "averages of the values that a query may see", take, compare)


def _router(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    config: Any = getattr(module, "config", None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("Router") or config is None or not isinstance(weight, torch.Tensor):
        return None
    balancing = getattr(config, "moe_router_load_balancing_type", "")
    jitter, forced = (
        getattr(config, f"moe_{key}", None) for key in ("input_jitter_eps", "router_force_load_balancing")
    )
    limited = getattr(config, "moe_expert_capacity_factor", None) is not None
    replayed = getattr(module, "router_replay", None) is not None
    if weight.dim() != 2 or balancing == "sinkhorn" or jitter or forced or limited or replayed:
        return None
    settings = references.RouterSettings(module, config)
    if settings.score not in ("softmax", "sigmoid"):
        return None

    def take(given: Arguments) -> Any:
        x = _first(given)
        if not is_rows(x) or x.shape[-1] != weight.shape[1] or torch.is_autocast_enabled(x.device.type):
            return None
        return take_rows(x, count_rows(x.numel() // x.shape[-1], x.shape[-1], max(1, weight.shape[0] // 64)))

    def compare(rows: torch.Tensor, given: Arguments) -> Compared:
        output = given[2]
        if not isinstance(output, tuple) or len(output) < 2 or not is_rows(output[0]):
            return None
        probs, chosen = output[0], output[1]
        shape = (_first(given).numel() // rows.shape[-1], weight.shape[0])
        if tuple(probs.shape) != shape or tuple(chosen.shape) != shape or chosen.dtype is not torch.bool:
            return None
        count = rows.shape[0]
        part = take_rows(probs, count)
        return probs, references.router(rows, part, take_rows(chosen, count), module, settings)

    note = f"computed in float32, as moe_router_dtype is {config.moe_router_dtype}" if settings.in_fp32 else ""
    return _single("router", module, note, take, compare)


def _mlp(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    """Megatron's MLP: from the output of linear_fc1 to the input of linear_fc2, which holds for every layout."""
    config: Any = getattr(module, "config", None)
    first, second = getattr(module, "linear_fc1", None), getattr(module, "linear_fc2", None)
    if config is None or not isinstance(first, nn.Module) or not isinstance(second, nn.Module):
        return None
    fused = bool(getattr(config, "bias_activation_fusion", False))
    chosen = references.activation_of(getattr(config, "activation_func", None), fused=fused)
    if chosen is None or getattr(config, "use_te_activation_func", False):
        return None
    if fused and getattr(config, "activation_func_fp8_input_store", False):
        return None
    gated = bool(getattr(config, "gated_linear_unit", False))
    limit, offset = getattr(config, "activation_func_clamp_value", None), getattr(config, "glu_linear_offset", 0.0)
    scaled = "per_token_scale" in inspect.signature(type(module).forward).parameters

    def take(given: Arguments) -> Any:
        output = given[2]
        x, bias = output if isinstance(output, tuple) and len(output) == 2 else (output, None)
        if not is_rows(x):
            return None
        return take_rows(x, count_rows(x.numel() // x.shape[-1], x.shape[-1])), bias, x.shape[:-1]

    def compare(taken: Any, given: Arguments) -> Compared:
        (rows, bias, shape), live = taken[:3], _first(given)
        scale = taken[3] if len(taken) > 3 else None
        width = rows.shape[-1] // 2 if gated else rows.shape[-1]
        if not is_rows(live) or live.shape != (*shape, width):
            return None
        if scale is not None:
            if scale.shape != shape:
                return None
            scale = scale.detach()[references.coordinates(tuple(shape), rows.shape[0], scale.device)]
        part = take_rows(live, rows.shape[0])
        rest = {"bias": bias, "gated": gated, "limit": limit, "offset": offset or 0.0, "scale": scale}
        return live, references.activation(rows, part, chosen, **rest)

    name = getattr(config.activation_func, "__name__", "activation_func")
    form = " in its exact form" if chosen.rival is references.tanh_gelu else ""
    return WholeModule(
        "mlp",
        type(module).__name__,
        f"its activation is {name}{form}, as activation_func is set",
        Watched(first, True),
        Watched(second, False),
        take,
        compare,
        Watched(module, False) if scaled else None,
    )


def _activation(module: nn.Module, parent: nn.Module | None) -> WholeModule | None:
    chosen = references.activation_of(module) if isinstance(module, nn.GELU | nn.SiLU) else None
    if chosen is None:
        return None

    def compare(rows: torch.Tensor, given: Arguments) -> Compared:
        live = given[2]
        if not is_rows(live) or live.shape != _first(given).shape:
            return None
        return live, references.activation(rows, take_rows(live, rows.shape[0]), chosen)

    note = f"approximate is {module.approximate!r}" if isinstance(module, nn.GELU) else ""
    return _single("activation", module, note, _take_first, compare)


def _loss(module: nn.Module, tp_size: int) -> WholeModule | None:
    """Cross entropy of a language model of Megatron: from the logits of output_layer to the loss of each token."""
    head = getattr(module, "output_layer", None)
    if not isinstance(head, nn.Module) or not hasattr(module, "compute_language_model_loss"):
        return None

    def take(given: Arguments) -> Any:
        output = given[2]
        logits = output[0] if isinstance(output, tuple) and output else output
        if not is_rows(logits) or logits.dim() != 3:
            return None
        tokens, width = logits.shape[0] * logits.shape[1], logits.shape[2]
        if tp_size > 1:  # only a part of the vocabulary is here
            return None, logits.shape[:2]
        return take_rows(logits, count_rows(tokens, width)), logits.shape[:2]

    def compare(taken: Any, given: Arguments) -> Compared:
        (rows, shape), loss = taken, given[2]
        labels = given[1].get("labels", given[0][4] if len(given[0]) > 4 else None)
        if not isinstance(loss, torch.Tensor) or not isinstance(labels, torch.Tensor) or not loss.is_floating_point():
            return None
        if loss.shape != labels.shape or loss.shape[::-1] != shape or loss.dtype not in references.FLOATS:
            return None
        if rows is None:
            return loss, references.loss_on_coarse_grid(loss.detach())
        at = references.coordinates(tuple(shape), rows.shape[0], loss.device)
        place = (at[1], at[0])  # logits have the sequence first, the loss has the samples first
        return loss, references.cross_entropy(rows, labels[place], loss.detach()[place])

    note = "cross entropy is computed in float32"
    return WholeModule("loss", "cross_entropy", note, Watched(head, True), Watched(module, True), take, compare)


class WholeModuleExaminer:
    """Sets the hooks of recognized modules, and hands what they see to the runner."""

    def __init__(self, runner: CheckRunner) -> None:
        self._runner = runner

    def watch(self, name: str, target: WholeModule, now: Callable[[], Pass | None]) -> list[Any]:
        """Set the hooks; `now` gives the pass in which the module runs, or None if it is not selected."""
        taken: list[Any] = []
        scales: list[Any] = []

        def begin(given: Arguments) -> None:
            taken.clear()
            if now() is not None:
                rows = target.take(given)
                if rows is not None:
                    taken.append((*rows, *scales) if target.scale is not None else rows)

        def end(given: Arguments) -> None:
            where = now()
            if taken and where is not None:
                compared = target.compare(taken.pop(), given)
                if compared is not None:
                    self._keep(name, target, where, *compared)

        def scale(given: Arguments) -> None:
            scales.clear()
            args, kwargs, _ = given
            value = kwargs.get("per_token_scale", args[1] if len(args) > 1 else None)
            if isinstance(value, torch.Tensor):
                scales.append(value)

        handles = [self._hook(name, target.begin, begin), self._hook(name, target.end, end)]
        if target.scale is not None:
            handles.insert(0, self._hook(name, target.scale, scale))
        return handles

    def _hook(self, name: str, watched: Watched, see: Callable[[Arguments], None]) -> Any:
        # A hook that is removed while torch iterates over the hooks is still called, then without the kwargs.
        def hook(_: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            if len(kwargs_and_output) != 1 + watched.after:
                return
            try:
                with untraced(), torch.no_grad():
                    see((args, kwargs_and_output[0], kwargs_and_output[1] if watched.after else None))
            except RuntimeError as error:
                if all(x.is_cpu for x in args if isinstance(x, torch.Tensor)):
                    self._runner.fault(error, f"examination of {name} against its reference")
                else:  # a device that lacks the operators of the reference (float64 on an NPU), or memory for it
                    self._runner.failures[name] += 1
                    self._runner.reasons.setdefault(name, f"{type(error).__name__}: {str(error)[:160]}")
            except Exception as error:
                self._runner.fault(error, f"examination of {name} against its reference")

        if watched.after:
            return watched.module.register_forward_hook(hook, with_kwargs=True)
        return watched.module.register_forward_pre_hook(hook, with_kwargs=True)

    def _keep(
        self, name: str, target: WholeModule, where: Pass, live: torch.Tensor, candidates: list[ModuleRows]
    ) -> None:
        def check(_: CheckedCall, line: torch.Tensor) -> None:
            compare_module(candidates, line[REFERENCE])

        def pick(_: Any) -> torch.Tensor:
            return live

        call = CheckedCall(
            target.op, target.kind, (), {}, live.detach(), pick, _never, rows=0, ulps=0, note=target.note
        )
        self._runner.examine(call, name, 0, where, "", check=check)


def _never(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise CannotRun("a module that is held against a reference is not run again")
