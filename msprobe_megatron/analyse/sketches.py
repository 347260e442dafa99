"""Sketches: how far two tensors are apart element by element, though neither was written.

A sketch is linear in the tensor and keyed by the place of each element in the whole one. So the sketches of shards add
up, and the norm of the difference of two runs' sketches estimates the norm of the difference of their tensors: a
permutation, swapped halves or shifted positions show, which no statistic can see.
"""

from __future__ import annotations

from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_ROWS_AT_ONCE = 200_000

# One sketch a part of a whole tensor: that of the lowest rank among its replicas.
_PARTS = """
select hash(hash(phase, kind, name, io, path), step, samples_from) as whole, sketch, factor
from (select *, row_number() over (partition by phase, kind, name, io, path, step, samples_from, part order by rank)
        as replica
    from ({labelled}) where sketch is not null and tokens <> 'experts')
where replica = 1 and hash(name) % {slices} = {slice} order by whole
"""


def count(rows: duckdb.DuckDBPyRelation) -> int:
    """How many rows have a sketch."""
    return int(rows.aggregate("count(sketch)").fetchall()[0][0])


def distances(
    connection: duckdb.DuckDBPyConnection, labelled: tuple[str, str], keys: tuple[Any, Any], rows: int
) -> Floats:
    """Norm of the difference of every pair, estimated; NaN where one of them has no sketch.

    `labelled` are the rows of both runs with `part`, `samples_from` and `factor`; `keys` say for each pair which
    whole tensor of either run it is; `rows` is how many there are. Large runs are read in slices of names, so that
    memory stays bounded.
    """
    found = np.full(len(keys[0]), np.nan)
    slices = rows // _ROWS_AT_ONCE + 1
    for number in range(slices):
        sides = [_whole(connection, query, slices, number) for query in labelled]
        left, right = sides[0], sides[1]
        if left is None or right is None or left[1].shape[1] != right[1].shape[1]:
            continue
        at_l, at_r = _find(left[0], keys[0]), _find(right[0], keys[1])
        both = np.flatnonzero((at_l >= 0) & (at_r >= 0))
        found[both] = np.linalg.norm(left[1][at_l[both]] - right[1][at_r[both]], axis=1)
    return found


def _whole(
    connection: duckdb.DuckDBPyConnection, labelled: str, slices: int, number: int
) -> tuple[npt.NDArray[np.uint64], Floats] | None:
    """Sketches of the whole tensors of one slice of names, in order of their keys."""
    query = _PARTS.replace("{labelled}", labelled).replace("{slices}", str(slices)).replace("{slice}", str(number))
    table = connection.query(query).to_arrow_table().combine_chunks()
    if not len(table):
        return None
    keys = table.column("whole").to_numpy()
    lists = table.column("sketch").combine_chunks()
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    cells = len(values) // len(keys)
    if cells * len(keys) != len(values):
        return None
    parts = values.reshape(len(keys), cells) / table.column("factor").to_numpy()[:, None]
    whole, first = np.unique(keys, return_index=True)
    return whole, np.add.reduceat(parts, first, axis=0)


def _find(sorted_keys: npt.NDArray[np.uint64], wanted: Any) -> npt.NDArray[np.int64]:
    """Index of every wanted key, -1 where it is not there."""
    known = np.array([key is not None for key in wanted])
    keys = np.array([key if key is not None else 0 for key in wanted], np.uint64)
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(known & (sorted_keys[at] == keys), at, -1)
