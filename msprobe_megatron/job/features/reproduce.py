"""The `reproduce` section: two jobs that start alike, whatever their layouts. Changes training, by definition.

Done once, at attach, on every rank and before the first step: seeds, deterministic kernels, dropout off, weights that
follow from their names and places alone. What a kit cannot do from here (the order of data of a loader that is not
Megatron-LM's, settings that libraries read when they start) is said, not skipped in silence.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from msprobe_megatron.config import ConfigError, ReproduceConfig
from msprobe_megatron.measure.hashed import bell, numbered_pieces, words
from msprobe_megatron.topology import names, seeds
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.names import NamedParameter
from msprobe_megatron.topology.parameters import parameter_spec

# Output layers of a residual block, which Megatron scales down by the depth.
_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "dense.weight", "dense_4h_to_h.weight")
_DROPOUTS = ("hidden_dropout", "attention_dropout", "dropout_p", "lora_dropout")
_NOISE = b"noise"


def reproduce(
    chunks: Sequence[nn.Module], optimizer: Any, asked: ReproduceConfig, where: Coordinates, source: str
) -> list[str]:
    """Do what the section asks; the answer says what was done and what could not be, one line each.

    Example::

        reproduce(chunks, optimizer, ReproduceConfig(weights="by_name"), coordinates.current(), "probe.yaml")
    """
    told = []
    if asked.seed is not None:
        told.append(_seed(asked.seed, where))
    if asked.deterministic != "false":
        told += _deterministic(asked.deterministic)
    if not asked.dropout:
        told.append(f"dropout off in {_no_dropout(chunks)} places")
    entries = [entry for chunk in chunks for entry in names.parameters(chunk)]
    if asked.weights == "by_name":
        told.append(_fill(entries, asked, where, source))
    if asked.noise_run:
        for entry in entries:
            _perturb(entry, asked, where, source)
        told.append("every weight moved by one unit in its last place: a run to give to compare --noise")
    if (asked.weights == "by_name" or asked.noise_run) and hasattr(optimizer, "reload_model_params"):
        optimizer.reload_model_params()  # the optimizer has its own copy of them
    return told


def _seed(seed: int, where: Coordinates) -> str:
    own = seeds.stage_seed(seed, where)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    for device in ("cuda", "npu"):
        found = getattr(torch, device, None)
        if found is not None and found.is_available():
            found.manual_seed_all(own)
    tracker = "Megatron's generators" if seeds.seed_tracker(seed, where) else "no generators of Megatron"
    data = (
        "the order of Megatron-LM's data"
        if seeds.seed_data(seed)
        else "the order of data is left to the loader: give both jobs the same"
    )
    return f"seed {seed}: Python, NumPy, torch, {tracker}; {data}"


def _deterministic(word: str) -> list[str]:
    torch.use_deterministic_algorithms(True, warn_only=word == "warn")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    told = ["deterministic kernels" + (", a warning where there is none" if word == "warn" else "")]
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        told.append("CUBLAS_WORKSPACE_CONFIG is not set and is read before this point: set it to :4096:8 for the job")
    return told


def _no_dropout(chunks: Sequence[nn.Module]) -> int:
    """Set every probability of dropout to zero, in modules and in what they keep of their settings."""
    changed = 0
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
                module.p = 0.0
                changed += 1
            for holder in (module, getattr(module, "config", None)):
                for name in _DROPOUTS:
                    if isinstance(getattr(holder, name, None), float) and getattr(holder, name):
                        setattr(holder, name, 0.0)
                        changed += 1
    return changed


def _fill(entries: Sequence[NamedParameter], asked: ReproduceConfig, where: Coordinates, source: str) -> str:
    """Weights from their names and places; those that hold one number everywhere (norms, biases) keep it."""
    kept = 0
    for entry in entries:
        weight = entry.parameter.detach()
        if not weight.numel() or bool((weight == weight.reshape(-1)[0]).all()):
            kept += 1
            continue
        deviation, key = _deviation(entry), _key(entry.name, asked.seed or 0)
        with torch.no_grad():
            for part, index in numbered_pieces(weight, _numbering(entry, where, source)):
                part.copy_(bell(words(index, key)) * deviation)
    return f"{len(entries) - kept} weights by name and place, {kept} that were constant as they were"


def _perturb(entry: NamedParameter, asked: ReproduceConfig, where: Coordinates, source: str) -> None:
    weight = entry.parameter.detach()
    if not weight.is_floating_point():
        return
    key, eps = _key(entry.name, asked.seed or 0, _NOISE), torch.finfo(weight.dtype).eps
    with torch.no_grad():
        for part, index in numbered_pieces(weight, _numbering(entry, where, source)):
            up = (words(index, key) & 1).to(torch.float64) * 2 - 1
            part.copy_(part.double().cpu() * (1 + eps * up))


def _deviation(entry: NamedParameter) -> float:
    """Standard deviation of a weight, as Megatron's own initialisation has it."""
    config = getattr(entry.owner.module, "config", None) or getattr(entry.owner.parent, "config", None)
    std = float(getattr(config, "init_method_std", None) or 0.02)
    layers = int(getattr(config, "num_layers", None) or 1)
    return std / math.sqrt(2.0 * layers) if entry.name.endswith(_OUTPUTS) else std


def _key(name: str, seed: int, purpose: bytes = b"weight") -> int:
    text = b"\0".join((purpose, str(seed).encode(), name.encode()))
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _numbering(entry: NamedParameter, where: Coordinates, source: str) -> Any:
    spec = parameter_spec(entry)
    found = index_map(spec, tuple(entry.parameter.shape), where.of, where.size)
    if found is None:
        raise ConfigError(
            f"{source}: reproduce: {entry.name} has no known place in the whole weight ({spec});"
            " accepted: weights: keep, and a common checkpoint"
        )
    return found
