"""verl: attach to a Megatron engine once it is initialised; one session a model (actor, critic, reference).

    from msprobe_megatron.integrations.verl import attach_engine
    engine.initialize()
    attach_engine(engine, "probe.yaml", tag="actor")

All pipeline chunks are seen. Forwards for log-probabilities run with `forward_only=True` and are no training steps.
On NPU call it after MindSpeed's `repatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msprobe_megatron.job.session.session import Session


def attach_engine(engine: Any, config: Any = None, *, tag: str = "actor") -> Session:
    """Arm the engine's model chunks and, where it has one, its optimizer."""
    from msprobe_megatron import attach

    module = engine.module
    chunks = list(module) if isinstance(module, Sequence) else [module]
    return attach(chunks, getattr(engine, "optimizer", None), config, tag=tag)
