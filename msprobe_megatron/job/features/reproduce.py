"""Section `reproduce`: two jobs start from the same state, whatever their layouts. Changes training, by definition.

Applied once, at attach, on every rank before the first step: seeds, deterministic kernels, no dropout, weights that
depend on their names and positions only. What cannot be done from here (the data order of a loader that is not
Megatron-LM's, settings that libraries read when they start) is reported, not skipped silently.
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
from msprobe_megatron.job.measure.hashed import bell, numbered_pieces, words
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.host import seeds
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.names import NamedParameter
from msprobe_megatron.topology.shards_of.parameters import parameter_spec

# Output layers of a residual block, which Megatron scales down by the depth.
_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight", "dense.weight", "dense_4h_to_h.weight")
_DROPOUTS = ("hidden_dropout", "attention_dropout", "dropout_p", "lora_dropout")
_NOISE = b"noise"


def reproduce(
    chunks: Sequence[nn.Module], optimizer: Any, config: ReproduceConfig, where: Coordinates, source: str
) -> list[str]:
    """Apply the section; returns what was done and what could not be done, one line each."""
    done = []
    if config.seed is not None:
        done.append(_seed(config.seed, where))
    if config.deterministic != "false":
        done += _deterministic(config.deterministic)
    if not config.dropout:
        done.append(f"dropout set to zero in {_no_dropout(chunks)} places")
    entries = [entry for chunk in chunks for entry in names.parameters(chunk)]
    if config.weights == "by_name":
        done.append(_fill(entries, config, where, source))
    if config.noise_run:
        for entry in entries:
            _perturb(entry, config, where, source)
        done.append("every weight changed by one unit in the last place; use this run with compare --noise")
    if (config.weights == "by_name" or config.noise_run) and hasattr(optimizer, "reload_model_params"):
        optimizer.reload_model_params()  # the optimizer has its own copy of them
    return done


def _seed(seed: int, where: Coordinates) -> str:
    own = seeds.stage_seed(seed, where)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    for device in ("cuda", "npu"):
        found = getattr(torch, device, None)
        if found is not None and found.is_available():
            found.manual_seed_all(own)
    tracker = "Megatron's generators" if seeds.seed_tracker(seed, where) else "no Megatron generators found"
    data = (
        "the order of Megatron-LM's data"
        if seeds.seed_data(seed)
        else "the data order is up to the loader: use the same in both jobs"
    )
    return f"seed {seed}: Python, NumPy, torch, {tracker}; {data}"


def _deterministic(mode: str) -> list[str]:
    torch.use_deterministic_algorithms(True, warn_only=mode == "warn")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    done = ["deterministic kernels" + (", a warning where there is none" if mode == "warn" else "")]
    if torch.cuda.is_available() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        done.append("CUBLAS_WORKSPACE_CONFIG is not set and is read before this point: set it to :4096:8 for the job")
    return done


def _no_dropout(chunks: Sequence[nn.Module]) -> int:
    """Set every dropout probability to zero, in modules and in the configurations that they hold."""
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


def _fill(entries: Sequence[NamedParameter], config: ReproduceConfig, where: Coordinates, source: str) -> str:
    """Set weights by name and position; constant ones (norms, biases) are kept."""
    kept = 0
    for entry in entries:
        weight = entry.parameter.detach()
        if not weight.numel() or bool((weight == weight.reshape(-1)[0]).all()):
            kept += 1
            continue
        deviation, key = _deviation(entry), _key(entry.name, config.seed or 0)
        with torch.no_grad():
            for part, index in numbered_pieces(weight, _numbering(entry, where, source)):
                part.copy_(bell(words(index, key)) * deviation)
    return f"{len(entries) - kept} weights set by name and position, {kept} constant ones kept"


def _perturb(entry: NamedParameter, config: ReproduceConfig, where: Coordinates, source: str) -> None:
    weight = entry.parameter.detach()
    if not weight.is_floating_point():
        return
    key, eps = _key(entry.name, config.seed or 0, _NOISE), torch.finfo(weight.dtype).eps
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
