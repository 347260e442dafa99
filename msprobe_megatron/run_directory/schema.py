"""The one table of a run: its columns, their types, and the row as a probe builds it.

Everything that the kit observes becomes a row of this table; everything after the run directory is a query on it. One
row of `msprobe-megatron demo`, the output of an MLP in the forward of the first microbatch of step 2::

    step 2  microbatch 0  phase forward  seq 77            when; seq is the order of execution within the step
    rank 0  tp 0  pp 0  vpp 0  dp 0  cp 0  ep 0  etp 0     which process, and which virtual stage of it
    kind activation  name decoder.layers.1.mlp             what; names are those of the whole model
    io output  path 0  op MLP  site 27                     first result of the module; entry 27 of sites.json
    dtype float32  shape [32, 2, 64]                       the tensor on this rank
    global_shape [32, 2, 64]  shard "s b h"  numel 4096    and in the whole model; here no dimension is sharded
    min -0.00464  max 0.00400  sum 0.346                   statistics over the finite elements
    sumsq 0.00587  absmax 0.00464
    n_nan 0  n_posinf 0  n_neginf 0  n_zero 0
    digest null  sketch null  tensor null  extra null      only on request

The columns of statistics are filled from the slot table when a step is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_NAME = "msprobe_megatron.records"
FORMAT_VERSION = 1

PHASES = ("forward", "recompute", "backward", "optimizer")
KINDS = (
    "activation",
    "gradient",
    "parameter",
    "buffer",
    "grad_unreduced",
    "grad_reduced",
    "grad_clipped",
    "optimizer_state",
    "update",
    "comm",
    "data",
    "loss",
    "scalar",
    "routing",
    "token",
    "perturb",
    "check",
    "throughput",
)
IDENTITY_COLUMNS = ("rank", "tp", "pp", "dp", "cp", "ep", "etp")
FLOAT_COLUMNS = ("min", "max", "sum", "sumsq", "absmax")
COUNT_COLUMNS = ("n_nan", "n_posinf", "n_neginf", "n_zero")


class Row(NamedTuple):
    """What a probe knows about a tensor without reading it, and the slot of its statistics.

    ``site`` -1 means none, ``slot`` -1 no statistics. ``extra`` is JSON text. The step and the coordinates of this
    process are added when the row is written.
    """

    seq: int
    microbatch: int | None
    phase: str
    vpp: int | None
    kind: str
    name: str
    io: str
    path: str
    op: str
    site: int
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None
    shard: str
    numel: int
    slot: int
    extra: str | None = None
    digest: int | None = None
    sketch: tuple[float, ...] | None = None
    tensor: str | None = None


def arrow_schema() -> pa.Schema:
    """Return the Arrow schema of ``records.parquet``, with the format's name and version as metadata.

    Example::

        >>> arrow_schema().names[:4]
        ['step', 'microbatch', 'phase', 'seq']
    """
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    # Dimensions are 64 bits wide: a flat gradient buffer can have more than 2**31 elements.
    shape = pa.list_(pa.int64())
    fields = [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("microbatch", pa.int32()),
        pa.field("phase", text, nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        *(pa.field(axis, pa.int16(), nullable=axis == "vpp") for axis in _AXES),
        *(pa.field(name, text, nullable=False) for name in ("kind", "name", "io", "path", "op")),
        pa.field("site", pa.int32()),
        pa.field("dtype", text, nullable=False),
        pa.field("shape", shape, nullable=False),
        pa.field("global_shape", shape),
        pa.field("shard", text, nullable=False),
        pa.field("numel", pa.int64(), nullable=False),
        *(pa.field(name, pa.float64()) for name in FLOAT_COLUMNS),
        *(pa.field(name, pa.int64()) for name in COUNT_COLUMNS),
        pa.field("digest", pa.uint64()),
        pa.field("sketch", pa.list_(pa.float32())),
        pa.field("tensor", pa.string()),
        pa.field("extra", pa.string()),
    ]
    return pa.schema(fields, metadata={"format": FORMAT_NAME, "version": str(FORMAT_VERSION)})


_AXES = ("tp", "pp", "vpp", "dp", "cp", "ep", "etp")
