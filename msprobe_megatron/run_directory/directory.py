"""The run directory: the one place that creates the files of a run.

The writer thread and the session pass it tables and facts under relative names that the kit chose; names of tensors are
data inside the files and never become paths. Files appear whole or not at all.

``events.jsonl`` (alerts, faults and drops of all ranks) is read here too, in the order of appending.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from msprobe_megatron.run_directory.safe_files import (
    Allowance,
    LimitedFile,
    RunDirectoryError,
    RunTaken,
    Unfinished,
    begin_file,
    components,
    create_file,
    directory_below,
    json_text,
    open_directory,
    refuse_open_to_all,
    replace_file,
    sync,
)

if TYPE_CHECKING:
    import pyarrow as pa


__all__ = ["RunDirectory", "RunDirectoryError", "RunTaken"]
EVENTS = "events.jsonl"
_MANY_ROWS = 5000
_MARK, _RANK = "job_", "rank_"


class RunDirectory:
    """An output directory, held open. Several ranks may share one; each claims its own number."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.allowance: Allowance | None = None
        """What is left of `limits.disk`; None: no limit. Facts in JSON and events are not counted."""
        self._own = threading.local()

    @classmethod
    def create(cls, root: Path) -> RunDirectory:
        """Open ``root``, made 0700 with its missing parents; a symbolic link at its end is refused."""
        root = Path(os.path.abspath(root))
        anchor, missing = root.parent, [root.name]
        while not anchor.is_dir() and anchor != anchor.parent:
            missing.insert(0, anchor.name)
            anchor = anchor.parent
        try:
            above = os.open(anchor, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                refuse_open_to_all(above, anchor)
                with directory_below(above, missing, str(anchor).rstrip("/")) as descriptor:
                    return cls(root, os.dup(descriptor))
            finally:
                os.close(above)
        except OSError as error:
            raise RunDirectoryError(
                f"{root}: cannot be made: {error.strerror}; choose another --msprobe-output"
            ) from error

    @classmethod
    def open(cls, root: Path) -> RunDirectory:
        """Open an output directory that exists."""
        root = Path(os.path.abspath(root))
        if not root.is_dir():
            raise RunDirectoryError(f"{root}: is not a directory; accepted: the output directory of a run")
        above = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls(root, open_directory(root.name, above, str(root)))
        finally:
            os.close(above)

    def close(self) -> None:
        """Close the directory. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def claim_rank(self, rank: int, job: str = "") -> None:
        """Claim the number of this process for this run; refused if the directory already holds a run.

        `job` identifies all processes of a job: ranks that another job (or a restart of this one with another number
        of ranks) did not have are refused too.
        """
        name = f"rank_{rank:05d}.json"
        try:
            with directory_below(self._descriptor, ["ranks"], str(self.path)) as folder:
                if job:
                    _claim_job(folder, job)
                descriptor = create_file(name, folder)
        except FileExistsError:
            raise RunTaken(f"{self.path} already holds a run; choose another --msprobe-output or remove it") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(json_text({"rank": rank, "claimed": True}).encode("ascii"))

    def write_file(self, relative: str, fill: Callable[[IO[bytes]], None]) -> int:
        """Let ``fill`` write a file, which then appears whole; returns its size."""
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            before = _own_bytes(name, folder) if self.allowance is not None else 0
            size = self._tally(replace_file(name, folder, self._limited(fill)))
        # Not before: until the rename, both are on the disk.
        if self.allowance is not None:
            self.allowance.give_back(before)
        return size

    def begin_file(self, relative: str, fill: Callable[[IO[bytes]], None]) -> Unfinished:
        """Write a file without syncing it, so that several can be synced together: `finish_files` must follow."""
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            file = begin_file(name, folder, self._limited(fill))
        self._tally(file.size)
        return file

    def limit(self, size: int | None) -> None:
        """Let this process write at most so many bytes more (None: any number); beyond, `OverAllowance` is raised."""
        self.allowance = None if size is None else Allowance(size)

    def tally(self) -> int:
        """Bytes of the files that this thread has written since it last asked."""
        found: int = getattr(self._own, "bytes", 0)
        self._own.bytes = 0
        return found

    def _limited(self, fill: Callable[[IO[bytes]], None]) -> Callable[[IO[bytes]], None]:
        allowance = self.allowance
        if allowance is None:
            return fill

        def limited(file: IO[bytes]) -> None:
            wrapped = LimitedFile(file, allowance)
            try:
                fill(cast(IO[bytes], wrapped))
            except BaseException:  # the file is removed
                allowance.give_back(wrapped.taken)
                raise

        return limited

    def _tally(self, size: int) -> int:
        self._own.bytes = getattr(self._own, "bytes", 0) + size
        return size

    def write_json(self, relative: str, value: Any) -> int:
        """Write facts as JSON; returns the size of the file."""
        text = json_text(value, indent=1).encode("ascii")
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            return replace_file(name, folder, lambda file: put(file, text))

    def write_table(self, relative: str, table: pa.Table | memoryview) -> int:
        """Write a table, or one that is Parquet already, as Parquet; returns the size of the file."""
        if isinstance(table, memoryview):
            content = table
            return self.write_file(relative, lambda file: put(file, content))
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The step of a small model has a few hundred rows: there the compressor costs more than all the rest.
        dense = table.num_rows > _MANY_ROWS and pa.Codec.is_available("zstd")
        compression = "zstd" if dense else "snappy"
        if dense:
            return self.write_file(
                relative, lambda file: pq.write_table(table, file, compression=compression, write_statistics=True)
            )
        # In memory first: into a file, every page of every column is a call of its own.
        text = [f.name for f in table.schema if pa.types.is_dictionary(f.type) or pa.types.is_string(f.type)]
        stream = pa.BufferOutputStream()
        pq.write_table(table, stream, compression=compression, write_statistics=False, use_dictionary=text)
        return self.write_file(relative, lambda file: put(file, stream.getvalue()))

    def repeat_file(self, relative: str, again: str, synced: bool = True) -> int | None:
        """Hard-link a finished file under a second name, for content that repeats; None if the link fails.

        Returns its size. Pass ``synced`` False if another file is written into the same folder next, which syncs it.
        Files of a run are never changed, only replaced, so that sharing the bytes is safe.
        """
        *folders, name = components(relative)
        *new_folders, new_name = components(again)
        with (
            directory_below(self._descriptor, folders, str(self.path)) as old,
            directory_below(self._descriptor, new_folders, str(self.path)) as new,
        ):
            try:
                os.link(name, new_name, src_dir_fd=old, dst_dir_fd=new, follow_symlinks=False)
            except OSError:
                return None
            if synced:
                sync(new)
            return os.stat(new_name, dir_fd=new, follow_symlinks=False).st_size

    def grow_file(self, relative: str) -> IO[bytes]:
        """Create a file that grows, for readers that follow a running job."""
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            file = os.fdopen(create_file(name, folder, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)
        return file if self.allowance is None else cast(IO[bytes], LimitedFile(file, self.allowance))

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add one line to ``events.jsonl``, in one write: ranks append at the same time."""
        line = (json_text(event) + "\n").encode("ascii")
        descriptor = self._open_events()
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written != len(line):
            raise OSError(f"{self.path / EVENTS}: {written} of {len(line)} bytes of an event were written")

    def _open_events(self) -> int:
        with contextlib.suppress(FileExistsError):
            return create_file(EVENTS, self._descriptor, os.O_WRONLY | os.O_APPEND)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(EVENTS, flags, dir_fd=self._descriptor)


def _own_bytes(name: str, folder: int) -> int:
    """The bytes that replacing a file frees: none if it is not there, or has a second name."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return found.st_size if found.st_nlink == 1 else 0


def put(file: IO[bytes], content: Any) -> None:
    """Write all of ``content``; a filler for `RunDirectory.write_file`."""
    file.write(content)


def _claim_job(ranks: int, job: str) -> None:
    """Claim the open directory ``ranks`` for ``job``; FileExistsError if another job has been there.

    The claim is an empty file whose name every rank of the job can derive by itself. Ranks do not communicate: each
    creates the file or finds it before it claims its own number.
    """
    mark = _MARK + hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    before = os.listdir(ranks)
    try:
        os.close(create_file(mark, ranks))
        made = True
    except FileExistsError:
        made = False
    # Ranks of this job create the mark before their own files: files older than the mark are another job's.
    older = made and any(name.startswith(_RANK) for name in before)
    if older or any(name.startswith(_MARK) and name != mark for name in os.listdir(ranks)):
        if made:
            os.unlink(mark, dir_fd=ranks)
        raise FileExistsError(mark)


def read_events(root: Path) -> list[dict[str, Any]]:
    """Return the events of a run directory; an empty list if it has no such file.

    A truncated last line is skipped. A broken line before it (two processes on a file system without
    atomic appends) is reported as an event ``unreadable``, so that nothing vanishes silently.
    """
    try:
        content = (Path(root) / EVENTS).read_bytes()
    except FileNotFoundError:
        return []
    found = []
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        event = _parse(line)
        if event is None:
            text = f"{EVENTS}: line {number} is not a JSON object: {line[:80].decode('utf-8', 'replace')!r}"
            event = {"event": "unreadable", "line": number, "text": text}
        found.append(event)
    event = _parse(last)
    return found if event is None else [*found, event]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
