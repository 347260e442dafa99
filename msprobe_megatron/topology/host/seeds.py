"""Seeding of Megatron's random generators the way Megatron does it, and of the order of its data."""

from __future__ import annotations

import sys

from msprobe_megatron.topology.coordinates import Coordinates, parallel_state
from msprobe_megatron.topology.host.framework import megatron_arguments


def stage_seed(seed: int, where: Coordinates) -> int:
    """Seed of a pipeline stage: Megatron gives every stage its own.

    Example::

        >>> stage_seed(7, Coordinates(pp=2, pp_size=4))
        207
    """
    return seed + 100 * where.pp


def seed_tracker(seed: int, where: Coordinates) -> bool:
    """Seed the tracker of tensor- and expert-parallel generators; False if the job has none."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None or parallel_state() is None:
        return False
    module.model_parallel_cuda_manual_seed(stage_seed(seed, where))
    return True


def seed_data(seed: int) -> bool:
    """Set the seed with which Megatron-LM shuffles its datasets, built after the model; False outside Megatron-LM."""
    arguments = megatron_arguments()
    if arguments is None or not hasattr(arguments, "seed"):
        return False
    arguments.seed = seed
    return True
