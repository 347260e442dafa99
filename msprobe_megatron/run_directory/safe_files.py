"""Directories and files that follow no symbolic link and are private whatever the umask.

All below a directory that is held open: each component is opened relative to the one above it, so that no link can be
slipped in between a check and its use.

Facts of a job become strict JSON on the way: Megatron's arguments hold dtypes, paths, functions and infinities, and
anything that JSON cannot represent becomes text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import numbers
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class RunDirectoryError(Exception):
    """The output directory cannot be used; the text says which, why and what to do."""


class RunTaken(RunDirectoryError):
    """The output directory already holds a run."""


class OverAllowance(RunDirectoryError):
    """A file would need more bytes than this process may still write; nothing of it is left on the disk."""


class Allowance:
    """Bytes that a process may still write into its run directory, whichever of its threads writes them."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self.left = limit
        self.refused = False
        """True once something did not fit."""

    def take(self, size: int) -> None:
        """Take bytes that are about to be written, or raise `OverAllowance` before a byte too many is."""
        with self._lock:
            if size > self.left:
                self.refused = True
                raise OverAllowance
            self.left -= size

    def give_back(self, size: int) -> None:
        """Return the bytes of a file that was not kept."""
        with self._lock:
            self.left += size


class LimitedFile:
    """A file whose bytes are taken from an allowance."""

    def __init__(self, file: IO[bytes], allowance: Allowance) -> None:
        self._file, self._allowance = file, allowance
        self.taken = 0

    def write(self, data: Any) -> int:
        """Write, or raise `OverAllowance` before a byte too many is written."""
        size = memoryview(data).nbytes
        self._allowance.take(size)
        self.taken += size
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def components(relative: str) -> list[str]:
    """Split a path that the kit chose, refusing anything that could leave the directory.

    Example::

        >>> components("step_000010/rank_00003/records.parquet")
        ['step_000010', 'rank_00003', 'records.parquet']
    """
    parts = relative.split("/")
    for part in parts:
        if not _COMPONENT.fullmatch(part):
            raise RunDirectoryError(
                f"{relative!r}: {part!r} is no file name of a run directory; accepted: letters, digits, "
                "_ . -, not starting with a dot"
            )
    return parts


def refuse_open_to_all(descriptor: int, where: object) -> None:
    """Refuse a directory in which anybody may rename our files: world-writable and without the sticky bit."""
    mode = os.fstat(descriptor).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise RunDirectoryError(
            f"{where}: everybody may write there and it has no sticky bit, so others could replace the run;"
            " choose another --msprobe-output or chmod +t it"
        )


@contextlib.contextmanager
def directory_below(root: int, parts: Sequence[str], where: str) -> Iterator[int]:
    """Yield a descriptor of a directory below ``root``; missing directories are created."""
    descriptor = os.dup(root)
    try:
        for part in parts:
            where = f"{where}/{part}"
            inner = open_directory(part, descriptor, where)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_directory(name: str, above: int, where: str) -> int:
    """Open the directory ``name`` in ``above``, created with 0700 if missing; links and files are refused."""
    try:
        with contextlib.suppress(FileNotFoundError):  # most are there already
            return os.open(name, _OPEN_DIRECTORY, dir_fd=above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, DIRECTORY_MODE, dir_fd=above)
            _undo_umask(name, above)
            sync(above)
        return os.open(name, _OPEN_DIRECTORY, dir_fd=above)
    except OSError as error:
        if not _exists(name, above):
            raise
        mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            advice = "is a symbolic link, which is not followed; remove it or name its target"
        elif not stat.S_ISDIR(mode):
            advice = "is not a directory; remove it or choose another --msprobe-output"
        else:
            raise
        raise RunDirectoryError(f"{where}: {advice}") from error


def _exists(name: str, above: int) -> bool:
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
    except OSError:
        return False
    return True


def _undo_umask(name: str, above: int) -> None:
    # The umask may remove bits without which we could not open our own directory. A path descriptor needs none.
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) & 0o777 != DIRECTORY_MODE:
            os.chmod(f"/proc/self/fd/{handle}", DIRECTORY_MODE)
    finally:
        os.close(handle)


def sync(descriptor: int) -> None:
    """Flush a file or directory to the disk; file systems that cannot sync a directory are tolerated."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def create_file(name: str, above: int, flags: int = os.O_WRONLY) -> int:
    """Create a private file, which must not exist, and open it."""
    descriptor = os.open(name, flags | _CREATE, FILE_MODE, dir_fd=above)
    try:
        os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def replace_file(name: str, above: int, fill: Callable[[IO[bytes]], None]) -> int:
    """Write a file whole or not at all, and return its size.

    The bytes go to a temporary name in the same directory, are flushed to the disk, and only then renamed; an
    error on the way leaves what was there before.
    """
    file = begin_file(name, above, fill)
    finish_files([file])
    return file.size


@dataclass(frozen=True)
class Unfinished:
    """A file that is written under a temporary name and not synced yet."""

    name: str
    temporary: str
    folder: int
    file: IO[bytes]
    size: int


def begin_file(name: str, above: int, fill: Callable[[IO[bytes]], None]) -> Unfinished:
    """The first half of `replace_file`: write the bytes; `finish_files` must follow."""
    temporary = f".{name}.{secrets.token_hex(6)}.tmp"
    file = os.fdopen(create_file(temporary, above), "wb")
    try:
        fill(file)
        file.flush()
        return Unfinished(name, temporary, os.dup(above), file, os.fstat(file.fileno()).st_size)
    except BaseException:
        with contextlib.suppress(OSError):  # on a full disk, flushing the buffer fails once more
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=above)
        raise


def finish_files(files: Sequence[Unfinished]) -> None:
    """The second half, for several files at once: sync all, then rename all; what appears is whole."""
    try:
        for one in files:
            sync(one.file.fileno())
            one.file.close()
        for one in files:
            os.rename(one.temporary, one.name, src_dir_fd=one.folder, dst_dir_fd=one.folder)
        folders = {(found.st_dev, found.st_ino): one.folder for one in files if (found := os.fstat(one.folder))}
        for folder in folders.values():
            sync(folder)
    finally:
        for one in files:
            with contextlib.suppress(OSError):
                one.file.close()
            with contextlib.suppress(OSError):  # renamed, as it should be
                os.unlink(one.temporary, dir_fd=one.folder)
            os.close(one.folder)


_DEEPEST = 64


def json_text(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as ASCII JSON; "nan", "inf" and "-inf" are text, unknown objects their ``str``."""
    return json.dumps(_plain(value, _DEEPEST), indent=indent, allow_nan=False)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, (Mapping, set, frozenset, list, tuple)):
        if depth == 0:
            return "..."
        if isinstance(value, Mapping):
            return {str(key): _plain(item, depth - 1) for key, item in value.items()}
        items = [_plain(item, depth - 1) for item in value]
        return sorted(items, key=str) if isinstance(value, (set, frozenset)) else items
    return _leaf(value)


def _leaf(value: Any) -> Any:
    # Exact types first: members of an enumeration may be str or int, and their own text says more.
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Enum) or not isinstance(value, (numbers.Integral, float)):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return int(value)
