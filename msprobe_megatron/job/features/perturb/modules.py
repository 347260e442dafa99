"""Whole modules examined or replaced as one operator: a norm, a router, the core of attention.

Where a module makes several calls, each of them may be right and the module wrong: a variance as the difference of two
large numbers is the textbook case. The module is run again with its parameters and inputs in the next precision, again
on nudged inputs, whose result shows how much this computation may lose, and once more as it is. Always under the guard:
a module that communicates, draws random numbers or writes is skipped from then on.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from msprobe_megatron.config import ConfigError, PerturbConfig
from msprobe_megatron.job.features.feature import JobContext
from msprobe_megatron.job.features.perturb.examiner import CheckRunner, outputs
from msprobe_megatron.job.features.perturb.fix import ModuleFix
from msprobe_megatron.job.features.perturb.judge import checks
from msprobe_megatron.job.features.perturb.judge.checks import CheckedCall
from msprobe_megatron.job.features.perturb.judge.tolerance import HALF, WORKING, compare_rows, nudge
from msprobe_megatron.job.features.perturb.judge.verdict import COLUMN, REFERENCE
from msprobe_megatron.job.features.perturb.run.changed_inputs import (
    Change,
    Numbering,
    convert,
    find_sibling,
    higher,
    module_twin,
    on_host,
    single,
)
from msprobe_megatron.job.features.perturb.run.references import count_rows
from msprobe_megatron.job.features.perturb.run.rerun import CannotRun, Rerunner, hooks_off
from msprobe_megatron.job.features.perturb.select.selecting import Cost, Selection
from msprobe_megatron.job.features.perturb.whole_modules import WholeModule, WholeModuleExaminer, recognize
from msprobe_megatron.job.sites.calls.arguments import untraced
from msprobe_megatron.job.sites.calls.rerunnable import Pass
from msprobe_megatron.job.sites.module.hooks import HookedSite
from msprobe_megatron.topology import names
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.shards_of.activations import ChunkLayout, activation_spec
from msprobe_megatron.topology.shards_of.inner_activations import inner_numbering

# Composite modules of Megatron that neither communicate nor, without dropout, draw random numbers.
_KNOWN = ("core_attention", "router")
_SUM = COLUMN["input_sum"]
# Four runs, two of them in a precision that takes several times as long.
_RUNS = 12.0
# Microseconds of an examination, of each call under the guard, and of a comparison with a reference: at least, and per
# element of the rows.
_EXAMINED, _GUARDED, _REFERENCE, _ELEMENT = 3000.0, 60.0, 300.0, 0.15


class Numberings:
    """Which elements of the whole tensor this rank holds, of the inputs of modules and of the calls inside them."""

    def __init__(self, job: JobContext) -> None:
        self._where = job.where
        self._entries: dict[str, tuple[names.NamedModule, ChunkLayout]] = {}
        for chunk in job.chunks:
            layout = ChunkLayout.of(chunk)
            self._entries.update((entry.name, (entry, layout)) for entry in names.modules(chunk))

    def of_module(self, name: str, x: torch.Tensor) -> Numbering | None:
        """Of the first input of a module."""
        entry, layout = self._entries[name]
        path = next(iter(inspect.signature(entry.module.forward).parameters), "")
        where = self._where
        spec = activation_spec(entry, "input", path, x.dim(), layout).only(lambda axis: where.size(axis) > 1)
        return index_map(spec, tuple(x.shape), where.of, where.size)

    def of_call(self, where: Pass, x: torch.Tensor, kind: str) -> Numbering | None:
        """Of a tensor that a call inside of a module gets; None: unknown, so it keeps its local index."""
        known = self._entries.get(where.module)
        if known is None:
            return None
        factor = "" if kind != "gemm" else "backward" if where.phase == "backward" else "forward"
        of, size = self._where.of, self._where.size
        found = inner_numbering(known[0], tuple(x.shape), known[1], of, size, factor=factor)
        # A tensor with the shape of the module's first input is taken to have its layout.
        return self.of_module(where.module, x) if found is None and where.shape == x.shape else found


def examinable(name: str, module: nn.Module) -> bool:
    """Whether a module is examined by default: one without children that is not a single call of torch.

    Example::

        >>> examinable("decoder.layers.0.input_layernorm", torch.nn.LayerNorm(4))
        False
    """
    if name.rpartition(".")[2] in _KNOWN:
        return True
    if type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None:
        return False
    return type(module).__name__ not in ("IdentityOp", "IdentityFuncOp", "ColumnParallelLinear", "RowParallelLinear")


class ModuleExaminer:
    """Examines modules through forward hooks."""

    def __init__(self, runner: CheckRunner, numberings: Numberings) -> None:
        self._runner, self._numberings, self._config = runner, numberings, runner.config
        self._rerun = Rerunner()
        self.skipped: dict[str, str] = {}
        """Modules that communicate, draw, write, or cannot be run in another precision, with the reason."""
        self._check = self._precision if runner.profile == "ulp" else checks.as_msprobe(self._config.mode)
        if runner.profile == "ulp" and self._config.mode not in ("improve_precision", "to_cpu"):
            self._check = checks.ULP[self._config.mode]

    def watch(self, name: str, module: nn.Module, now: Callable[[], Pass | None]) -> Any:
        """Set the hook; `now` gives the pass in which a call is made, or None if it is not selected."""

        # A hook that is removed while torch iterates over the hooks is still called, then without the kwargs.
        def hook(_: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
            where = now() if len(kwargs_and_output) > 1 else None
            if where is None or name in self.skipped:
                return
            try:
                with untraced(), torch.no_grad():
                    self._examine(name, module, where, args, *kwargs_and_output)
            except Exception as error:
                self._runner.fault(error, f"examination of {name}")

        return module.register_forward_hook(hook, with_kwargs=True)

    def _examine(self, name: str, module: nn.Module, where: Pass, args: Any, kwargs: Any, output: Any) -> None:
        refused, found = Counter(self._rerun.refusals), len(self._runner.found)
        op = type(module).__name__
        for path, live, pick in outputs(output):
            change = self._change(live.dtype)

            def run(some: tuple[Any, ...], more: dict[str, Any], change: Change | None = change) -> Any:
                with hooks_off(module):
                    if some is args or change is None:
                        return self._rerun.run(module.forward, some, more, watch=True)
                    return self._rerun.run(module_twin(module, change), some, more, watch=True)

            call = CheckedCall(
                op,
                "module",
                args,
                kwargs,
                live,
                pick,
                run,
                rows=0,
                ulps=self._config.ulps,
                stage=self._config.stage,
                numbering=lambda x: self._numberings.of_module(name, x),
                parameters=tuple(p for p in module.parameters() if p.is_floating_point()),
            )
            self._runner.examine(call, name, 0, where, path, check=self._check_of(name))
        if len(self._runner.found) == found:
            reason = next(iter(self._rerun.refusals - refused), self._runner.reasons.get(op))
            if reason is not None:
                self.skipped[name] = reason

    def _check_of(self, name: str) -> checks.Check:
        # A token on the edge of two experts goes to the other one in another precision: only `WholeModuleExaminer`,
        # which takes the choice as it is, can judge the values of a router.
        router = name.rpartition(".")[2] == "router" and self._check == self._precision
        return checks.repeat if router else self._check

    def _change(self, low: torch.dtype) -> Change | None:
        """How parameters are converted for the second run; None where only the inputs change."""
        if self._config.mode not in ("improve_precision", "to_cpu"):
            return None
        if self._runner.profile == "msprobe":
            return single if self._config.mode == "improve_precision" else on_host
        return _to(higher(low))

    def _precision(self, call: CheckedCall, line: torch.Tensor) -> None:
        checks.repeat(call, line)
        for parameter in call.parameters:
            line[_SUM] += parameter.detach().sum(dtype=torch.float32)
        low = call.live.dtype
        if low not in (*HALF, torch.float32):
            return
        high = higher(low)
        # A value that is kept in 16 bits between the calls of a module loses that much at each of them.
        by = torch.finfo(low).eps / 4 if low in HALF else WORKING

        def moved(x: torch.Tensor) -> torch.Tensor:
            return nudge(x.double(), by).to(high) if x.dtype is high else x

        args, kwargs = convert(call.args, _to(high)), convert(call.kwargs, _to(high))
        exact = call.pick(call.run(args, kwargs))
        if exact.dtype is low:
            raise CannotRun(f"it computes in {low} whatever it is given")
        nudged = call.pick(call.run(convert(args, moved), convert(kwargs, moved)))
        exact, nudged = exact.double(), nudged.double()
        compare_rows(call.live, exact, nudged, call.kind, 1, line[REFERENCE], by)


def _to(high: torch.dtype) -> Change:
    return lambda x: x.to(high) if x.is_floating_point() else x


class ModuleTargets(HookedSite):
    """The modules of a job that are examined or replaced as one operator."""

    def __init__(self, job: JobContext, runner: CheckRunner, selection: Selection, numberings: Numberings) -> None:
        super().__init__()
        self._job, self._runner, self._selection, self._config = job, runner, selection, runner.config
        self._modules: dict[str, nn.Module] = {}
        self._chosen: dict[str, int] = {}
        self._examiner = ModuleExaminer(runner, numberings)
        self._fix = ModuleFix(self._config.mode, self._config.stage)
        self._whole: dict[str, tuple[int, WholeModule]] = {}
        self._references = WholeModuleExaminer(runner)
        for index, chunk in enumerate(job.chunks):
            for entry in names.modules(chunk):
                self._modules[entry.name] = entry.module
                if self._is_target(entry):
                    self._chosen[entry.name] = index
                if self._is_compared(entry) and (found := recognize(entry, job.where.tp_size)) is not None:
                    self._whole[entry.name] = index, found
        self._validate(job)

    def _is_compared(self, entry: names.NamedModule) -> bool:
        """Whether a module is held against a reference, if it is of a known kind."""
        config = self._config
        if self._runner.profile != "ulp" or config.stage != "forward" or config.handler != "check":
            return False
        if config.mode not in ("improve_precision", "to_cpu") or not (config.whole or config.modules):
            return False
        wanted = self._selection.module(entry.name) if config.modules else True
        return wanted and self._selection.place(entry.name, _any_microbatch(config))

    def _is_target(self, entry: names.NamedModule) -> bool:
        config = self._config
        if config.modules:
            wanted = self._selection.module(entry.name)
        else:
            by_default = config.whole and config.stage == "forward" and config.handler == "check"
            wanted = by_default and self._runner.profile == "ulp" and examinable(entry.name, entry.module)
        return wanted and self._selection.place(entry.name, _any_microbatch(config))

    def _validate(self, job: JobContext) -> None:
        """Refuse a name without a match if no other rank can have one, and a fix that only some ranks would make."""
        config, where = self._config, job.where
        if config.modules and where.pp_size == 1 and where.ep_size == 1 and not self._chosen:
            some = ", ".join(list(self._modules)[:6])
            raise ConfigError(
                f"{job.config.source}: perturb.modules: {list(config.modules)} matches no module; accepted: part of a"
                f" name such as {some}"
            )
        if config.handler == "fix" and job.config.ranks.describe() != "all":
            raise ConfigError(
                f"{job.config.source}: ranks: {job.config.ranks.describe()}, but perturb.handler fix changes training"
                " and must be the same on every rank; accepted: ranks: all, or handler: check"
            )
        if config.modules and config.stage == "backward" and config.handler == "check":
            raise ConfigError(
                f"{job.config.source}: perturb.stage: the backward of whole modules is not examined; accepted: a list"
                " of API calls instead of modules, or stage: forward"
            )

    def install(self, chosen: Collection[str] | None) -> None:
        """Set the hooks of the chosen modules, or of all targets."""
        self.remove()
        self._active = True
        for name, chunk in self._chosen.items():
            if chosen is not None and name not in chosen:
                continue
            module = self._modules[name]
            if self._config.handler == "fix":
                self._fix.install(name, module, self._sibling(name), self._wanted(name))
            else:
                self._handles.append(self._examiner.watch(name, module, self._now(name, chunk)))
        for name, (chunk, target) in self._whole.items():
            if chosen is None or name in chosen:
                self._handles += self._references.watch(name, target, self._now(name, chunk))

    def remove(self) -> None:
        """Remove the hooks. Safe to call twice."""
        super().remove()
        self._fix.remove()

    def _sibling(self, name: str) -> nn.Module | None:
        if self._config.twin != "sibling":
            return None
        found = find_sibling(name, self._modules, layer_of(name))
        if found is None:
            raise ConfigError(
                f"{self._job.config.source}: perturb.twin: {name} has no module of its class in another layer of this"
                " rank; accepted: twin: precision"
            )
        return self._modules[found]

    def _wanted(self, name: str) -> Callable[[], bool]:
        clock, selection = self._job.clock, self._selection
        return lambda: self._active and selection.place(name, clock.calling()[1].microbatch)

    def _now(self, name: str, chunk: int) -> Callable[[], Pass | None]:
        clock = self._job.clock

        def now() -> Pass | None:
            phase, moment = clock.calling()
            only = self._runner.plan.microbatch
            if not self._active or phase != "forward" or (only is not None and moment.microbatch != only):
                return None
            if not self._selection.place(name, moment.microbatch):
                return None
            return Pass(name, chunk, phase, moment, {})

        return now

    def costs(self, calls: dict[str, Cost]) -> dict[str, Cost]:
        """Costs of the targets, from those of the calls inside; a target that makes a single call is dropped."""
        found = {}
        for name in list(self._chosen):
            inside = [cost.call for call, cost in calls.items() if call.startswith((f"{name}/", f"{name}."))]
            if len(inside) > 1 or self._config.modules:
                found[name] = Cost(0.0, _EXAMINED + _RUNS * (sum(inside) + _GUARDED * len(inside)))
            else:
                del self._chosen[name]
        for name in self._whole:
            own = _reference_cost(self._modules[name])
            found[name] = Cost(0.0, own + (found[name].examined if name in found else 0.0))
        return found

    def skipped(self) -> dict[str, str]:
        """Targets that communicate, draw, write, or cannot be run in another precision, with the reason."""
        return self._examiner.skipped


def _reference_cost(module: nn.Module) -> float:
    """Microseconds of a comparison with a reference, from the width of the model or of the module's weight."""
    width = getattr(getattr(module, "config", None), "hidden_size", None)
    weight = getattr(module, "weight", None)
    if not isinstance(width, int):
        width = weight.shape[-1] if isinstance(weight, torch.Tensor) and weight.dim() else 32
    return _REFERENCE + _ELEMENT * width * count_rows(1 << 14, width)


def _any_microbatch(config: PerturbConfig) -> int:
    """A selected microbatch, to query the selection of a layer alone."""
    return 0 if config.microbatches is None else (config.microbatches.next_from(0) or 0)
