"""A few elements of every weight around the optimizer's step, for the law that an update follows its formula.

Of each parameter that an optimizer of this rank updates, `ELEMENTS` are kept before and after the step: the reduced and
the clipped gradient, the moments, the master copy and the weight. They are views that one concatenation brings together
for all parameters, copied to the host without waiting; the writer thread makes rows of them. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msprobe_megatron.config import ChecksConfig
from msprobe_megatron.job import devices
from msprobe_megatron.job.features.checks.feature import next_checked
from msprobe_megatron.job.features.feature import Feature, JobContext
from msprobe_megatron.job.record.update_samples import Part, Sampled, UpdateBatch
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.topology.names import parameters
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.optimizer_values import MASTER, is_encoded
from msprobe_megatron.topology.shards_of.optimizers import Owned, inner, leaves, owned

ELEMENTS = 4
"""Elements of each parameter, spread over it."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
_SETTINGS = ("lr", "weight_decay", "eps", "betas", "momentum", "nesterov", "bias_correction", "dampening", "step")


class UpdateSampleFeature(Feature):
    """Samples elements around the step of every inner optimizer on the checked steps."""

    name = "update_samples"

    def __init__(self, job: JobContext, asked: ChecksConfig) -> None:
        self._job, self._every = job, asked.every
        self._device = devices.select()
        self._entries: list[Owned] = []
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []
        self._kept: dict[str, tuple[list[int], torch.Tensor]] = {}
        self._active = False
        self.steps = 0
        self.without_hooks: set[str] = set()

    def next_from(self, step: int) -> int | None:
        """The steps that are checked."""
        return next_checked(self._job, self._every, step)

    def describe(self) -> str:
        """How many elements are sampled."""
        return f"sampling {ELEMENTS} elements of every update, every {self._every} steps"

    def begin(self) -> None:
        """A checked step begins: listen to the inner optimizers."""
        self._active, self._kept = True, {}
        if self._handles:
            return
        for leaf in leaves(self._job.optimizer):
            base = inner(leaf)
            if base is None:
                continue
            if not hasattr(base, "register_step_pre_hook") or not hasattr(base, "register_step_post_hook"):
                self.without_hooks.add(type(base).__name__)
                continue
            self._handles.append(base.register_step_pre_hook(self._before))
            self._handles.append(base.register_step_post_hook(self._after))

    def before_optimizer(self) -> None:
        """Gradients are reduced; clipping and unscaling come next."""
        if not self._names:
            self._names = {id(e.parameter): e.name for chunk in self._job.chunks for e in parameters(chunk)}
        self._entries = [e for e in owned(self._job.optimizer) if self._usable(e)]
        with untraced(), torch.no_grad():
            self._take("raw", [self._of_model(entry, _main_grad(entry)) for entry in self._entries])
            self._take("weight_before", [self._of_model(entry, entry.parameter) for entry in self._entries])

    def _usable(self, entry: Owned) -> bool:
        """A plain tensor in memory, of which elements can be seen as they are."""
        encoded = is_encoded(entry, MASTER) or any(is_encoded(entry, name) for name in _MOMENTS)
        known = id(entry.parameter) in self._names and not encoded and MASTER not in entry.state()
        return known and type(local_part(entry.main)) in (torch.Tensor, torch.nn.Parameter) and entry.main.numel() > 0

    def _before(self, optimizer: Any, *ignored: Any) -> None:
        if not self._active:
            return
        try:
            mine = [entry for entry in self._entries if entry.optimizer is optimizer]
            with untraced(), torch.no_grad():
                key = str(id(optimizer))
                self._take(f"before {key}", [_some(entry.main) for entry in mine])
                self._take(f"grad {key}", [_some(entry.gradient()) for entry in mine])
                for name in _MOMENTS:
                    self._take(f"{name}_before {key}", [_some(entry.states().get(name)) for entry in mine])
        except Exception as error:
            self._job.fault(error, "elements before the step of the optimizer")

    def _after(self, optimizer: Any, *ignored: Any) -> None:
        if not self._active:
            return
        try:
            mine = [entry for entry in self._entries if entry.optimizer is optimizer]
            with untraced(), torch.no_grad():
                key = str(id(optimizer))
                self._take(f"after {key}", [_some(entry.main) for entry in mine])
                for name in _MOMENTS:
                    self._take(f"{name}_after {key}", [_some(entry.states().get(name)) for entry in mine])
        except Exception as error:
            self._job.fault(error, "elements after the step of the optimizer")

    def after_optimizer(self, result: Any) -> None:
        """The weights are written: hand over what was kept."""
        if not self._entries:
            return
        with untraced(), torch.no_grad():
            self._take("weight_after", [self._of_model(entry, entry.parameter) for entry in self._entries])
        found = [
            Sampled(
                self._names[id(entry.parameter)],
                str(id(entry.optimizer)),
                type(entry.optimizer).__name__,
                entry.parameter.dim(),
                str(entry.parameter.dtype).removeprefix("torch."),
                str(entry.main.dtype).removeprefix("torch."),
                entry.main.numel(),
                _settings(entry),
            )
            for entry in self._entries
        ]
        success, norm = _outcome(result)
        self._job.submit(UpdateBatch(self._job.clock.step, found, self._sent(), success, norm))
        self._kept = {}
        self.steps += 1

    def finish(self, complete: bool) -> None:
        """The step is over."""
        self._active, self._kept = False, {}

    def remove(self) -> None:
        """Take the hooks away. Safe to call twice."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def ledger(self) -> dict[str, Any]:
        """How many steps were sampled, and which optimizers cannot be listened to."""
        return {"steps": self.steps, "without_hooks": sorted(self.without_hooks)}

    def _take(self, name: str, views: Sequence[torch.Tensor | None]) -> None:
        """Keep the elements of all parameters as they are now, in one block; what is missing is empty."""
        there = [view for view in views if view is not None]
        lengths = [0 if view is None else view.numel() for view in views]
        if there:
            self._kept[name] = (lengths, torch.cat([view.float() for view in there]))

    def _sent(self) -> dict[str, tuple[list[int], Part]]:
        """All blocks on their way to the host, in one copy from each device."""
        by_device: dict[torch.device, list[str]] = {}
        for name, (_, block) in self._kept.items():
            by_device.setdefault(block.device, []).append(name)
        found = {}
        for names in by_device.values():
            blocks = [self._kept[name][1] for name in names]
            copy, at = self._device.to_host(torch.cat(blocks)), 0
            for name, block in zip(names, blocks, strict=True):
                found[name] = (self._kept[name][0], Part(copy, at, at + block.numel()))
                at += block.numel()
        return {name: found[name] for name in self._kept}

    def _of_model(self, entry: Owned, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The elements of the weight, or of its gradient, that the optimizer's own part is sampled at."""
        if tensor is None:
            return None
        tensor = local_part(tensor).detach()
        if not tensor.is_contiguous():
            return None
        flat = tensor.view(-1)
        if entry.part is not None:
            flat = flat[entry.part[0] : entry.part[1]]
        return flat[:: _stride(flat.numel())][:ELEMENTS] if flat.numel() == entry.main.numel() else None


