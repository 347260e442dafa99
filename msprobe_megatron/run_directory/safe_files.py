"""Directories and files that follow no symbolic link and are private whatever the umask.

All below a directory that is held open: each component is opened relative to the one above it, so that nobody
can slip a link in between a check and its use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


class RunDirectoryError(Exception):
    """The output directory cannot be used; the text says which, why and what to do."""


class RunTaken(RunDirectoryError):
    """A run is in the output directory already."""


def components(relative: str) -> list[str]:
    """Split a path that the kit made up, refusing whatever could leave the directory.

    Example::

        components("step_000010/rank_00003/records.parquet")
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
    """Refuse a directory in which anybody may rename what we make: writable for all, and without the sticky bit.

    Example::

        refuse_open_to_all(os.open("/srv/shared", os.O_RDONLY), "/srv/shared")
    """
    mode = os.fstat(descriptor).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise RunDirectoryError(
            f"{where}: everybody may write there and it has no sticky bit, so others could replace the run;"
            " choose another --msprobe-output or chmod +t it"
        )


@contextlib.contextmanager
def directory_below(root: int, parts: Sequence[str], where: str) -> Iterator[int]:
    """Give a descriptor of a directory below ``root``, made on the way where it is missing.

    Example::

        with directory_below(root, ["step_000010", "rank_00003"], "probe_out") as folder:
            ...
    """
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
    """Open the directory ``name`` in ``above``, made 0700 if it is missing; links and files are refused.

    Example::

        descriptor = open_directory("ranks", root, "probe_out/ranks")
    """
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
    # The umask can take bits without which we could not open our own directory. A path descriptor needs none.
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        if stat.S_IMODE(os.fstat(handle).st_mode) & 0o777 != DIRECTORY_MODE:
            os.chmod(f"/proc/self/fd/{handle}", DIRECTORY_MODE)
    finally:
        os.close(handle)


def sync(descriptor: int) -> None:
    """Bring a file or directory to the disk; file systems that cannot sync a directory are excused.

    Example::

        sync(folder)
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def create_file(name: str, above: int, flags: int = os.O_WRONLY) -> int:
    """Create a private file that was not there before and open it.

    Example::

        os.close(create_file("claim", folder))
    """
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

    Example::

        replace_file("run.json", root, lambda file: file.write(b"{}"))
    """
    file = begin_file(name, above, fill)
    finish_files([file])
    return file.size


@dataclass(frozen=True)
class Unfinished:
    """A file that is written, under a temporary name, and not yet on the disk."""

    name: str
    temporary: str
    folder: int
    file: IO[bytes]
    size: int


def begin_file(name: str, above: int, fill: Callable[[IO[bytes]], None]) -> Unfinished:
    """The first half of `replace_file`: write the bytes; `finish_files` must follow.

    Example::

        finish_files([begin_file("run.json", root, lambda file: file.write(b"{}"))])
    """
    temporary = f".{name}.{secrets.token_hex(6)}.tmp"
    file = os.fdopen(create_file(temporary, above), "wb")
    try:
        fill(file)
        file.flush()
        return Unfinished(name, temporary, os.dup(above), file, os.fstat(file.fileno()).st_size)
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk is full once more when what is buffered goes out
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=above)
        raise


def finish_files(files: Sequence[Unfinished]) -> None:
    """The second half, for several at once, so that the disk is waited for once; what appears is whole.

    Example::

        finish_files([first, second])
    """
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
