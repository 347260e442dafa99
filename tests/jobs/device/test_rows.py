"""Rows of a run on the device: right by the tensors that it saved, and those of the same job in host memory.

Statistics on an NPU are accumulated in float32 (the host's in float64 across pieces). Extremes and counts are exact on
both; sums are within `BOUND` of the norm times the root of the number of elements (docs/device.md). Kernels of the
device are the host's, but operators that torch fuses for the CPU alone are composed of others on it, so that gradients
differ in their last bits and everything after the first optimizer step with them.
"""

import math

import numpy as np
import pytest
import torch

from tests.jobs.device.jobs import NO_DROPOUT
from tests.jobs.integrations.rows import rows

BOUND = 1e-5
DRIFT = 1e-4  # of gradients and later steps against another way to compute them
KEY = ("microbatch", "phase", "seq", "kind", "name", "io", "path", "op", "dtype", "shape", "numel")
EXACT = ("min", "max", "absmax", "n_nan", "n_posinf", "n_neginf", "n_zero", "digest")
# Memory that nobody has written: Megatron hands it to baddbmm with beta=0, and puts it in the place of an output that
# the next pipeline stage has got.
UNINITIALISED = ("torch.baddbmm.0", "outside/torch.Tensor.mul.5")


def keyed(found):
    return {tuple(str(row[name]) for name in KEY): row for row in found if not row["name"].endswith(UNINITIALISED)}


def differences(left, right, *, exact):
    """What differs between two lists of rows of the same tensors, as "column of name: left, right"."""
    left, right = keyed(left), keyed(right)
    found = [f"on one side only: {key}" for key in left.keys() ^ right.keys()]
    for key in left.keys() & right.keys():
        row, other = left[key], right[key]
        where = f"{row['name']} {row['io']}{row['path']}"
        norm = math.sqrt((row["sumsq"] or 0.0) * row["numel"])
        columns = dict.fromkeys(EXACT, 0.0) | {"sum": BOUND * norm, "sumsq": BOUND * (row["sumsq"] or 0.0)}
        if not exact:
            largest = max(row["absmax"] or 0.0, 0.0)
            columns = dict.fromkeys(("min", "max", "absmax"), DRIFT * largest)
            columns |= {"sum": DRIFT * norm, "sumsq": DRIFT * (row["sumsq"] or 0.0)}
        for column, allowed in columns.items():
            if not near(row[column], other[column], allowed):
                found.append(f"{column} of {where}: {row[column]}, {other[column]}")
    return found


def of_the_model(row):
    """An activation of the forward pass: what comes before any gradient."""
    return row["phase"] == "forward" and row["kind"] == "activation" and not row["name"].startswith("outside")


def near(left, right, allowed):
    return left == right or (left is not None and right is not None and abs(left - right) <= allowed)


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2_distopt"])
def test_rows_are_those_of_host_memory(device_jobs, layout):
    out, ranks = device_jobs.probed(layout, "sketch", NO_DROPOUT)
    host = device_jobs.on_cpu(layout, "sketch")
    for rank in range(len(ranks)):
        for step in range(3):
            on_host, on_device = rows(host, step, rank), rows(out, step, rank)
            assert len(on_device) > 100
            assert differences(on_host, on_device, exact=False) == []
            if step == 0:
                first = [list(filter(of_the_model, some)) for some in (on_host, on_device)]
                assert len(first[0]) > 50
                assert differences(*first, exact=True) == []


def statistics(x):
    """The columns of a tensor in float64, by NumPy."""
    values = x.double().numpy() if x.dtype.is_floating_point else x.numpy().astype(np.float64)
    finite = values[np.isfinite(values)]
    return {
        "min": finite.min(initial=np.inf),
        "max": finite.max(initial=-np.inf),
        "absmax": np.abs(finite).max(initial=-np.inf),
        "n_nan": int(np.isnan(values).sum()),
        "n_zero": int((values == 0).sum()),
        "sum": finite.sum(),
        "sumsq": (finite * finite).sum(),
    }


def wrong(row, x):
    """Columns of a row that are not those of its tensor."""
    true = statistics(x)
    # Slots of the device are float32: a float64 loses its last digits.
    rounded = 2.0**-23 * float(true["absmax"]) if x.is_floating_point() and x.dtype.itemsize == 8 and x.numel() else 0.0
    allowed = dict.fromkeys(("min", "max", "absmax"), rounded)
    allowed |= {"sum": BOUND * math.sqrt(true["sumsq"] * max(1, x.numel())), "sumsq": BOUND * true["sumsq"]}
    stored = {
        column: {"min": np.inf, "max": -np.inf, "absmax": -np.inf}.get(column) if row[column] is None else row[column]
        for column in true
    }
    return [
        f"{column} of {row['name']}: {stored[column]}, {value}"
        for column, value in true.items()
        if not near(stored[column], value, allowed.get(column, 0.0))
    ]


@pytest.mark.parametrize("layout", ["single", "tp2", "pp2", "dp2_distopt"])
def test_rows_are_those_of_the_saved_tensors(device_jobs, layout):
    from safetensors import safe_open

    out, ranks = device_jobs.probed(layout, "tensor")
    compared = 0
    for rank in range(len(ranks)):
        folder = out / "step_000001" / f"rank_{rank:05d}"
        saved = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                saved |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for row in rows(out, 1, rank):
            if row["tensor"] in saved:
                compared += 1
                assert wrong(row, saved[row["tensor"]]) == []
    assert compared > 200


def test_the_comparisons_can_fail(device_jobs):
    found = rows(device_jobs.probed("single", "sketch", NO_DROPOUT)[0], 0)
    large = next(i for i, row in enumerate(found) if row["sumsq"] and row["numel"] > 100)
    for column, value in (
        ("max", found[large]["max"] * (1 + 1e-7)),
        ("sumsq", found[large]["sumsq"] * (1 + 3e-5)),
        ("n_zero", found[large]["n_zero"] + 1),
        ("digest", found[large]["digest"] ^ 1),
    ):
        changed = [{**row} for row in found]
        changed[large][column] = value
        assert len(differences(found, changed, exact=True)) == 1, column
    changed = [{**row, "sumsq": row["sumsq"] * 1.001 if row["sumsq"] else row["sumsq"]} for row in found]
    assert differences(found, changed, exact=False)
    row = {**dict.fromkeys(KEY, ""), "name": "x", **statistics(torch.arange(4.0))}
    assert wrong(row, torch.arange(4.0)) == []
    assert len(wrong(row, torch.tensor([0.0, 1.0, 2.0, 3.001]))) == 4
