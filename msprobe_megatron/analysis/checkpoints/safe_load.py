"""`torch.load` with weights_only, for files that hold more than weights.

A legacy checkpoint of Megatron also holds its arguments and the states of random generators. Classes in it are never
imported: `argparse.Namespace` is the real one, what belongs to Megatron, torch and NumPy becomes an empty stand-in, and
anything else is refused by name unless the user says to trust the file, and then it becomes a stand-in too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import IO, Any

import torch

from msprobe_megatron.analysis.checkpoints.held import CheckpointError

_MOST_ENTRIES = 1 << 22
_MOST_REPEATED = 64 << 20
"""Bytes of a tensor that its file need not hold: one element can be said to stand for 10^12."""
_KNOWN = ("megatron.", "numpy.", "torch.", "signal.", "collections.", "modelopt.")
# The latter is how Python 3.11.0 to 3.11.3 write a member of an Enum; a stand-in takes its place too and gets nothing.
_KNOWN_WHOLE = ("argparse.Namespace", "builtins.getattr")


class StandIn:
    """In place of an object of a class that was not imported."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.arguments = arguments

    def __new__(cls, *arguments: Any, **more: Any) -> StandIn:
        """Whatever the file hands over is taken and kept from doing anything."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_file(path: Path, trust: bool = False) -> Any:
    """Everything in a file of torch.save; tensors are mapped, not read, where the file allows it."""
    names = unknown_classes(path)
    odd = [name for name in names if name not in _KNOWN_WHOLE and not name.startswith(_KNOWN)]
    if odd and not trust:
        raise CheckpointError(
            f"{path}: holds objects of {', '.join(sorted(odd)[:5])}; accepted: tensors, plain values and what Megatron"
            " writes. --trust reads it with these left empty"
        )
    allowed: list[Any] = [argparse.Namespace, *(_stand_in(name) for name in names if name != "argparse.Namespace")]
    try:
        with torch.serialization.safe_globals(allowed):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # the unpickler has its own kinds of errors, which differ between releases
        raise CheckpointError(f"{path}: cannot be read: {_in_short(error)}") from error
    _refuse_claims(content, path)
    return content


def _refuse_claims(content: Any, path: Path) -> None:
    """Raise if a few bytes of the file stand for more than anybody has memory for."""
    entries, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        entries += 1
        if entries > _MOST_ENTRIES:
            raise CheckpointError(f"{path}: holds more than {_MOST_ENTRIES} entries; accepted: what Megatron writes")
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise CheckpointError(f"{path}: holds a tensor that is {value.layout} on {value.device}")
            claimed = value.numel() * value.element_size()
            if claimed > max(_MOST_REPEATED, value.untyped_storage().nbytes()):
                raise CheckpointError(f"{path}: a tensor of {claimed} bytes has {value.untyped_storage().nbytes()}")
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)


def load_tensor(file: IO[bytes], source: str) -> torch.Tensor:
    """One tensor of torch.save out of an open file."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # see above
        raise CheckpointError(f"{source}: cannot be read: {_in_short(error)}") from error
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{source}: holds {type(found).__name__} where a tensor was expected")
    return found.detach()


def unknown_classes(path: Path) -> list[str]:
    """Names of classes and functions in a file that weights_only does not know."""
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        raise CheckpointError(f"{path}: reading it safely needs torch 2.6 or newer, this is {torch.__version__}")
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:
        raise CheckpointError(f"{path}: is not a file of torch.save: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    """The line of torch's long message that names what is wrong with the file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line), lines[0] if lines else type(error).__name__)[:200]


def _stand_in(name: str) -> type:
    module, _, last = name.rpartition(".")
    # Allowed classes are known by module and name: the stand-in goes by those of the class it stands for.
    return type(last, (StandIn,), {"__module__": module, "__qualname__": last})
