"""Finding out what lies in a directory: which iteration, and in which format."""

from __future__ import annotations

import re
from pathlib import Path

from msprobe_megatron.checkpoints.held import Checkpoint, CheckpointError, reading
from msprobe_megatron.checkpoints.legacy import open_legacy
from msprobe_megatron.checkpoints.torch_dist import open_torch_dist

_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{1,18})$")
_NAMED = re.compile(r"release|[0-9]{1,18}")


def open_checkpoint(path: str | Path, trust: bool = False) -> Checkpoint:
    """Open a checkpoint: its directory, or the directory of all checkpoints of a job (then the latest).

    Example::

        open_checkpoint("checkpoints/llama").form      # "torch_dist"
    """
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
        if (root / ".metadata").is_file():
            return open_torch_dist(root, iteration)
        if any(root.glob("mp_rank_*")):
            return open_legacy(root, iteration, trust)
    raise CheckpointError(
        f"{root}: neither .metadata (torch_dist) nor mp_rank_* (legacy); accepted: a directory iter_NNNNNNN"
        f" of Megatron, or one that holds {_LATEST}"
    )
