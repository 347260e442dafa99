"""Writing msprobe's layout: ``step{S}/rank{R}/dump.json`` with stack.json and construct.json beside it.

Saved tensors go to ``dump_tensor_data/*.pt``, variables saved by hand to ``debug.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.load.run import Run, RunError, read_json
from msprobe_megatron.report.msprobe.call_names import Key, api_of, is_call, key_of, numbers_of, put_at
from msprobe_megatron.report.msprobe.debug_file import SAVE, debug_entries
from msprobe_megatron.report.msprobe.records import tensor_record
from msprobe_megatron.report.msprobe.tensor_files import MsprobeTensorFiles
from msprobe_megatron.run_directory.directory import RunDirectory

_KINDS = ("activation", "gradient", "parameter", "grad_reduced", "comm")
_CALLS = ("activation", "gradient", "comm")


@dataclass
class _Entry:
    """One call of a module in one direction, and the order in which msprobe would have written it."""

    name: str
    order: int = 0
    record: dict[str, Any] = field(default_factory=dict)
    parent: str | None = None
    microbatch: int = 0
    stack: tuple[str, ...] = ()


def export_msprobe(run: Run, out: str | Path) -> list[str]:
    """Write every step and rank of a run as msprobe dumps; returns the directories, relative to `out`."""
    directory = RunDirectory.create(Path(out))
    written = []
    for step, rank, path in sorted(run.files):
        folder = f"step{step}/rank{rank}"
        files = MsprobeTensorFiles(run, step, rank)
        every = _rows(path, step)
        saved = debug_entries(every, files)
        rows = [row for row in every if row["op"] != SAVE]
        level = _level(rows)
        book = _Book(_stacks(path.parent / "sites.json"), run.sizes.get("vpp", 1) > 1, files, rows)
        entries = sorted(_entries(rows, book, level), key=lambda entry: entry.order)
        task = "tensor" if files else "statistics"
        data_dir = str(directory.path / folder / "dump_tensor_data") if files else None
        if entries or not saved:
            content = {entry.name: entry.record for entry in entries}
            directory.write_file(f"{folder}/dump.json", _writer(_dump(content, task, level, data_dir)))
            directory.write_file(f"{folder}/stack.json", _writer(_stack_file(entries)))
            directory.write_file(f"{folder}/construct.json", _writer(_construct(entries)))
        if saved:
            directory.write_file(f"{folder}/debug.json", _writer(_dump(saved, task, "debug", data_dir)))
        files.write(directory, folder)
        written.append(folder)
    return written


def _level(rows: list[dict[str, Any]]) -> str:
    calls = {is_call(row["name"]) for row in rows if row["kind"] in ("activation", "gradient")}
    return "mix" if len(calls) == 2 else "L1" if calls == {True} else "L0"


class _Book:
    """What entries are made with."""

    def __init__(
        self, stacks: dict[int, tuple[str, ...]], virtual: bool, files: MsprobeTensorFiles, rows: list[dict[str, Any]]
    ) -> None:
        self.stacks, self.virtual, self.files = stacks, virtual, files
        self.classes = {
            (row["vpp"], row["name"]): row["op"]
            for row in rows
            if row["kind"] in ("activation", "gradient") and not is_call(row["name"])
        }
        self.trained = {_tensor_key(row) for row in rows if row["kind"] == "gradient"}
        self.numbers: dict[Key, int] = numbers_of(rows)

    def record(self, row: dict[str, Any], name: str, requires_grad: bool = False) -> dict[str, Any]:
        """A record, and a file if the tensor was saved."""
        return self.files.add(tensor_record(row, requires_grad), row, name)


def _rows(path: Path, step: int) -> list[dict[str, Any]]:
    import duckdb

    relation = duckdb.connect().read_parquet(str(path))
    columns = relation.columns
    kinds = ", ".join(f"'{kind}'" for kind in _KINDS)
    chosen = relation.filter(f"kind in ({kinds}) and phase <> 'recompute' and step = {step}").order("seq")
    return [dict(zip(columns, row, strict=True)) for row in chosen.fetchall()]


def _stacks(path: Path) -> dict[int, tuple[str, ...]]:
    if not path.is_file():
        return {}
    sites = read_json(path)
    try:
        entries = [*sites.get("modules", []), *sites.get("apis", [])]
        return {int(entry["site"]): tuple(_frame(str(line)) for line in entry.get("stack", [])) for entry in entries}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: is not a list of sites: {type(error).__name__}: {error}") from error


def _frame(line: str) -> str:
    """Our ``file:line function`` as msprobe writes a frame."""
    place, _, function = line.rpartition(" ")
    file, _, number = place.rpartition(":")
    return f"File {file}, line {number}, in {function}, \n "


def _entries(rows: list[dict[str, Any]], book: _Book, level: str) -> Iterator[_Entry]:
    found: dict[str, _Entry] = {}
    for row in rows:
        if row["kind"] in _CALLS:
            (_add_api if is_call(row["name"]) else _add_call)(found, row, book)
    for row in rows:
        # Parameters belong to modules, of which a dump of API calls has none.
        if row["kind"] in ("parameter", "grad_reduced") and level != "L1":
            _add_parameter(found, row, book)
    yield from found.values()


def _add_api(found: dict[str, _Entry], row: dict[str, Any], book: _Book) -> None:
    number = book.numbers.get(key_of(row))
    if number is None:  # a gradient whose forward was not recorded
        return
    direction = "backward" if row["kind"] == "gradient" else "forward"
    name = f"{api_of(row['op'])}.{number}.{direction}"
    entry = found.setdefault(name, _Entry(name))
    entry.microbatch, entry.order = row["microbatch"] or 0, max(entry.order, row["seq"])
    entry.stack = book.stacks.get(row["site"], ()) if direction == "forward" else ()
    module = row["name"].partition("/")[0]
    if (row["vpp"], module) in book.classes:
        above = _entry_name(module, book.classes[row["vpp"], module], row["vpp"], book.virtual)
        entry.parent = f"{above}.{direction}.{row['microbatch']}"
    path = row["path"]
    if direction == "backward":
        side = "input" if row["io"] == "output" else "output"
        values = entry.record.setdefault(side, [])
        values.append(book.record(row, f"{name}.{side}.{len(values)}"))
    elif row["io"] == "output":
        put_at(entry.record.setdefault("output", []), path, book.record(row, f"{name}.output.{path or 0}"))
    else:
        trained = _tensor_key(row) in book.trained
        positional = (path or "0").partition(".")[0].isdigit()
        entry.record.setdefault("input_args", [])
        entry.record.setdefault("input_kwargs", {})
        if positional:
            put_at(entry.record["input_args"], path, book.record(row, f"{name}.input.{path or 0}", trained))
        else:
            entry.record["input_kwargs"][path] = book.record(row, f"{name}.kwargs.{path}", trained)


def _tensor_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["vpp"], row["microbatch"], row["name"], row["io"], row["path"]


def _entry_name(name: str, op: str, vpp: Any, virtual: bool) -> str:
    chunk = f"{vpp}." if virtual else ""
    return f"Module.{chunk}{name}.{op}"


def _add_call(found: dict[str, _Entry], row: dict[str, Any], book: _Book) -> None:
    direction = "backward" if row["kind"] == "gradient" else "forward"
    base = _entry_name(row["name"], row["op"], row["vpp"], book.virtual)
    call, path = _call_of(row["path"])
    # msprobe counts calls within a step; a second call in a microbatch gets a number beyond all microbatches.
    number = row["microbatch"] + 1000 * call
    name = f"{base}.{direction}.{number}"
    entry = found.setdefault(name, _Entry(name))
    entry.microbatch, entry.order = row["microbatch"], max(entry.order, row["seq"])
    entry.stack = book.stacks.get(row["site"], ()) if direction == "forward" else ()
    parent = _parent(row["name"], row["vpp"], book.classes)
    if parent is not None:
        entry.parent = f"{_entry_name(parent[0], parent[1], row['vpp'], book.virtual)}.{direction}.{row['microbatch']}"
    if direction == "forward":
        trained = _tensor_key(row) in book.trained
        if row["io"] == "input":
            entry.record.setdefault("input_args", [])
            inputs = entry.record.setdefault("input_kwargs", {})
            inputs[path or "0"] = book.record(row, f"{name}.kwargs.{path or 0}", trained)
        else:
            outputs = entry.record.setdefault("output", [])
            index = int(path) if path.isdigit() else len(outputs)
            _put(outputs, path, book.record(row, f"{name}.output.{index}", trained))
    else:
        # In msprobe's words a backward takes the gradients of the outputs and gives those of the inputs.
        side = "input" if row["io"] == "output" else "output"
        values = entry.record.setdefault(side, [])
        _put(values, "", book.record(row, f"{name}.{side}.{len(values)}"))


def _call_of(path: str) -> tuple[int, str]:
    if not path.startswith("call"):
        return 0, path
    head, _, rest = path.partition(".")
    return int(head[4:]), rest


def _put(values: list[Any], path: str, record: dict[str, Any]) -> None:
    index = int(path) if path.isdigit() else len(values)
    values.extend([None] * (index + 1 - len(values)))
    values[index] = record


def _parent(name: str, vpp: Any, classes: dict[tuple[Any, str], str]) -> tuple[str, str] | None:
    """Nearest module above that has rows: its name and class; the model itself is above all."""
    above = name
    while "." in above:
        above = above.rpartition(".")[0]
        if (vpp, above) in classes:
            return above, classes[vpp, above]
    if name != "model" and (vpp, "model") in classes:
        return "model", classes[vpp, "model"]
    return None


def _add_parameter(found: dict[str, _Entry], row: dict[str, Any], book: _Book) -> None:
    module, _, attribute = row["name"].rpartition(".")
    base = _entry_name(module or "model", row["op"], row["vpp"], book.virtual)
    if row["kind"] == "parameter":
        for entry in found.values():
            if entry.name.startswith(f"{base}.forward."):
                name = f"{entry.name}.parameters.{attribute}"
                entry.record.setdefault("parameters", {})[attribute] = book.record(row, name, True)
        return
    name = f"{base}.parameters_grad.0"
    entry = found.setdefault(name, _Entry(name))
    entry.order = max(entry.order, row["seq"])
    entry.record[attribute] = [book.record(row, f"{name}.{attribute}")]


def _dump(content: dict[str, Any], task: str, level: str, data_dir: str | None) -> dict[str, Any]:
    return {"task": task, "level": level, "framework": "pytorch", "dump_data_dir": data_dir, "data": content}


def _stack_file(entries: list[_Entry]) -> dict[str, Any]:
    by_stack: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if ".forward." in f"{entry.name}.":
            by_stack.setdefault(entry.stack, []).append(entry.name)
    # Readers recognise the newer format by its key "0".
    return {str(n): [names, list(stack)] for n, (stack, names) in enumerate(by_stack.items())} or {"0": [[], []]}


def _construct(entries: list[_Entry]) -> dict[str, Any]:
    calls = [entry for entry in entries if ".parameters_grad." not in entry.name]
    known = {entry.name for entry in calls}
    content: dict[str, Any] = {}
    for entry in calls:
        content[entry.name] = [entry.parent if entry.parent in known else None, entry.microbatch]
    if calls:
        content["megatron_micro_step_number"] = max(entry.microbatch for entry in calls)
    return content


def _writer(content: dict[str, Any]) -> Any:
    # Python's dialect of JSON (NaN, Infinity), as msprobe itself writes and reads it.
    text = json.dumps(content, indent=1).encode("utf-8")
    return lambda file: file.write(text)
