"""What a checkpoint holds: tensors by kind and canonical name, each put together only when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARAMETER = "parameter"
BUFFER = "optimizer_buffer"
"""State of the distributed optimizer as it lies in its own buffers: comparable only within one layout."""

Key = tuple[str, str]
"""Kind (parameter, exp_avg, exp_avg_sq, master, ...) and canonical name."""


class CheckpointError(Exception):
    """A directory that cannot be read as a checkpoint; the text says what is wrong with which file."""


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Whatever goes wrong while something of a stranger's is read is about that file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can fail anywhere, in torch's unpickler too
        words = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{what}: damaged, or not a checkpoint: {type(error).__name__}: {words}") from error


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor. `load` gives the whole of it; `reason` says why it cannot, and is empty where it can."""

    shape: tuple[int, ...]
    load: Callable[[], Any]
    """A tensor of torch, or a `View` where the file is read without torch."""
    reason: str = ""


@dataclass
class Checkpoint:
    """A checkpoint of one iteration."""

    path: Path
    form: str
    iteration: int | None
    tensors: dict[Key, CheckpointTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """config.json of a checkpoint of Hugging Face."""
