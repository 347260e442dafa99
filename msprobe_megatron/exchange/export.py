"""Writing msprobe's layout: ``step{S}/rank{R}/dump.json`` with stack.json and construct.json beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_megatron.analyse.load import Run
from msprobe_megatron.exchange.records import tensor_record
from msprobe_megatron.record.directory import RunDirectory

_KINDS = ("activation", "gradient", "parameter", "grad_reduced")


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
    """Write every step and rank of a run as msprobe dumps; returns the directories, relative to `out`.

    Example::

        export_msprobe(open_run("probe_out"), "msprobe_out")     # ["step0/rank0", ...]
    """
    directory = RunDirectory.create(Path(out))
    written = []
    for step, rank, path in sorted(run.files):
        rows = _rows(run, path)
        stacks = _stacks(path.parent / "sites.json")
        entries = sorted(_entries(rows, stacks, run.sizes.get("vpp", 1) > 1), key=lambda entry: entry.order)
        folder = f"step{step}/rank{rank}"
        directory.write_file(f"{folder}/dump.json", _writer(_dump(entries)))
        directory.write_file(f"{folder}/stack.json", _writer(_stack_file(entries)))
        directory.write_file(f"{folder}/construct.json", _writer(_construct(entries)))
        written.append(folder)
    return written


def _rows(run: Run, path: Path) -> list[dict[str, Any]]:
    import duckdb

    relation = duckdb.connect().read_parquet(str(path))
    columns = relation.columns
    kinds = ", ".join(f"'{kind}'" for kind in _KINDS)
    chosen = relation.filter(f"kind in ({kinds}) and phase <> 'recompute'").order("seq")
    return [dict(zip(columns, row, strict=True)) for row in chosen.fetchall()]


def _stacks(path: Path) -> dict[int, tuple[str, ...]]:
    if not path.is_file():
        return {}
    modules = json.loads(path.read_text(encoding="utf-8")).get("modules", [])
    return {entry["site"]: tuple(_frame(line) for line in entry.get("stack", [])) for entry in modules}


def _frame(line: str) -> str:
    """Our ``file:line function`` as msprobe writes a frame."""
    place, _, function = line.rpartition(" ")
    file, _, number = place.rpartition(":")
    return f"File {file}, line {number}, in {function}, \n "


def _entries(rows: list[dict[str, Any]], stacks: dict[int, tuple[str, ...]], virtual: bool) -> Iterator[_Entry]:
    found: dict[str, _Entry] = {}
    classes = {(row["vpp"], row["name"]): row["op"] for row in rows if row["kind"] in ("activation", "gradient")}
    trained = {_tensor_key(row) for row in rows if row["kind"] == "gradient"}
    for row in rows:
        if row["kind"] in ("activation", "gradient"):
            _add_call(found, row, classes, stacks, trained, virtual)
    for row in rows:
        if row["kind"] in ("parameter", "grad_reduced"):
            _add_parameter(found, row, classes, virtual)
    yield from found.values()


def _tensor_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["vpp"], row["microbatch"], row["name"], row["io"], row["path"]


def _entry_name(name: str, op: str, vpp: Any, virtual: bool) -> str:
    chunk = f"{vpp}." if virtual else ""
    return f"Module.{chunk}{name}.{op}"


def _add_call(
    found: dict[str, _Entry],
    row: dict[str, Any],
    classes: dict[tuple[Any, str], str],
    stacks: dict[int, tuple[str, ...]],
    trained: set[tuple[Any, ...]],
    virtual: bool,
) -> None:
    direction = "backward" if row["kind"] == "gradient" else "forward"
    base = _entry_name(row["name"], row["op"], row["vpp"], virtual)
    call, path = _call_of(row["path"])
    # msprobe counts calls within a step; a second call in a microbatch gets a number beyond all microbatches.
    number = row["microbatch"] + 1000 * call
    entry = found.setdefault(f"{base}.{direction}.{number}", _Entry(f"{base}.{direction}.{number}"))
    entry.microbatch, entry.order = row["microbatch"], max(entry.order, row["seq"])
    entry.stack = stacks.get(row["site"], ()) if direction == "forward" else ()
    parent = _parent(row["name"], row["vpp"], classes)
    if parent is not None:
        entry.parent = f"{_entry_name(parent[0], parent[1], row['vpp'], virtual)}.{direction}.{row['microbatch']}"
    if direction == "forward":
        record = tensor_record(row, _tensor_key(row) in trained)
        if row["io"] == "input":
            entry.record.setdefault("input_args", [])
            entry.record.setdefault("input_kwargs", {})[path or "0"] = record
        else:
            _put(entry.record.setdefault("output", []), path, record)
    else:
        # In msprobe's words a backward takes the gradients of the outputs and gives those of the inputs.
        _put(entry.record.setdefault("input" if row["io"] == "output" else "output", []), "", tensor_record(row, False))


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


def _add_parameter(
    found: dict[str, _Entry], row: dict[str, Any], classes: dict[tuple[Any, str], str], virtual: bool
) -> None:
    module, _, attribute = row["name"].rpartition(".")
    base = _entry_name(module or "model", row["op"], row["vpp"], virtual)
    if row["kind"] == "parameter":
        for entry in found.values():
            if entry.name.startswith(f"{base}.forward."):
                entry.record.setdefault("parameters", {})[attribute] = tensor_record(row, True)
        return
    name = f"{base}.parameters_grad.0"
    entry = found.setdefault(name, _Entry(name))
    entry.order = max(entry.order, row["seq"])
    entry.record[attribute] = [tensor_record(row, False)]


def _dump(entries: list[_Entry]) -> dict[str, Any]:
    return {
        "task": "statistics",
        "level": "L0",
        "framework": "pytorch",
        "dump_data_dir": None,
        "data": {entry.name: entry.record for entry in entries},
    }


def _stack_file(entries: list[_Entry]) -> dict[str, Any]:
    by_stack: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        if ".forward." in entry.name:
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
