"""What was really configured: the configuration objects of the model, of data parallelism and of the optimizer.

Frameworks on top of Megatron (Bridge, verl, slime, ms-swift) have no training arguments that could be read; what counts
is what the objects hold when training begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from msprobe_megatron.topology.host.framework import plain
from msprobe_megatron.topology.names import unwrap

# Settings that Megatron's model keeps beside its configuration.
_OF_MODEL = (
    "rotary_base",
    "rotary_percent",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
    "vocab_size",
    "max_sequence_length",
    "parallel_output",
)
_LONGEST = 4096


def effective_settings(chunks: Sequence[nn.Module], optimizer: Any) -> dict[str, Any]:
    """Settings by object: `class` and `model`, and as far as they exist `ddp` and `optimizer`."""
    if not chunks:
        return {}
    model = unwrap(chunks[0])
    found: dict[str, Any] = {"class": type(model).__name__, "model": settings_of(getattr(model, "config", None))}
    base = getattr(getattr(model, "rotary_pos_emb", None), "rotary_base", None)
    own = {name: getattr(model, name) for name in _OF_MODEL if hasattr(model, name)}
    found["model"].update(plain({k: v for k, v in own.items() if isinstance(v, bool | int | float | str)}))
    if base is not None and "rotary_base" not in found["model"]:
        found["model"]["rotary_base"] = base
    for name, holder in (("ddp", _attribute(chunks[0], "ddp_config")), ("optimizer", _of_optimizer(optimizer))):
        settings = settings_of(holder)
        if settings:
            found[name] = settings
    return found


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a configuration object as plain values; empty for what is none."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        values = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    elif callable(getattr(config, "to_dict", None)):
        values = config.to_dict()
    else:
        values = dict(vars(config)) if hasattr(config, "__dict__") else {}
    return plain({name: _named(value) for name, value in values.items() if not str(name).startswith("_")})


def _named(value: Any) -> Any:
    """Functions by their names: their text has an address, which differs in every process."""
    if callable(value) and not isinstance(value, type):
        inner = getattr(value, "func", value)
        return f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', type(inner).__name__)}"
    if isinstance(value, list | tuple) and len(value) > _LONGEST:
        return f"{len(value)} values"
    return value


def _attribute(chunk: Any, name: str) -> Any:
    """An attribute of a wrapped model, of the outermost wrapper that has it."""
    while chunk is not None:
        if name in getattr(chunk, "__dict__", {}):
            return getattr(chunk, name)
        chunk = getattr(chunk, "module", None) if isinstance(getattr(chunk, "module", None), nn.Module) else None
    return None


def _of_optimizer(optimizer: Any) -> Any:
    inner = getattr(optimizer, "chained_optimizers", None)
    return getattr(inner[0] if inner else optimizer, "config", None)
