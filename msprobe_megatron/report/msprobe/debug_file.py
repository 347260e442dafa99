"""``debug.json``: what the training code saved by hand, nested as it was, with gradients beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msprobe_megatron.report.msprobe.records import tensor_record
from msprobe_megatron.report.msprobe.tensor_files import MsprobeTensorFiles

SAVE = "save"


def debug_entries(rows: Iterable[Mapping[str, Any]], files: MsprobeTensorFiles) -> dict[str, Any]:
    """Entries ``name.n.debug`` and ``name_grad.n.debug``; n runs through the step, over microbatches."""
    found: dict[str, Any] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        if row["op"] != SAVE:
            continue
        # debug/NAME.n: the number within a microbatch makes place for msprobe's.
        name = row["name"].partition("/")[2].rpartition(".")[0]
        key = (row["microbatch"], row["name"])
        if key not in numbers:
            numbers[key] = counts[name]
            counts[name] += 1
        word = f"{name}_grad" if row["kind"] == "gradient" else name
        entry = f"{word}.{numbers[key]}.debug"
        path = row["path"]
        record = tensor_record(row, False)
        files.add(record, row, f"{entry}.{path}" if path else entry)
        if not path:
            found[entry] = record
            continue
        here = found.setdefault(entry, {})
        *above, last = path.split(".")
        for part in above:
            here = here.setdefault(part, {})
        here[last] = record
    return {entry: _as_lists(value) for entry, value in found.items()}


def _as_lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, 2, … were lists; what was no tensor is null there."""
    if not isinstance(value, dict) or "type" in value:
        return value
    inner = {key: _as_lists(item) for key, item in value.items()}
    if not all(key.isdigit() and int(key) < 1 << 16 for key in inner):
        return inner
    return [inner.get(str(n)) for n in range(max(int(key) for key in inner) + 1)]
