"""Run directories of large jobs, made up: as many ranks and rows as wanted, whole tensors equal in every layout.

Every tensor has a size and figures that follow from its name and samples alone, and a rank holds its share of them, so
that two layouts agree when merged. For `bench compare`, and for tests of size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from msprobe_megatron.run_directory.schema import arrow_schema

_TENSORS = 10  # modules a layer; an output and its gradient each
_SHAPE = (128, 2, 64)


def make(
    root: Path, *, tp: int, pp: int, dp: int, layers: int = 160, samples: int = 320, fault: int | None = None
) -> int:
    """Write the run; returns the number of rows. With `fault` that layer is off by a tenth on tensor rank 0."""
    step = 0
    world = tp * pp * dp
    root.mkdir(parents=True)
    sizes = {"tp": tp, "pp": pp, "dp": dp, "cp": 1, "ep": 1, "etp": tp, "edp": dp, "vpp": 1}
    arguments = {"micro_batch_size": 2, "global_batch_size": samples, "seq_length": 128, "num_layers": layers}
    places = [
        {"rank": r, "tp": r % tp, "dp": r // tp % dp, "pp": r // tp // dp, "edp": r // tp % dp} for r in range(world)
    ]
    facts = {
        **{"format": 1, "world": world, "sizes": sizes, "sequence_parallel": False, "gradient_scale": float(dp)},
        **{"ranks": places, "ranks_complete": True, "arguments": arguments, "probe": {"content": {}}, "versions": {}},
    }
    (root / "run.json").write_text(json.dumps(facts))
    per_stage = layers // pp
    stages = [_stage(range(s * per_stage, (s + 1) * per_stage), samples // 2 // dp, tp) for s in range(pp)]
    total = 0
    for place in places:
        table = _of_rank(stages[place["pp"]], place, tp, dp, step, fault)
        directory = root / f"step_{step:06d}" / f"rank_{place['rank']:05d}"
        directory.mkdir(parents=True)
        pq.write_table(table, directory / "records.parquet")
        total += len(table)
    return total


def _stage(layers: range, microbatches: int, tp: int) -> pa.Table:
    """Rows of a stage without the columns that depend on the rank."""
    names, kinds, phases, batch = [], [], [], []
    for microbatch in range(microbatches):
        for layer in layers:
            for tensor in range(_TENSORS):
                for kind, phase in (("activation", "forward"), ("gradient", "backward")):
                    names.append(f"decoder.layers.{layer}.module_{tensor}")
                    kinds.append(kind)
                    phases.append(phase)
                    batch.append(microbatch)
    count = len(names)
    numel = int(np.prod(_SHAPE))
    constant = {
        **{"io": "output", "path": "", "op": "Module", "dtype": "bfloat16", "shard": "s b[dp:samples] h[tp]"},
        **{"n_nan": 0, "n_posinf": 0, "n_neginf": 0, "n_zero": 0, "numel": numel // tp, "vpp": 0, "site": 0},
        **{"shape": [128, 2, 64 // tp], "global_shape": list(_SHAPE)},
    }
    columns: dict[str, list[Any]] = {key: [value] * count for key, value in constant.items()}
    columns |= {"name": names, "kind": kinds, "phase": phases, "microbatch": batch, "seq": list(range(count))}
    columns["layer_number"] = [int(name.split(".")[2]) for name in names]
    return pa.table(columns)


def _of_rank(stage: pa.Table, place: dict[str, int], tp: int, dp: int, step: int, fault: int | None) -> pa.Table:
    count = len(stage)
    microbatch = np.array(stage.column("microbatch"))
    layer = np.array(stage.column("layer_number"))
    scale = 1.0 + layer / 100 + 0.01 * (microbatch * dp + place["dp"])
    if fault is not None and place["tp"] == 0:
        scale = np.where(layer == fault, scale * 1.1, scale)
    gradient = np.array(stage.column("kind").to_pylist()) == "gradient"
    scale = np.where(gradient, scale * dp, scale)
    numel = np.array(stage.column("numel"))
    figures = {
        **{"min": -3 * scale, "max": 3 * scale, "absmax": 3 * scale, "sum": 0.1 * scale * numel},
        "sumsq": scale * scale * numel,
    }
    arrays = []
    for field in arrow_schema():
        if field.name in figures:
            arrays.append(pa.array(figures[field.name], field.type))
        elif field.name in place or field.name in ("cp", "ep", "etp", "step"):
            value = {"step": step, "etp": place["tp"]}.get(field.name, place.get(field.name, 0))
            arrays.append(pa.array(np.full(count, value), field.type))
        elif field.name in stage.column_names:
            column = stage.column(field.name).combine_chunks()
            arrays.append(column.dictionary_encode() if pa.types.is_dictionary(field.type) else column.cast(field.type))
        else:
            arrays.append(pa.nulls(count, field.type))
    return pa.table(arrays, schema=arrow_schema())
