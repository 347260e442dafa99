"""Elements of weight gradients from what modules took in and got back, for the law that a gradient is their product.

For a linear layer, dW[i, j] is the sum over all tokens of dy[t, i] · x[t, j]; for the weight of a norm, the output
takes the place of the input. `ELEMENTS` columns of the input are copied in the forward and multiplied with as many
columns of the gradient of the output, on the device and without waiting for it; the reduced gradient is read at the
same places before the optimizer steps. Expert layers are treated alike, input and output in the place of input and
gradient: what experts put out belongs to the same tokens when it has come home. Nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_megatron.config import ChecksConfig
from msprobe_megatron.job import devices
from msprobe_megatron.job.features.checks.feature import next_checked
from msprobe_megatron.job.features.feature import Feature, JobContext
from msprobe_megatron.job.record.gradient_products import ELEMENTS, Product, ProductBatch
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.module.hooks import ModuleHooks
from msprobe_megatron.topology.names import NamedModule, modules, unwrap
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.grad_buffers import reduced_range

_LINEAR = ("ColumnParallelLinear", "RowParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear", "Linear")
# Norms that multiply by their weight as it is stored, or say that they add 1 to it.
_NORMS = (
    "RMSNorm",
    "LayerNorm",
    "FusedLayerNorm",
    "WrappedTorchNorm",
    "LlamaRMSNorm",
    "Qwen2RMSNorm",
    "MixtralRMSNorm",
)
_TOKENS = ("MoELayer", "SequentialMLP", "GroupedMLP", "TEGroupedMLP")
_MATRIX = 2


class _Target(NamedTuple):
    """A weight whose gradient is a product, or an expert layer."""

    name: str
    kind: str
    module: nn.Module
    chunk: nn.Module
    parameter: nn.Parameter | None
    left: int
    """Width of the input, or of the output of a norm."""
    right: int
    """Width of the output and of its gradient."""


class GradientProductFeature(Feature):
    """Computes sampled elements of weight gradients a second time on the checked steps."""

    name = "gradient_products"

    def __init__(self, job: JobContext, asked: ChecksConfig) -> None:
        self._job, self._every = job, asked.every
        self._device = devices.select()
        self._targets = [target for chunk in job.chunks for target in _targets(chunk)]
        self._hooks = [ModuleHooks(t.module, _nothing, self._after(i)) for i, t in enumerate(self._targets)]
        self._indices: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._active = False
        self._set = False
        self._parts: list[list[torch.Tensor]] = []
        self._skipped: set[int] = set()
        self.steps = 0

    def next_from(self, step: int) -> int | None:
        """The steps that are checked; none where there is nothing to multiply."""
        return next_checked(self._job, self._every, step) if self._targets else None

    def describe(self) -> str:
        """How many products are computed."""
        return f"multiplying {ELEMENTS} elements of {len(self._targets)} gradients, every {self._every} steps"

    def begin(self) -> None:
        """A checked step begins."""
        self._parts, self._skipped = [[] for _ in self._targets], set()
        self._active = True
        if not self._set:
            self._set = True
            for hooks in self._hooks:
                hooks.set()

    def pause(self) -> None:
        """An evaluation is not part of the step."""
        self._active = False

    def resume(self) -> None:
        """The step goes on."""
        self._active = True

    def before_optimizer(self) -> None:
        """Gradients are reduced: read them at the same places and hand everything over."""
        with untraced(), torch.no_grad():
            found: list[Product] = []
            products: list[torch.Tensor] = []
            elements: list[torch.Tensor] = []
            for index, target in enumerate(self._targets):
                gradient, weight, held = self._read(target)
                parts = self._parts[index]
                products += parts
                elements += [x for x in (gradient, weight) if x is not None]
                dtype = target.parameter if target.parameter is not None else next(target.module.parameters(), None)
                found.append(
                    Product(
                        target.name,
                        target.kind,
                        type(target.module).__name__,
                        "" if dtype is None else str(dtype.dtype).removeprefix("torch."),
                        "" if gradient is None else str(gradient.dtype).removeprefix("torch."),
                        len(parts),
                        index in self._skipped or (target.kind != "tokens" and gradient is None and weight is None),
                        held,
                        weight is not None,
                        _shift(target.module) if target.kind == "norm" else 0.0,
                    )
                )
            # One copy for both: every copy is a launch and a transfer.
            numbers = [x.reshape(-1) for x in products] + [x.float() for x in elements]
            copy = self._device.to_host(torch.cat(numbers)) if numbers else None
        self._job.submit(ProductBatch(self._job.clock.step, found, copy))
        self._parts = [[] for _ in self._targets]
        self.steps += 1

    def _read(self, target: _Target) -> tuple[torch.Tensor | None, torch.Tensor | None, list[bool]]:
        """Elements of the reduced gradient and of a norm's weight, and which of them this rank holds."""
        parameter = target.parameter
        if parameter is None:
            return None, None, []
        gradient = getattr(parameter, "main_grad", None)
        gradient = gradient if gradient is not None else parameter.grad
        matrix = target.kind == "linear"
        gradient = None if gradient is None else local_part(gradient)
        if gradient is None or not gradient.is_contiguous() or gradient.numel() != parameter.numel():
            return None, None, []
        places, index = _spread(target.right), self._index(target.right, gradient.device)
        if matrix:
            places = tuple(i * target.left + j for i, j in zip(places, _spread(target.left), strict=True))
            index = index * target.left + self._index(target.left, gradient.device)
        part = reduced_range(target.chunk, parameter)
        held = [part is None or part[0] <= place < part[1] for place in places]
        weight = None if matrix else local_part(parameter.detach()).view(-1).index_select(0, index)
        return gradient.detach().view(-1).index_select(0, index), weight, held

    def finish(self, complete: bool) -> None:
        """The step is over."""
        self._active = False
        self._parts = [[] for _ in self._targets]

    def remove(self) -> None:
        """Take the hooks away. Safe to call twice."""
        self._active = self._set = False
        for hooks in self._hooks:
            hooks.remove()

    def ledger(self) -> dict[str, Any]:
        """How many weights and layers are multiplied, and on how many steps."""
        return {"targets": len(self._targets), "steps": self.steps}

    def _index(self, size: int, device: torch.device) -> torch.Tensor:
        """`_spread` as a tensor, made on the device: a copy from the host would wait."""
        found = self._indices.get((size, device))
        if found is None:
            odd = torch.arange(1, 2 * ELEMENTS, 2, device=device)
            found = self._indices[size, device] = torch.div(odd * size, 2 * ELEMENTS, rounding_mode="floor")
        return found

    def _columns(self, tensor: torch.Tensor, width: int) -> torch.Tensor:
        picked = tensor.detach().index_select(-1, self._index(width, tensor.device))
        return picked.reshape(-1, ELEMENTS).float()

    def _after(self, index: int) -> Any:
        target = self._targets[index]
        clock = self._job.clock

        def hook(module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
            if not self._active or (clock.away and clock.apart()):
                return
            try:
                kwargs = kwargs_and_output[0] if len(kwargs_and_output) > 1 else {}
                x = args[0] if args else next(iter(kwargs.values()), None)
                output = kwargs_and_output[-1]
                output = output[0] if isinstance(output, tuple) else output
                if not isinstance(x, torch.Tensor) or not isinstance(output, torch.Tensor):
                    self._skipped.add(index)
                elif target.kind == "tokens":
                    if clock.calling()[0] == "forward":
                        self._multiply(index, x, output, len(args) + len(kwargs))
                elif torch.is_grad_enabled() and output.requires_grad:
                    self._await(index, x, output)
            except Exception as error:
                self._job.fault(error, f"products of {target.name}")

        return hook

    def _multiply(self, index: int, x: torch.Tensor, output: torch.Tensor, arguments: int) -> None:
        """Input and output of an expert layer; experts must be given the probabilities, or they are applied later."""
        target = self._targets[index]
        experts = type(target.module).__name__ != _TOKENS[0]
        if x.shape[-1] != output.shape[-1] or (experts and arguments <= _MATRIX):
            self._skipped.add(index)
            return
        with untraced(), torch.no_grad():
            self._keep(index, self._columns(x, target.left), self._columns(output, target.right))

    def _await(self, index: int, x: torch.Tensor, output: torch.Tensor) -> None:
        target = self._targets[index]
        with untraced(), torch.no_grad():
            if target.kind == "norm":
                left = self._columns(output, target.left)
                bias = getattr(target.module, "bias", None)
                if bias is not None:
                    left = left - bias.detach().index_select(0, self._index(target.left, bias.device)).float()
            else:
                left = self._columns(x, target.left)
        parts = self._parts  # those of this step

        def hook(gradient: torch.Tensor) -> None:
            if parts is not self._parts:
                return
            try:
                with untraced(), torch.no_grad():
                    right = self._columns(gradient, target.right)
                    if right.shape == left.shape:
                        self._keep(index, left, right)
                    else:  # gathered or scattered inside: the rows of this rank are not those of the product
                        self._skipped.add(index)
            except Exception as error:
                self._job.fault(error, f"products of {target.name}")

        output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _keep(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        product = left * right
        self._parts[index].append(torch.stack((product.sum(0), (product * product).sum(0))))


def _nothing(*ignored: Any) -> None:
    return None


def _spread(size: int) -> tuple[int, ...]:
    """As many places as there are elements, spread over a dimension."""
    return tuple((2 * k + 1) * size // (2 * ELEMENTS) for k in range(ELEMENTS))


def _targets(chunk: nn.Module) -> Iterator[_Target]:
    entries = list(modules(chunk))
    uses = Counter(id(p) for entry in entries for p in entry.module.parameters(recurse=False))
    tied = getattr(unwrap(chunk), "share_embeddings_and_output_weights", False)
    for entry in entries:
        # Its gradient is also that of the embedding, which may be on another stage.
        if tied and entry.name.rpartition(".")[2] == "output_layer":
            continue
        target = _target(entry, chunk)
        if target is not None and (target.parameter is None or uses[id(target.parameter)] == 1):
            yield target


def _target(entry: NamedModule, chunk: nn.Module) -> _Target | None:
    module, kind = entry.module, type(entry.module).__name__
    if kind in _TOKENS:
        width = int(getattr(getattr(module, "config", None), "hidden_size", 0) or 0)
        alone = getattr(module, "shared_experts", None) is None and width >= ELEMENTS
        return _Target(entry.name, "tokens", module, chunk, None, width, width) if alone else None
    weight = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or not _own(weight) or min(weight.shape) < ELEMENTS:
        return None
    name, shape = f"{entry.name}.weight", weight.shape
    linear = kind in _LINEAR and len(shape) == _MATRIX and not getattr(module, "gather_output", False)
    if linear and not _quantized(module):
        return _Target(name, "linear", module, chunk, weight, shape[1], shape[0])
    if kind in _NORMS and len(shape) == 1:
        return _Target(name, "norm", module, chunk, weight, shape[0], shape[0])
    return None


def _own(weight: nn.Parameter) -> bool:
    """A weight that learns, and that no other stage shares."""
    return weight.requires_grad and not any(getattr(weight, name, False) for name in ("shared", "shared_embedding"))


def _quantized(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return any(getattr(config, name, None) for name in ("fp8", "fp4"))


def _shift(module: nn.Module) -> float:
    """What a norm adds to its weight."""
    config = getattr(module, "config", None)
    own = getattr(module, "zero_centered_gamma", getattr(config, "layernorm_zero_centered_gamma", False))
    return 1.0 if own else 0.0
