"""The modules that perturb examines or replaces as one operator: which they are, their hooks, the noise they get."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from msprobe_megatron.config import ConfigError
from msprobe_megatron.parts import Job
from msprobe_megatron.probes.perturb.budget import Cost
from msprobe_megatron.probes.perturb.examiner import Examiner
from msprobe_megatron.probes.perturb.module_fix import ModuleFix
from msprobe_megatron.probes.perturb.modules import ModuleExaminer, examinable
from msprobe_megatron.probes.perturb.noise import Numbering
from msprobe_megatron.probes.perturb.twins import find_sibling
from msprobe_megatron.sites.calls import Pass
from msprobe_megatron.topology import names
from msprobe_megatron.topology.activations import ChunkLayout, activation_spec
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.inner_layouts import inner_numbering
from msprobe_megatron.topology.layers import layer_of

# Four runs, two of them in a precision that takes several times as long.
_RUNS = 12.0
# Microseconds of an examination, and of each call under the guard.
_EXAMINED, _GUARDED = 3000.0, 60.0


class ModuleTargets:
    """Module targets of a job, between `install` and `remove`.

    Example::

        targets = ModuleTargets(job, examiner)
        targets.install(None); ...; targets.remove()
    """

    def __init__(self, job: Job, examiner: Examiner) -> None:
        self._job, self._examiner, self._asked = job, examiner, examiner.asked
        self._modules: dict[str, nn.Module] = {}
        self._numberings: dict[str, Callable[[torch.Tensor], Numbering | None]] = {}
        self._entries: dict[str, tuple[names.NamedModule, ChunkLayout]] = {}
        self._chosen: dict[str, int] = {}
        self._watched = ModuleExaminer(examiner)
        self._fix = ModuleFix(self._asked.mode, self._asked.stage)
        self._handles: list[Any] = []
        self.active = False
        asked = self._asked
        by_itself = asked.whole and asked.stage == "forward" and asked.handler == "check" and not asked.preheat
        for index, chunk in enumerate(job.chunks):
            layout = ChunkLayout.of(chunk)
            for entry in names.modules(chunk):
                self._modules[entry.name] = entry.module
                self._numberings[entry.name] = self._numbering(entry, layout)
                self._entries[entry.name] = (entry, layout)
                if asked.modules:
                    wanted = examiner.selection.module(entry.name)
                else:
                    wanted = by_itself and examiner.profile == "ulp" and examinable(entry.name, entry.module)
                if wanted and examiner.selection.place(entry.name, _any_microbatch(asked)):
                    self._chosen[entry.name] = index
                    self._watched.numberings[entry.name] = self._numberings[entry.name]
        examiner.number = self._number
        self._refuse(job)

    def _refuse(self, job: Job) -> None:
        """A name without a match, where no other stage can have it; a fix that only some ranks would make."""
        asked, where = self._asked, job.where
        if asked.modules and where.pp_size == 1 and where.ep_size == 1 and not self._chosen:
            some = ", ".join(list(self._modules)[:6])
            raise ConfigError(
                f"{job.config.source}: perturb.modules: {list(asked.modules)} matches no module; accepted: part of a"
                f" name such as {some}"
            )
        if asked.handler == "fix" and job.config.ranks.describe() != "all":
            raise ConfigError(
                f"{job.config.source}: ranks: {job.config.ranks.describe()}, but perturb.handler fix changes training"
                " and must be the same on every rank; accepted: ranks: all, or handler: check"
            )
        if asked.modules and asked.stage == "backward" and asked.handler == "check":
            raise ConfigError(
                f"{job.config.source}: perturb.stage: the backward of whole modules is not examined; accepted: a list"
                " of API calls instead of modules, or stage: forward"
            )

    def install(self, chosen: Collection[str] | None) -> None:
        """Set the hooks, of the chosen modules or of all targets."""
        self.remove()
        self.active = True
        for name, chunk in self._chosen.items():
            if chosen is not None and name not in chosen:
                continue
            module = self._modules[name]
            if self._asked.handler == "fix":
                self._fix.install(name, module, self._sibling(name), self._wanted(name))
            else:
                self._handles.append(self._watched.watch(name, module, self._now(name, chunk)))

    def remove(self) -> None:
        """Take the hooks away. Safe to call twice."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._fix.remove()

    def _sibling(self, name: str) -> nn.Module | None:
        if self._asked.twin != "sibling":
            return None
        found = find_sibling(name, self._modules, layer_of(name))
        if found is None:
            raise ConfigError(
                f"{self._job.config.source}: perturb.twin: {name} has no module of its class in another layer of this"
                " rank; accepted: twin: precision"
            )
        return self._modules[found]

    def _wanted(self, name: str) -> Callable[[], bool]:
        clock, selection = self._job.clock, self._examiner.selection
        return lambda: self.active and selection.place(name, clock.calling()[1].microbatch)

    def _now(self, name: str, chunk: int) -> Callable[[], Pass | None]:
        clock, examiner = self._job.clock, self._examiner

        def now() -> Pass | None:
            phase, moment = clock.calling()
            if not self.active or phase != "forward" or not examiner.wants(name, phase, moment):
                return None
            return Pass(name, chunk, phase, moment, {})

        return now

    def _numbering(self, entry: names.NamedModule, layout: ChunkLayout) -> Callable[[torch.Tensor], Numbering | None]:
        """Which elements of the whole tensor the first input of a module on this rank holds."""
        where = self._job.where

        def numbering(x: torch.Tensor) -> Numbering | None:
            path = next(iter(inspect.signature(entry.module.forward).parameters), "")
            spec = activation_spec(entry, "input", path, x.dim(), layout).only(lambda axis: where.size(axis) > 1)
            return index_map(spec, tuple(x.shape), where.of, where.size)

        return numbering

    def _number(self, where: Pass, x: torch.Tensor, kind: str) -> Numbering | None:
        """The same for a tensor that a call inside of a module is given; what is not known keeps its own index."""
        known = self._entries.get(where.module)
        if known is None:
            return None
        of, size = self._job.where.of, self._job.where.size
        factor = "" if kind != "gemm" else "backward" if where.phase == "backward" else "forward"
        found = inner_numbering(known[0], tuple(x.shape), known[1], of, size, factor=factor)
        # What has the shape of the module's first input lies as that does.
        return self._numberings[where.module](x) if found is None and where.shape == x.shape else found

    def costs(self, calls: dict[str, Cost]) -> dict[str, Cost]:
        """What the targets cost, from what the calls inside of them do; one that makes a single call is left out."""
        found = {}
        for name in list(self._chosen):
            inside = [cost.call for call, cost in calls.items() if call.startswith((f"{name}/", f"{name}."))]
            if len(inside) > 1 or self._asked.modules:
                found[name] = Cost(0.0, _EXAMINED + _RUNS * (sum(inside) + _GUARDED * len(inside)))
            else:
                del self._chosen[name]
        return found

    def left_alone(self) -> dict[str, str]:
        """Targets that communicate, draw, write, or cannot be run in another precision, and which of these."""
        return self._watched.left_alone()


def _any_microbatch(asked: Any) -> int:
    """A microbatch that is selected, for questions about the layer alone."""
    return 0 if asked.microbatches is None else (asked.microbatches.next_from(0) or 0)
