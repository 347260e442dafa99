"""Section `replay`: modules receive the inputs that another run has recorded, whatever the two layouts.

Each module then computes from the same numbers as its counterpart: a module that is wrong differs on its own, and the
modules after it agree again. Changes the selected steps, by definition; the gradient flows to the producer of the input
that was replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_megatron.analysis.load.run import RunError, open_run
from msprobe_megatron.config import ConfigError, ReplayConfig
from msprobe_megatron.config.name_patterns import name_matcher
from msprobe_megatron.job.clock import Moment
from msprobe_megatron.job.features.feature import Feature, JobContext, Seen
from msprobe_megatron.job.features.replay.recorded_inputs import RecordedInputs
from msprobe_megatron.job.sites.calls.arguments import untraced, with_other_tensors
from msprobe_megatron.job.sites.module.modules import parameter_names
from msprobe_megatron.topology import names
from msprobe_megatron.topology.host.framework import megatron_arguments
from msprobe_megatron.topology.names import NamedModule
from msprobe_megatron.topology.shards import ShardSpec, cut
from msprobe_megatron.topology.shards_of.activations import ChunkLayout, activation_spec, calls_before


class ReplayFeature(Feature):
    """Replaces the inputs of the selected modules on the steps of the probe file.

    Probe file::

        steps: 10
        dump: {level: L0}
        replay:
          run: ./recorded_with_task_tensor
          modules: [decoder.layers.3]
    """

    name = "replay"

    def __init__(self, job: JobContext, config: ReplayConfig) -> None:
        self._job, self._config = job, config
        try:
            self._run = open_run(config.run)
        except RunError as error:
            raise ConfigError(f"{job.config.source}: replay.run: {error}") from error
        self._modules = [
            (entry, ChunkLayout.of(chunk))
            for chunk in job.chunks
            for entry in names.modules(chunk)
            if any(name_matcher(text)(entry.name) for text in config.modules)
        ]
        if not self._modules and job.where.pp_size == 1:
            raise ConfigError(
                f"{job.config.source}: replay.modules: {list(config.modules)} match no module; accepted: parts of"
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
        return f"feeding {len(self._modules)} modules with inputs of {self._config.run}"

    def begin(self) -> None:
        """A replayed step begins: open the recorded inputs, install the hooks."""
        step = self._job.clock.step if self._config.step is None else self._config.step
        self._calls.clear()
        if step not in self._run.steps:
            self._unfed[f"step {step}"] = f"{self._config.run} has steps {self._run.steps[:8] or 'none'}"
            return
        self._inputs = RecordedInputs(self._run, step)
        for entry, layout in self._modules:
            # Before all other hooks, which then see what the module receives.
            hook = self._hook(entry, layout)
            self._handles.append(entry.module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self, complete: bool) -> None:
        """The step is over."""
        self.remove()
        self._inputs = None

    def pause(self) -> None:
        """The model runs for something else than the step, and keeps its own inputs."""
        self._paused = True

    def resume(self) -> None:
        """The step continues."""
        self._paused = False

    def not_happened(self, seen: Seen) -> list[str]:
        """Modules that did not receive recorded inputs, and why."""
        lost = [f"replay: {what}: {why}" for what, why in list(self._unfed.items())[:8]]
        never = [entry.name for entry, _ in self._modules if not self.fed[entry.name] and entry.name not in self._unfed]
        return [*lost, *([f"replay: {never[0]} and {len(never) - 1} more were never fed"] if never else [])]

    def ledger(self) -> dict[str, Any]:
        """How many inputs of each module were replaced."""
        return {"run": str(self._config.run), "fed": dict(self.fed), "left": self._unfed}

    def _hook(self, entry: NamedModule, layout: ChunkLayout) -> Callable[..., Any]:
        parameters = parameter_names(entry.module)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            if kwargs is None or self._paused:
                return None
            try:
                phase, moment = self._job.clock.calling()
                call = self._calls[entry.name, phase, moment] + calls_before(entry, layout)
                self._calls[entry.name, phase, moment] += 1
                prefix = f"call{call}." if call else ""
                with untraced():
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
        """The recorded tensor in place of the given one; the given one if nothing was recorded for it."""
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
        """The number of samples in the input, and the index of the first in the global batch."""
        where, letters = self._job.where, [dim.name for dim in spec.dims]
        micro_batch_size = getattr(megatron_arguments(), "micro_batch_size", None)
        size = int(given.shape[letters.index("b")]) if "b" in letters else int(micro_batch_size or 1)
        return size, (moment.microbatch * where.dp_size + where.dp) * size


class _Instead(torch.autograd.Function):
    """Replaces a value; the gradient flows to the producer of the original."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return recorded.view_as(recorded)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: D102
        return gradients[0], None


def _in_order(whole: torch.Tensor, dims: tuple[str, ...], spec: ShardSpec) -> torch.Tensor:
    """Permute [b, s, h] to [s, b, h] and the like, if this layout orders its dimensions differently."""
    wanted = tuple(dim.name for dim in spec.dims)
    if dims == wanted or sorted(dims) != sorted(wanted) or len(set(dims)) != len(dims):
        return whole
    return whole.permute([dims.index(name) for name in wanted])
