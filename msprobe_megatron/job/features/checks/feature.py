"""Section `checks`: ranks that should hold the same values are compared.

The training thread takes 64-bit digests of weights, gradients and generators when the optimizer is about to step; a
thread of its own exchanges them with the other ranks and compares (`comparer`). Messages go through the job's store: no
collective is added, so none can hang.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from msprobe_megatron.config import ChecksConfig, ConfigError
from msprobe_megatron.job import devices
from msprobe_megatron.job.features.alerts.feature import AlertsFeature
from msprobe_megatron.job.features.checks.collectives import CollectiveTaker
from msprobe_megatron.job.features.checks.comparer import Comparer, Member, Snapshot
from msprobe_megatron.job.features.feature import Feature, JobContext
from msprobe_megatron.job.measure.measurer import Measurer
from msprobe_megatron.job.record.slots import SlotTable
from msprobe_megatron.job.store import job_store
from msprobe_megatron.topology.coordinates import all_ranks
from msprobe_megatron.topology.host.generators import generators
from msprobe_megatron.topology.names import parameters
from msprobe_megatron.topology.replicas import ReplicaGroup, Shared, replica_groups, tensor_parallel_ranks
from msprobe_megatron.topology.shards_of.dtensors import local_part
from msprobe_megatron.topology.shards_of.grad_buffers import reduced_range
from msprobe_megatron.topology.shards_of.optimizers import inner, leaves, owned

_GRADIENTS_OF = {"dp-cp": "whole", "edp": "whole", "embedding": "whole", "tp": "same range", "etp": "same range"}


class ChecksFeature(Feature):
    """Compares the ranks of every group of replicas, every `every` steps.

    Probe file::

        checks:
          every: 100
          collectives: true
    """

    name = "checks"

    def __init__(self, job: JobContext, config: ChecksConfig, alerting: AlertsFeature) -> None:
        self._job, self._config = job, config
        self._device = devices.select()
        self._slots = SlotTable.on(self._device, job.config.limits.host_memory // 8, digest=True)
        self._measure = Measurer(self._slots, digest=True)
        groups = replica_groups(job.chunks)
        self._groups = [group for group in groups if self._selected(group.ranks)]
        left_out = [group.label for group in groups if group not in self._groups]
        self._notes = [f"ranks of {label} groups are not all selected: not compared" for label in left_out]
        for text in self._notes:
            job.say(f"checks: {text}", "unseen")
        self._number = 0
        self._collectives = (
            CollectiveTaker(self._digest_slot, self._selected, job.fault) if config.collectives else None
        )
        store = job_store() if self._groups or (config.collectives and job.where.world > 1) else None
        self._comparer = Comparer(job, store, alerting.disagreement) if store is not None else None

    def _selected(self, ranks: tuple[int, ...]) -> bool:
        """True if all these ranks run checks: the same answer on each of them, from the probe file alone."""
        chosen = self._job.config.ranks
        if not chosen.axes:
            return all(rank in chosen.ranks for rank in ranks)
        table = all_ranks(self._job.where)
        if table is None:
            raise ConfigError(
                f"{self._job.config.source}: ranks: coordinates of other ranks are not known in this placement, which"
                " checks need; accepted: all, or numbers of ranks"
            )
        return all(chosen.selects(rank, table[rank].position()) for rank in ranks)

    def next_from(self, step: int) -> int | None:
        """Every `every` steps, and every step that is dumped."""
        return next_checked(self._job, self._config.every, step) if self._comparer is not None else None

    def describe(self) -> str:
        """Which groups are compared."""
        labels = ", ".join(dict.fromkeys(group.label for group in self._groups))
        return f"comparing ranks over {labels or 'nothing: one rank'} every {self._config.every} steps"

    def begin(self) -> None:
        """A checked step begins."""
        if self._collectives is not None:
            self._collectives.install()

    def remove(self) -> None:
        """Unsubscribe from communication."""
        if self._collectives is not None:
            self._collectives.remove()

    def finish(self, complete: bool) -> None:
        """The step is over; a step that was cut short is not compared."""
        self.remove()
        if not complete:
            self._slots.seal()

    def before_optimizer(self) -> None:
        """Gradients are reduced: take the digests of weights and gradients and queue them for comparison."""
        if self._comparer is None:
            return
        exchanged = self._collectives.take() if self._collectives is not None else None
        known: dict[tuple[str, int], int] = {}
        members = [self._member(group, known) for group in self._groups]
        snapshot = Snapshot(self._number, self._job.clock.step, self._slots.seal(), members, self._ranges(), exchanged)
        self._number += 1
        self._comparer.take(snapshot)

    def _member(self, group: ReplicaGroup, known: dict[tuple[str, int], int]) -> Member:
        entries: list[tuple[str, str, int]] = []
        if self._config.replicas:
            for shared in group.shared:
                entries.append(("parameter", shared.name, self._slot("parameter", shared.parameter, known)))
            for shared in group.shared:
                gradient = _gradient(group, shared)
                if gradient is not None:
                    entries.append(("grad_reduced", shared.name, self._slot("grad_reduced", gradient, known)))
        words = {"step": self._job.clock.step} if self._config.optimizer else {}
        if self._config.optimizer and group.label != "embedding":
            words["learning rate"] = _word(_rates(self._job.optimizer))
        own = 0
        if self._config.rng and group.ranks == tensor_parallel_ranks():
            found = generators(self._device.device)
            words.update({f"generator {name}": value for name, value in found.common.items()})
            own = next(iter(found.own.values()), 0)
        names = frozenset(shared.name for shared in group.shared)
        return Member(group.label, group.ranks, entries, words, own, names)

    def _slot(self, kind: str, tensor: torch.Tensor, known: dict[tuple[str, int], int]) -> int:
        """The slot with the digest of a tensor, which several groups may share; -1 if it cannot be measured."""
        tensor = local_part(tensor)
        key = (kind, tensor.data_ptr())
        if key in known and tensor.numel():
            return known[key]
        known[key] = self._digest_slot(tensor)
        return known[key]

    def _digest_slot(self, tensor: torch.Tensor) -> int:
        slot = self._slots.take()
        return slot if slot >= 0 and self._measure(local_part(tensor), slot) else -1

    def _ranges(self) -> dict[str, tuple[int, int, int]] | None:
        """The part of each parameter that this rank's optimizer updates: start, stop, size. At the first check only."""
        if self._number or not self._config.optimizer:
            return None
        names = {id(entry.parameter): entry.name for chunk in self._job.chunks for entry in parameters(chunk)}
        return {
            names[id(entry.parameter)]: (*entry.part, entry.parameter.numel())
            for entry in owned(self._job.optimizer)
            if entry.part is not None and id(entry.parameter) in names
        }

    def close(self) -> None:
        """Finish queued comparisons, for a limited time."""
        if self._comparer is not None:
            self._comparer.close()

    def ledger(self) -> dict[str, Any]:
        """Which groups were compared, and which were not."""
        found = {"groups": {group.label: list(group.ranks) for group in self._groups}, "notes": self._notes}
        return {**found, **(self._comparer.ledger() if self._comparer is not None else {})}


def next_checked(job: JobContext, every: int, step: int) -> int:
    """The next step that is checked: every so many, and those that the probe file dumps, for laws that need both."""
    regular = step + (-step) % every
    dumped = job.config.steps.next_from(step) if job.config.dump is not None else None
    return regular if dumped is None else min(regular, dumped)


def _gradient(group: ReplicaGroup, shared: Shared) -> torch.Tensor | None:
    """The reduced gradient, where the members of the group hold the same part of it."""
    main: torch.Tensor | None = getattr(shared.parameter, "main_grad", None)
    value = main if main is not None else shared.parameter.grad
    if value is None:
        return None
    part = reduced_range(shared.chunk, shared.parameter)
    if part is None:
        return value
    # Each data parallel rank holds another shard; buffers of two stages are cut differently.
    if _GRADIENTS_OF.get(group.label) != "same range" or part[0] == part[1]:
        return None
    return value.reshape(-1)[part[0] : part[1]]


def _rates(optimizer: Any) -> list[float]:
    groups = [group for leaf in leaves(optimizer) for group in getattr(inner(leaf), "param_groups", ())]
    return sorted({float(group["lr"]) for group in groups if not isinstance(group.get("lr"), torch.Tensor)})


def _word(numbers: list[float]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
