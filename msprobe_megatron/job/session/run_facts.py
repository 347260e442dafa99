"""Metadata of a run: run.json once, and one small file per rank.

No rank waits for another. Rank 0 writes what it knows at the start, every rank its own file at the start and at the
end; readers merge them, so that the run of a job that was killed is complete too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from msprobe_megatron.config import ProbeConfig
from msprobe_megatron.topology import names
from msprobe_megatron.topology.coordinates import Coordinates, all_ranks
from msprobe_megatron.topology.host import framework, provenance
from msprobe_megatron.topology.host.blind_spots import compiled, reducers, unseen, untried
from msprobe_megatron.topology.host.constants import module_constants
from msprobe_megatron.topology.host.effective import effective_settings
from msprobe_megatron.topology.layers import layer_of
from msprobe_megatron.topology.shards_of.activations import ChunkLayout
from msprobe_megatron.topology.shards_of.declared import unanswered

FORMAT = 1


def run_facts(
    config: ProbeConfig,
    where: Coordinates,
    chunks: Sequence[nn.Module],
    arguments: Any,
    tag: str | None,
    optimizer: Any = None,
) -> dict[str, Any]:
    """Contents of run.json at the start of a run."""
    if arguments is None:
        arguments = framework.megatron_arguments()
    table = all_ranks(where)
    model_config = getattr(names.unwrap(chunks[0]), "config", None) if chunks else None
    versions = framework.versions()
    release = versions.get("megatron-core")
    return {
        "format": FORMAT,
        "tag": tag,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions,
        "environment": provenance.environment(),
        "sources": provenance.sources(),
        "world": where.world,
        "sizes": {**where.sizes(), "vpp": max(1, len(chunks))},
        "sequence_parallel": bool(chunks) and ChunkLayout.of(chunks[0]).sequence_parallel,
        "gradient_scale": gradient_scale(where, model_config),
        "ranks": [c.as_dict() for c in table] if table is not None else [where.as_dict()],
        "ranks_complete": table is not None,
        "recompute": _recompute(model_config),
        "unseen": [*unseen(arguments, model_config), *untried(release), *compiled(chunks), *reducers(chunks)],
        "seed": getattr(arguments, "seed", None),
        "arguments": framework.plain(arguments) if arguments is not None else {},
        "effective": _effective(chunks, optimizer),
        "probe": {"file": config.source, "content": config.raw, "notes": list(config.notes)},
    }


def _effective(chunks: Sequence[nn.Module], optimizer: Any) -> dict[str, Any]:
    """The configuration objects; those of a stranger's model may raise, which must not cost the run its facts."""
    try:
        return effective_settings(chunks, optimizer)
    except Exception as error:
        return {"problem": f"{type(error).__name__}: {error}"[:200]}


def gradient_scale(where: Coordinates, model_config: Any) -> float | None:
    """Ratio of the activation gradients of this layout to those of the mean loss over the global batch.

    Each data-parallel rank averages over its own samples (and each context-parallel rank over its own tokens), and
    the factor is taken out only when weight gradients are averaged. None when gradients are summed per token
    and divided at the end, by a number that is not known before.
    """
    if getattr(model_config, "calculate_per_token_loss", False):
        return None
    return float(where.dp_size * where.cp_size)


def _recompute(model_config: Any) -> dict[str, Any]:
    keys = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    return {key: getattr(model_config, key, None) for key in keys}


def rank_facts(
    config: ProbeConfig, where: Coordinates, chunks: Sequence[nn.Module], closed: bool, ledger: dict[str, Any]
) -> dict[str, Any]:
    """Contents of this rank's own file, at the start and at the end; readers compare it between ranks."""
    probe = hashlib.sha256(repr(config.raw).encode()).hexdigest()[:16]
    own = {"versions": framework.versions(), "probe": probe, "clock": int(time.time())}
    return {
        "coordinates": where.as_dict(),
        "chunks": chunk_facts(chunks),
        "own": own,
        "constants": module_constants(chunks),
        "undeclared": unanswered(),
        "closed": closed,
        "ledger": ledger,
    }


def chunk_facts(chunks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The layers of each chunk of this rank, and whether it has the first or last stage of the model."""
    found = []
    for index, chunk in enumerate(chunks):
        layers = sorted({n for entry in names.modules(chunk) if (n := layer_of(entry.name)) is not None})
        layout = ChunkLayout.of(chunk)
        found.append(
            {
                "vpp": index,
                "class": type(names.unwrap(chunk)).__name__,
                "layers": layers,
                "first": layout.pre_process,
                "last": layout.post_process,
            }
        )
    return found
