"""Replay of one session: modules are given the inputs that another run has recorded, whatever the two layouts.

Each of them then computes from the same numbers as its counterpart: of two modules that differ, the one that is wrong
differs by itself, and what comes after it agrees again. Changes the steps it is asked for, by definition; the gradient
goes on to whoever made the input that was replaced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_megatron.analyse.load import RunError, open_run
from msprobe_megatron.analyse.recorded_inputs import RecordedInputs
from msprobe_megatron.clock import Moment
from msprobe_megatron.config import ConfigError, ReplayConfig
from msprobe_megatron.parts import Job, Part
from msprobe_megatron.sites.arguments import own_work, with_other_tensors
from msprobe_megatron.sites.modules import parameter_names
from msprobe_megatron.topology import names
from msprobe_megatron.topology.activations import ChunkLayout, activation_spec
from msprobe_megatron.topology.host import megatron_arguments
from msprobe_megatron.topology.names import NamedModule
from msprobe_megatron.topology.shards import ShardSpec, cut


class Replaying(Part):
    """What the `replay` section of the probe file asks.

    Example::

        replay = Replaying(job, config.replay)
    """

    name = "replay"

    def __init__(self, job: Job, asked: ReplayConfig) -> None:
        self._job, self._asked = job, asked
        try:
            self._run = open_run(asked.run)
        except RunError as error:
            raise ConfigError(f"{job.config.source}: replay.run: {error}") from error
        self._modules = [
            (entry, ChunkLayout.of(chunk))
            for chunk in job.chunks
            for entry in names.modules(chunk)
            if any(_fits(text, entry.name) for text in asked.modules)
        ]
        if not self._modules and job.where.pp_size == 1:
            raise ConfigError(
                f"{job.config.source}: replay.modules: {list(asked.modules)} match no module; accepted: parts of"
                " canonical names such as decoder.layers.0"
            )
        self._inputs: RecordedInputs | None = None
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._handles: list[Any] = []
        self._paused = False
        self.fed: Counter[str] = Counter()
        self._unfed: dict[str, str] = {}

    def next_from(self, step: int) -> int | None:
        """The steps of the probe file."""
        return self._job.config.steps.next_from(step)

    def describe(self) -> str:
        """What is going to happen."""
        return f"feeding {len(self._modules)} modules with inputs of {self._asked.run}"

    def begin(self) -> None:
        """A recorded step begins: open what was recorded, set the hooks."""
        step = self._job.clock.step if self._asked.step is None else self._asked.step
        self._calls.clear()
        if step not in self._run.steps:
            self._unfed[f"step {step}"] = f"{self._asked.run} has steps {self._run.steps[:8] or 'none'}"
            return
        self._inputs = RecordedInputs(self._run, step)
        for entry, layout in self._modules:
            # Before the hooks of others, which then see what the module is given.
            hook = self._hook(entry, layout)
            self._handles.append(entry.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, complete: bool) -> None:
        """The step is over."""
        self.remove()
        self._inputs = None

    def pause(self) -> None:
        """The model runs for something else than the step, on its own inputs."""
        self._paused = True

    def resume(self) -> None:
        """The step goes on."""
        self._paused = False

    def not_happened(self, last_step: int) -> list[str]:
        """Modules that were to be fed and were not, and why."""
        lost = [f"replay: {what}: {why}" for what, why in list(self._unfed.items())[:8]]
        never = [entry.name for entry, _ in self._modules if not self.fed[entry.name] and entry.name not in self._unfed]
        return [*lost, *([f"replay: {never[0]} and {len(never) - 1} more were never fed"] if never else [])]

    def ledger(self) -> dict[str, Any]:
        """How many inputs of each module were replaced."""
        return {"run": str(self._asked.run), "fed": dict(self.fed), "left": self._unfed}

    def _hook(self, entry: NamedModule, layout: ChunkLayout) -> Callable[..., Any]:
        parameters = parameter_names(entry.module)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            if kwargs is None or self._paused:
                return None
            try:
                phase, moment = self._job.clock.calling()
                call = self._calls[entry.name, phase, moment]
                self._calls[entry.name, phase, moment] += 1
                prefix = f"call{call}." if call else ""
                with own_work():
                    named = [(parameters[i] if i < len(parameters) else str(i), value) for i, value in enumerate(args)]

                    def other(path: str, given: torch.Tensor) -> torch.Tensor:
                        return self._instead(entry, layout, prefix, path, given, moment)

                    new = tuple(with_other_tensors(value, name, other) for name, value in named)
                    more = {name: with_other_tensors(value, name, other) for name, value in kwargs.items()}
                return new, more
            except Exception as error:
                self._job.fault(error, f"replay of {entry.name}")
                return None

        return hook

    def _instead(
        self, entry: NamedModule, layout: ChunkLayout, prefix: str, path: str, given: torch.Tensor, moment: Moment
    ) -> torch.Tensor:
        """The recorded tensor in place of the given one; the given one where nothing was recorded for it."""
        inputs = self._inputs
        if inputs is None or not inputs.has(entry.name, prefix + path):
            return given
        spec = activation_spec(entry, "input", path, given.dim(), layout)
        try:
            if spec.unknown is not None:
                raise RunError(spec.unknown)
            samples, first = self._samples(spec, given, moment)
            dims, values = inputs.whole(entry.name, prefix + path, first, samples)
            whole = _in_order(torch.from_numpy(values.copy()), dims, spec)
            part = cut(whole, spec, self._job.where.of, self._job.where.size)
            if part.shape != given.shape:
                raise RunError(f"recorded {tuple(part.shape)}, needed {tuple(given.shape)}")
        except RunError as error:
            self._unfed.setdefault(entry.name, f"input {path}: {error}")
            return given
        self.fed[entry.name] += 1
        recorded = part.to(device=given.device, dtype=given.dtype).contiguous()
        instead: Any = _Instead.apply
        replaced: torch.Tensor = instead(given, recorded) if given.requires_grad else recorded
        return replaced

    def _samples(self, spec: ShardSpec, given: torch.Tensor, moment: Moment) -> tuple[int, int]:
        """How many samples the input holds, and the first of them in the global batch."""
        where, letters = self._job.where, [dim.name for dim in spec.dims]
        told = getattr(megatron_arguments(), "micro_batch_size", None)
        size = int(given.shape[letters.index("b")]) if "b" in letters else int(told or 1)
        return size, (moment.microbatch * where.dp_size + where.dp) * size


class _Instead(torch.autograd.Function):
    """Another value in place of one; the gradient goes to the maker of the one."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return recorded.view_as(recorded)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: D102
        return gradients[0], None


def _in_order(whole: torch.Tensor, dims: tuple[str, ...], spec: ShardSpec) -> torch.Tensor:
    """[b, s, h] as [s, b, h], where this layout has its dimensions otherwise."""
    wanted = tuple(dim.name for dim in spec.dims)
    if dims == wanted or sorted(dims) != sorted(wanted) or len(set(dims)) != len(dims):
        return whole
    return whole.permute([dims.index(name) for name in wanted])


def _fits(text: str, name: str) -> bool:
    return re.search(text[1:-1], name) is not None if text.startswith("/") else text in name
