"""The run directory: the one place where files of a run come from.

The writer thread and the session hand it tables and facts under relative names that the kit made up; names of
tensors are data inside the files and never become paths. Files appear whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from msprobe_megatron.record import events
from msprobe_megatron.record.claims import claim_job
from msprobe_megatron.record.json_text import json_text
from msprobe_megatron.record.safe_files import (
    RunDirectoryError,
    RunTaken,
    Unfinished,
    begin_file,
    components,
    create_file,
    directory_below,
    open_directory,
    refuse_open_to_all,
    replace_file,
    sync,
)

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RunDirectory", "RunDirectoryError", "RunTaken"]
_MANY_ROWS = 5000


class RunDirectory:
    """An output directory, held open. Several ranks may share one; each claims its own number.

    Example::

        directory = RunDirectory.create(Path("probe_out"))
        directory.claim_rank(3)
        directory.write_json("run.json", {"world": 8})
        directory.append_event({"event": "fault", "rank": 3, "text": "disk full"})
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, root: Path) -> RunDirectory:
        """Open ``root``, made 0700 with its missing parents; a symbolic link at its end is refused.

        Example::

            RunDirectory.create(Path("probe_out"))
        """
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
        """Open an output directory that exists.

        Example::

            RunDirectory.open(Path("probe_out")).append_event({"event": "note"})
        """
        root = Path(os.path.abspath(root))
        if not root.is_dir():
            raise RunDirectoryError(f"{root}: is not a directory; accepted: the output directory of a run")
        above = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return cls(root, open_directory(root.name, above, str(root)))
        finally:
            os.close(above)

    def close(self) -> None:
        """Let go of the directory. Safe to call twice.

        Example::

            directory.close()
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def claim_rank(self, rank: int, job: str = "") -> None:
        """Take the number of this process for this run; refused when a run has been here before.

        `job` is what all processes of a job have in common: ranks that another job (or a restart of this one with
        another number of ranks) did not have are refused too.

        Example::

            directory.claim_rank(3)   # ranks/rank_00003.json
        """
        name = f"rank_{rank:05d}.json"
        try:
            with directory_below(self._descriptor, ["ranks"], str(self.path)) as folder:
                if job:
                    claim_job(folder, job)
                descriptor = create_file(name, folder)
        except FileExistsError:
            raise RunTaken(f"{self.path} already holds a run; choose another --msprobe-output or remove it") from None
        with os.fdopen(descriptor, "wb") as file:
            file.write(json_text({"rank": rank, "claimed": True}).encode("ascii"))

    def write_file(self, relative: str, fill: Callable[[IO[bytes]], None]) -> int:
        """Let ``fill`` write a file, which then appears whole; returns its size.

        Example::

            directory.write_file("step_000010/rank_00003/note.txt", lambda file: file.write(b"hello"))
        """
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            return replace_file(name, folder, fill)

    def begin_file(self, relative: str, fill: Callable[[IO[bytes]], None]) -> Unfinished:
        """The same, but for the way to the disk, on which several go together: `finish_files` must follow.

        Example::

            finish_files([directory.begin_file("step_000010/rank_00003/note.txt", fill)])
        """
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            return begin_file(name, folder, fill)

    def write_json(self, relative: str, value: Any) -> int:
        """Write facts as JSON; returns the size of the file.

        Example::

            directory.write_json("run.json", {"world": 8})
        """
        text = json_text(value, indent=1).encode("ascii")
        return self.write_file(relative, lambda file: put(file, text))

    def write_table(self, relative: str, table: pa.Table | memoryview) -> int:
        """Write a table, or one that is Parquet already, as Parquet; returns the size of the file.

        Example::

            directory.write_table("step_000010/rank_00003/records.parquet", table)
        """
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
        """Give a finished file a second name, for content that repeats; None where the file system has no links.

        Returns its size. ``synced`` False is for who writes another file into the same folder next, which syncs it.
        Files of a run are never changed, only replaced, so that sharing the bytes is safe.

        Example::

            directory.repeat_file("step_000010/rank_00003/sites.json", "step_000011/rank_00003/sites.json")
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
        """Make a file that is written bit by bit, for readers that follow a running job.

        Example::

            directory.grow_file("tensorboard/rank_00003/events.out.tfevents.1.msprobe").write(b"…")
        """
        *folders, name = components(relative)
        with directory_below(self._descriptor, folders, str(self.path)) as folder:
            return os.fdopen(create_file(name, folder, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add one line to ``events.jsonl``, in one write: ranks append at the same time.

        Example::

            directory.append_event({"event": "drop", "rank": 3, "step": 10, "rows": 52})
        """
        line = (json_text(event) + "\n").encode("ascii")
        descriptor = self._open_events()
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if written != len(line):
            raise OSError(f"{self.path / events.FILE_NAME}: {written} of {len(line)} bytes of an event were written")

    def _open_events(self) -> int:
        with contextlib.suppress(FileExistsError):
            return create_file(events.FILE_NAME, self._descriptor, os.O_WRONLY | os.O_APPEND)
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(events.FILE_NAME, flags, dir_fd=self._descriptor)


def put(file: IO[bytes], content: Any) -> None:
    """Write all of ``content``; a filler for `RunDirectory.write_file`."""
    file.write(content)
