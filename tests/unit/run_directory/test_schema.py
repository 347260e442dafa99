"""The columns of the table are those of the design, in its order."""

import pyarrow as pa

from msprobe_megatron.job.measure import stats
from msprobe_megatron.run_directory import schema

DESIGN_ORDER = [
    *("step", "microbatch", "phase", "seq"),
    *("rank", "tp", "pp", "vpp", "dp", "cp", "ep", "etp"),
    "kind",
    *("name", "io", "path"),
    *("op", "site"),
    *("dtype", "shape", "global_shape", "shard"),
    *("numel", "min", "max", "sum", "sumsq", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero"),
    *("digest", "sketch"),
    "tensor",
    "extra",
]


def test_columns_and_their_order() -> None:
    assert schema.arrow_schema().names == DESIGN_ORDER


def test_types() -> None:
    found = {field.name: str(field.type) for field in schema.arrow_schema()}
    word = "dictionary<values=string, indices=int32, ordered=0>"
    for name in ("phase", "kind", "name", "io", "path", "op", "dtype", "shard"):
        assert found[name] == word
    for name in ("step", "seq", "numel", "n_nan", "n_posinf", "n_neginf", "n_zero"):
        assert found[name] == "int64"
    for name in ("tp", "pp", "vpp", "dp", "cp", "ep", "etp"):
        assert found[name] == "int16"
    for name in ("min", "max", "sum", "sumsq", "absmax"):
        assert found[name] == "double"
    assert (found["rank"], found["microbatch"], found["site"]) == ("int32", "int32", "int32")
    assert (found["digest"], found["tensor"], found["extra"]) == ("uint64", "string", "string")
    assert pa.types.is_list(schema.arrow_schema().field("sketch").type)
    assert schema.arrow_schema().field("sketch").type.value_type == pa.float32()
    assert schema.arrow_schema().field("shape").type.value_type == pa.int64()


def test_format_is_named_and_numbered() -> None:
    assert schema.arrow_schema().metadata == {b"format": b"msprobe_megatron.records", b"version": b"1"}


def test_kinds_and_phases_are_those_of_the_design() -> None:
    assert schema.PHASES == ("forward", "recompute", "backward", "optimizer")
    assert sorted(schema.KINDS) == sorted(
        [
            *("activation", "gradient", "parameter", "grad_unreduced", "grad_reduced", "grad_clipped"),
            *("optimizer_state", "update", "comm", "data", "loss", "perturb", "check", "throughput"),
            "buffer",  # state of a module that no gradient changes: the bias of a router
            "routing",
            "token",  # choices of a router, token by token: saved whole, without statistics
            "scalar",  # numbers of a rank that are neither a loss nor a speed: learning rate, entropy of attention
        ]
    )


def test_measure_and_record_mean_the_same_figures() -> None:
    assert schema.FLOAT_COLUMNS == stats.FLOAT_COLUMNS
    assert schema.COUNT_COLUMNS == stats.COUNT_COLUMNS
