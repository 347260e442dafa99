"""What a run writes about itself: run.json once, and one small file a rank.

No rank waits for another. Rank 0 writes what it knows at the start, and at the end adds what the other ranks have
left in their own files by then; readers do the same merge, so that a job that was killed is complete too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from torch import nn

from msprobe_megatron.config import ProbeConfig, StepSelection
from msprobe_megatron.topology import host, names, provenance
from msprobe_megatron.topology.activations import ChunkLayout
from msprobe_megatron.topology.blind_spots import compiled, reducers, unseen, untried
from msprobe_megatron.topology.coordinates import Coordinates, all_ranks
from msprobe_megatron.topology.layers import layer_of

FORMAT = 1


def run_facts(
    config: ProbeConfig, where: Coordinates, chunks: Sequence[nn.Module], arguments: Any, tag: str | None
) -> dict[str, Any]:
    """Contents of run.json at the start of a run."""
    if arguments is None:
        arguments = host.megatron_arguments()
    table = all_ranks(where)
    model_config = getattr(names.unwrap(chunks[0]), "config", None) if chunks else None
    versions = host.versions()
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
        "arguments": host.plain(arguments) if arguments is not None else {},
        "probe": {"file": config.source, "content": config.raw, "notes": list(config.notes)},
    }


def gradient_scale(where: Coordinates, model_config: Any) -> float | None:
    """Factor between the activation gradients of this layout and those of the mean loss over the global batch.

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
    """Contents of this rank's own file, at the start and at the end; readers see from it which ranks disagree."""
    probe = hashlib.sha256(repr(config.raw).encode()).hexdigest()[:16]
    own = {"versions": host.versions(), "probe": probe, "clock": int(time.time())}
    return {
        **{"coordinates": where.as_dict(), "chunks": chunk_facts(chunks), "own": own},
        **{"closed": closed, "ledger": ledger},
    }


def chunk_facts(chunks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """Which layers and ends of the model each chunk of this rank holds."""
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


def missing_steps(asked: StepSelection, recorded: Sequence[int], last: int, *, selects_nothing: bool) -> list[str]:
    """What was asked and did not happen on a rank whose last step was `last`, in words for the user.

    Example::

        missing_steps(parse_steps("1,40"), [1], 3, selects_nothing=False)
        # ["step 40 was asked for and never reached; last step was 3"]
    """
    found = []
    following = asked.next_from(max(recorded) + 1) if recorded else None
    if not recorded:
        found.append(f"no step was recorded; asked: {asked.describe()}, last step was {last}")
    elif following is not None and asked.is_finite:
        found.append(f"step {following} was asked for and never reached; last step was {last}")
    if selects_nothing:
        found.append("no module or parameter of this rank is selected")
    return found
