"""The random numbers of "cuda" are those of the CPU generator: dropout and initialisation draw from it, so
Megatron's tracker has to save and restore that very state. A data loader's seed, which a real device would not see,
is drawn without moving it: only one rank of a TP group loads data, and the others must drop the same elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader

from msprobe_megatron.job.devices.megatron_on_cpu.substitute import substitute


class _Generators:
    """`torch.cuda.default_generators`: every index is the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _get_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _get_states() -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def _set_states(new_states: list[torch.Tensor]) -> None:
    torch.set_rng_state(new_states[0])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _call_now(callable: Callable[[], Any], **kwargs: Any) -> None:  # noqa: A002 (torch's own name)
    callable()


def _without_moving(original: Callable[..., Any]) -> Callable[..., Any]:
    """A constructor that leaves the generator as it found it."""

    def construct(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(*args, **kwargs)
        finally:
            torch.set_rng_state(state)

    return construct


class _NotAFault(logging.Filter):
    """Megatron warns when host numbers are drawn where device numbers should be; here they are the same ones."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def install() -> None:
    """Replace the seeding functions.

    `_lazy_call` queues its callback until CUDA starts, which never happens here: Megatron would restore RNG
    states into nothing.
    """
    owners = (torch.cuda, torch.cuda.random)
    substitute(owners, "get_rng_state", _get_state)
    substitute(owners, "set_rng_state", _set_state)
    substitute(owners, "get_rng_state_all", _get_states)
    substitute(owners, "set_rng_state_all", _set_states)
    substitute(owners, "manual_seed", _seed)
    substitute(owners, "manual_seed_all", _seed)
    substitute(owners, "_lazy_call", _call_now)
    torch.cuda.default_generators = _Generators()  # type: ignore[assignment]
    loader = torch.utils.data.dataloader._BaseDataLoaderIter
    substitute((loader,), "__init__", _without_moving(loader.__init__))
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_NotAFault())
