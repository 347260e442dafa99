"""Check changes no bit of training: loss, gradients, parameters, optimizer, random generators, in every mode."""

import json

import pyarrow.parquet as pq
import pytest

from tests.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.distributed.test_bit_exact import same
from tests.forked import run_forked

KEPT = ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng")
# layout, the perturb section. Dropout is on, so that a random number drawn once too often is seen.
CASES = [
    ("tp2", "{budget: all}"),
    ("pp2", "{budget: all, stage: backward}"),
    ("recompute", "{budget: all}"),
    ("recompute", "{budget: all, stage: backward}"),
    ("moe", "{budget: all}"),
    ("moe", "{budget: all, stage: backward, mode: add_noise}"),
    ("tp2_sp", "{budget: all, stage: backward}"),
    ("single", "{}"),
    ("single", "{budget: all, mode: add_noise}"),
    ("single", "{budget: all, mode: bit_noise}"),
    ("single", "{budget: all, mode: change_value}"),
    ("single", "{budget: all, mode: no_change}"),
    ("single", "{budget: all, mode: to_cpu}"),
    ("single", "{profile: msprobe, mode: change_value}"),
    ("single", "{profile: msprobe, mode: no_change, list: [add, matmul, softmax], stage: backward}"),
    ("single", "{profile: msprobe, mode: to_cpu}"),
    ("single", "{preheat: true, preheat_steps: 2}"),
    ("single", "{modules: [core_attention, linear_qkv, linear_fc2, layernorm, mlp]}"),
]


def rows_of(out):
    files = sorted(out.glob("perturb/rank_*/*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize(("layout", "section"), CASES, ids=[f"{a}-{b}" for a, b in CASES])
def test_check_changes_no_bit(jobs, tmp_path, layout, section):
    plain = jobs.plain(layout)
    (tmp_path / "probe.yaml").write_text(f"strict: true\nperturb: {section}\n")
    out = tmp_path / "out"
    argv = [*flags_of(layout, dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    probed = run_forked(LAYOUTS[layout].world, train_and_keep, [*argv, "--msprobe-output", str(out)])
    for rank, (left, right) in enumerate(zip(plain, probed, strict=True)):
        for what in KEPT:
            assert same(left[what], right[what]), f"rank {rank}: {what} differ"
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
        assert not ledger["faults"]
        assert ledger["perturb"]["examined"] > 0
    rows = rows_of(out)
    assert rows
    assert {row["kind"] for row in rows} == {"perturb"}
    if "ulp" in {json.loads(row["extra"])["profile"] for row in rows}:
        found = [(row["name"], row["extra"]) for row in rows if json.loads(row["extra"])["verdict"] != "ok"]
        assert not found, found[:3]


def test_a_limited_run_does_not_hang(jobs, tmp_path):
    """Examining on one rank of a tensor-parallel pair adds no collective there."""
    (tmp_path / "probe.yaml").write_text("strict: true\nranks: [0]\nperturb: {budget: all, mode: no_change}\n")
    out = tmp_path / "out"
    argv = [*flags_of("tp2", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    probed = run_forked(2, train_and_keep, [*argv, "--msprobe-output", str(out)], timeout=60)
    for left, right in zip(jobs.plain("tp2"), probed, strict=True):
        assert same(left["parameters"], right["parameters"])
    assert {row["rank"] for row in rows_of(out)} == {0}


def test_recompute_is_examined_once(tmp_path):
    """Each call of a layer that is run twice has one row a microbatch."""
    (tmp_path / "probe.yaml").write_text("strict: true\nsteps: [0]\nperturb: {list: [softmax]}\n")
    out = tmp_path / "out"
    argv = [*flags_of("recompute", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    run_forked(1, train_and_keep, [*argv, "--msprobe-output", str(out)])
    seen = [(row["name"], row["microbatch"], row["phase"]) for row in rows_of(out)]
    assert len(seen) == len(set(seen)) == 4 * 4  # layers, microbatches
    assert {phase for _, _, phase in seen} == {"forward"}
