"""Finding out what lies in a directory: which iteration, and in which format."""

from __future__ import annotations

import re
from pathlib import Path

from msprobe_megatron.analysis.checkpoints.held import Checkpoint, CheckpointError, reading
from msprobe_megatron.analysis.checkpoints.safetensors_files import holds_safetensors, open_safetensors

_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{1,18})$")
_NAMED = re.compile(r"release|[0-9]{1,18}")


def open_checkpoint(path: str | Path, trust: bool = False) -> Checkpoint:
    """Open a checkpoint: its directory, or the directory of all checkpoints of a job (then the latest)."""
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root}: not a directory; expected a checkpoint of Megatron")
    latest = root / _LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not _NAMED.fullmatch(text):  # above all not a path
            raise CheckpointError(f"{latest}: names {text[:40]!r}; accepted: a number, or release")
        root = root / ("release" if text == "release" else f"iter_{int(text):07d}")
        if not root.is_dir():
            raise CheckpointError(f"{latest}: names {text!r}, and {root} is not there")
    number = _ITERATION.search(root.name)
    iteration = int(number[1]) if number else None
    with reading(root):
        # torch is imported only for the formats that need it.
        if (root / ".metadata").is_file():
            from msprobe_megatron.analysis.checkpoints.torch_dist import open_torch_dist

            return open_torch_dist(root, iteration)
        if any(root.glob("mp_rank_*")):
            from msprobe_megatron.analysis.checkpoints.legacy import open_legacy

            return open_legacy(root, iteration, trust)
        if holds_safetensors(root):
            return open_safetensors(root)
    raise CheckpointError(
        f"{root}: neither .metadata (torch_dist) nor mp_rank_* (legacy) nor *.safetensors; accepted: a directory"
        f" iter_NNNNNNN of Megatron, one that holds {_LATEST}, or a model of Hugging Face"
    )