def _some(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    tensor = local_part(tensor).detach()
    return tensor.view(-1)[:: _stride(tensor.numel())][:ELEMENTS] if tensor.is_contiguous() else None


def _stride(numel: int) -> int:
    return max(1, -(-numel // ELEMENTS))


def _main_grad(entry: Owned) -> torch.Tensor | None:
    found: torch.Tensor | None = getattr(entry.parameter, "main_grad", None)
    return found if found is not None else entry.parameter.grad


def _settings(entry: Owned) -> dict[str, Any]:
    """What the optimizer's group of a parameter says, as plain numbers; tensors of a device are left out."""
    groups = getattr(entry.optimizer, "param_groups", ())
    group: dict[str, Any] = next((g for g in groups if any(p is entry.main for p in g["params"])), {})
    found = {key: _plain(group[key]) for key in _SETTINGS if key in group}
    step = _plain(entry.state().get("step"))
    return {key: value for key, value in {**found, "step": step or found.get("step")}.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float) else None


def _outcome(result: Any) -> tuple[bool, float | None]:
    """Whether the step was made, and the gradient norm, where the optimizer returns them as plain numbers."""
    if not isinstance(result, tuple) or not result:
        return True, None
    norm = result[1] if len(result) > 1 else None
    return bool(result[0]) if isinstance(result[0], bool) else True, _plain(norm)
