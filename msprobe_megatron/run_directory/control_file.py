"""The control file of a run: written by `msprobe-megatron ctl`, checked by one rank once per step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from msprobe_megatron.run_directory.directory import RunDirectory

FILE_NAME = "control.json"
_LARGEST = 1 << 16


class ControlFileError(Exception):
    """The control file is invalid; the text says why."""


class ControlFile:
    """Detects changes of the file, at the cost of one `stat`."""

    def __init__(self, run: Path) -> None:
        self.path = run / FILE_NAME
        self._name = str(self.path)
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """True if the file exists and differs from the last one seen."""
        try:
            found = os.stat(self._name, follow_symlinks=False)
        except OSError:
            return False
        now = (found.st_ino, found.st_mtime_ns, found.st_size)
        if now == self._seen:
            return False
        self._seen = now
        return True

    def read(self) -> Any:
        """The document in the file; raises `ControlFileError`."""
        try:
            # Non-blocking: a pipe of this name must not block a job.
            descriptor = os.open(self._name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                text = file.read(_LARGEST + 1)
        except OSError as error:
            raise ControlFileError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(text) > _LARGEST:
            raise ControlFileError(f"{self.path}: is larger than {_LARGEST} bytes; accepted: what ctl writes")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ControlFileError(f"{self.path}: is not JSON: {error}; accepted: what ctl writes") from None


def write_order(run: Path, order: dict[str, Any]) -> Path:
    """Write an order for the running job; it replaces an earlier one that was not read yet."""
    directory = RunDirectory.open(run)
    try:
        directory.write_json(FILE_NAME, order)
    finally:
        directory.close()
    return run / FILE_NAME
