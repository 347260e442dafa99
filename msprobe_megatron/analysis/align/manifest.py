"""Manifests of weights: a 64-bit digest for every weight under its canonical name, to check a copy of them elsewhere.

The trainer's side writes one from a run (`dump: {digest: true}`) or a checkpoint; the engine's side checks its own
weights against it in one call, `check(manifest, named_tensors, "hf:llama", config)`, whatever it has fused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.align.name_map import load_map
from msprobe_megatron.analysis.align.tensors import StepTensors
from msprobe_megatron.analysis.checkpoints.differ import as_view
from msprobe_megatron.analysis.checkpoints.held import PARAMETER, Checkpoint, CheckpointError, CheckpointTensor
from msprobe_megatron.analysis.checkpoints.mapped import map_for, mapped
from msprobe_megatron.analysis.checkpoints.opening import open_checkpoint
from msprobe_megatron.analysis.compare.merge import merge_plan
from msprobe_megatron.analysis.compare.pairs.elements import View
from msprobe_megatron.analysis.load.run import Run, RunError, open_run, read_json
from msprobe_megatron.run_directory.plain_digest import digest_of

FORMAT = "msprobe_megatron.weights"
Digests = dict[str, str]


def digests(path: str | Path, names: str | None = None) -> Digests:
    """Digests by canonical name of a run, of its last recorded step, or of a checkpoint of any format."""
    if (Path(path) / "run.json").is_file():
        return of_run(open_run(path))
    checkpoint = open_checkpoint(path)
    return of_checkpoint(mapped(checkpoint, map_for(checkpoint, names)) if checkpoint.settings else checkpoint)


def of_run(run: Run) -> Digests:
    """From the rows of a run: digests of shards add up, one of each group of replicas is taken."""
    tensors = StepTensors.of(run, max(run.dumped_steps or run.steps))
    found: Digests = {}
    for (kind, name, _, path), rows in tensors.rows.items():
        plan = merge_plan(rows[0]["shard"], run.sizes)
        if kind != "parameter" or path or plan.reason or any(row["digest"] is None for row in rows):
            continue
        parts = {plan.part(row): int(row["digest"]) for row in rows}
        if not plan.parts or len(parts) == plan.parts:
            found[name] = f"{sum(parts.values()) & (1 << 64) - 1:016x}"
    if not found:
        raise RunError(
            f"{run.path}: no digests of weights; accepted: a run with dump: {{digest: true}}, or a checkpoint"
        )
    return found


def of_checkpoint(checkpoint: Checkpoint) -> Digests:
    """From the weights of a checkpoint."""
    entries = {name: entry for (kind, name), entry in checkpoint.tensors.items() if kind == PARAMETER}
    return {name: f"{digest_of(as_view(e.load()).words):016x}" for name, e in sorted(entries.items()) if not e.reason}


def as_manifest(found: Digests, source: str) -> dict[str, Any]:
    """The manifest that is written."""
    return {"format": FORMAT, "version": 1, "source": source, "weights": dict(sorted(found.items()))}


def read_manifest(path: str | Path) -> Digests:
    """Digests of a manifest; raises `RunError` for what is none."""
    content = read_json(Path(path))
    weights = content.get("weights")
    if content.get("format") != FORMAT or not isinstance(weights, dict):
        raise RunError(f"{path}: is not a manifest; accepted: a file of msprobe-megatron weights PATH --manifest FILE")
    return {str(name): str(digest) for name, digest in weights.items()}


def differences(expected: Digests, found: Digests, lossy: Iterable[str] = ()) -> dict[str, list[str]]:
    """Weights that differ, and that one side lacks; parts of names in `lossy` (quantised weights) are left out."""
    skipped = [name for name in {*expected, *found} if any(part in name for part in lossy)]
    names = sorted(({*expected} | {*found}) - {*skipped})
    return {
        "differ": [n for n in names if n in expected and n in found and expected[n] != found[n]],
        "missing": [n for n in names if n not in found],
        "unexpected": [n for n in names if n not in expected],
        "lossy": sorted(skipped),
    }


def _on_host(tensor: Any) -> View:
    return as_view(tensor.detach().cpu())


def check(
    manifest: str | Path,
    tensors: Iterable[tuple[str, Any]],
    names: str,
    settings: Mapping[str, Any],
    lossy: Iterable[str] = (),
) -> dict[str, list[str]]:
    """Check the weights of a model (`model.named_parameters()`), whole and under names of Hugging Face or an engine.

    `settings` is the configuration of the model (heads, experts). Reads every weight to the host once.
    """
    held = {
        (PARAMETER, name): CheckpointTensor(tuple(tensor.shape), partial(_on_host, tensor)) for name, tensor in tensors
    }
    own = Checkpoint(Path("model"), "memory", None, held, settings=dict(settings))
    found = mapped(own, load_map(names))
    if not found.tensors:
        raise CheckpointError(f"no weight is in the map {names}; accepted: the map of this model")
    return differences(read_manifest(manifest), of_checkpoint(found), lossy)
