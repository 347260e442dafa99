"""Saved tensors of a run as the ``.pt`` files that msprobe's tools read, one each."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from typing import IO, Any

from msprobe_megatron.analysis.load.run import Run
from msprobe_megatron.analysis.load.saved_tensors import read_tensor
from msprobe_megatron.run_directory.directory import RunDirectory

_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
_LONGEST = 180


class MsprobeTensorFiles:
    """The tensors of one step and rank: names are given while records are made, files are written at the end."""

    def __init__(self, run: Run, step: int, rank: int) -> None:
        self._run, self._step, self._rank = run, step, rank
        self._rows: dict[str, Mapping[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, record: dict[str, Any], row: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The record with the name of its file, if the tensor was saved."""
        if row.get("tensor") is not None:
            record["data_name"] = self._name(name)
            self._rows[record["data_name"]] = row
        return record

    def _name(self, name: str) -> str:
        fit = _UNFIT.sub("_", name).lstrip(".")
        if fit != name or len(fit) > _LONGEST:
            # Two names may become the same when what a file cannot have is left out.
            fit = f"{fit[:_LONGEST]}.{hashlib.sha256(name.encode()).hexdigest()[:8]}"
        return f"{fit}.pt"

    def write(self, directory: RunDirectory, folder: str) -> None:
        """Write all files; tensors are read one after the other."""
        for name, row in self._rows.items():
            directory.write_file(f"{folder}/dump_tensor_data/{name}", self._filler(row))

    def _filler(self, row: Mapping[str, Any]) -> Any:
        import torch

        saved = read_tensor(self._run, self._step, self._rank, row["tensor"])
        dtype = getattr(torch, str(row["dtype"]))
        shape = [int(n) for n in row["shape"]]
        data = bytearray(saved.data)
        tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)

        def fill(file: IO[bytes]) -> None:
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            file.write(buffer.getbuffer())

        return fill
