"""Writing output files atomically: complete or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


class OutputError(Exception):
    """A file that cannot be written; the text says which and why."""


def _umask() -> int:
    """The umask of the process; reports are for sharing, and a temporary file is private whatever it says."""
    mask = os.umask(0o077)  # the only way to read it is to set it
    os.umask(mask)
    return mask


def write_whole(path: str | Path, content: bytes) -> int:
    """Write `content` under a temporary name beside `path`, then rename; returns the number of bytes."""
    return write_chunks(path, [content])


def write_chunks(path: str | Path, chunks: Iterable[bytes], *, make_folder: bool = False) -> int:
    r"""The same for content that comes in pieces; `make_folder` makes the directory that will hold the file."""
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{target}: is a directory; give the name of a file")
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    size = 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                size += file.write(chunk)
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return size
