"""Check changes no bit of training: loss, gradients, parameters, optimizer, random generators, in every mode."""

import json

import pyarrow.parquet as pq
import pytest

from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked

KEPT = ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng")
# layout, the perturb section. Dropout is on, so that a random number drawn once too often is seen.
CASES = [
    ("tp2", "{budget: all}"),
    ("pp2", "{budget: all, stage: backward}"),
    ("recompute", "{budget: all, stage: backward}"),
    ("moe", "{budget: all}"),
    ("single", "{}"),
    ("single", "{budget: all, mode: no_change}"),
]
# The same oath for everything else, when all is tested.
MORE = [
    ("recompute", "{budget: all}"),
    ("moe", "{budget: all, stage: backward, mode: add_noise}"),
    ("tp2_sp", "{budget: all, stage: backward}"),
    ("single", "{budget: all, mode: add_noise}"),
    ("single", "{budget: all, mode: bit_noise}"),
    ("single", "{budget: all, mode: change_value}"),
    ("single", "{budget: all, mode: to_cpu}"),
    ("single", "{profile: msprobe, mode: change_value}"),
    ("single", "{profile: msprobe, mode: no_change, list: [add, matmul, softmax], stage: backward}"),
    ("single", "{profile: msprobe, mode: to_cpu}"),
    ("single", "{preheat: true, preheat_steps: 2}"),
    ("single", "{modules: [core_attention, linear_qkv, linear_fc2, layernorm, mlp]}"),
]
# Every mode and stage in every layout.
_MODES = ("improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu")
CROSS = [
    (layout, f"{{budget: all, mode: {mode}, stage: {stage}}}")
    for layout in ("tp2", "pp2", "recompute", "moe")
    for mode in _MODES
    for stage in ("forward", "backward")
]


def rows_of(out):
    files = sorted(out.glob("perturb/rank_*/*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize(
    ("layout", "section"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in (*MORE, *CROSS))],
    ids=[f"{a}-{b}" for a, b in (*CASES, *MORE, *CROSS)],
)
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


@pytest.mark.parametrize(
    ("ranks", "section"),
    [
        ("{tp: 0}", "{budget: all, mode: no_change}"),
        pytest.param("[0]", "{}", marks=pytest.mark.slow),
        pytest.param("[0]", "{budget: all, stage: backward}", marks=pytest.mark.slow),
    ],
)
def test_a_limited_run_does_not_hang(jobs, tmp_path, ranks, section):
    """Examining on one rank of a tensor-parallel pair, told by number or coordinates, adds no collective there."""
    (tmp_path / "probe.yaml").write_text(f"strict: true\nranks: {ranks}\nperturb: {section}\n")
    out = tmp_path / "out"
    argv = [*flags_of("tp2", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    probed = run_forked(2, train_and_keep, [*argv, "--msprobe-output", str(out)], timeout=60)
    for left, right in zip(jobs.plain("tp2"), probed, strict=True):
        assert same(left["parameters"], right["parameters"])
    assert {row["rank"] for row in rows_of(out)} == {0}


@pytest.mark.parametrize("layout", ["tp2", pytest.param("ep2", marks=pytest.mark.slow)])
def test_ranks_of_a_group_examine_the_same_in_every_step(tmp_path, layout):
    """Under a budget: the same calls of the same microbatches, so that none waits for another's examinations."""
    (tmp_path / "probe.yaml").write_text("strict: true\nperturb: {budget: 20%}\n")
    out = tmp_path / "out"
    argv = [*flags_of(layout, dropout=True), "--train-iters", "6", "--msprobe-config", str(tmp_path / "probe.yaml")]
    run_forked(2, train_and_keep, [*argv, "--msprobe-output", str(out)], timeout=90)
    by_rank = {0: set(), 1: set()}
    for row in rows_of(out):
        if "local_experts" not in row["name"]:  # those of a rank are its own
            by_rank[row["rank"]].add((row["step"], row["microbatch"], row["name"]))
    assert by_rank[0] == by_rank[1]
    steps = {step for step, _, _ in by_rank[0]}
    assert len(steps) >= 2 and 0 not in steps
    # Not everything at once: another part of the calls in another step.
    assert len({frozenset(name for s, _, name in by_rank[0] if s == step) for step in steps}) > 1


def test_modules_that_are_never_run_twice_are_said(tmp_path):
    """What was asked and could not be examined is no silence: this module ends in a collective."""
    (tmp_path / "probe.yaml").write_text("perturb: {mode: no_change, modules: [linear_fc2]}\n")
    out = tmp_path / "out"
    argv = [*flags_of("tp2", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    run_forked(2, train_and_keep, [*argv, "--msprobe-output", str(out)], timeout=60)
    assert rows_of(out) == []
    for rank in (0, 1):
        ledger = json.loads((out / f"ranks/rank_{rank:05d}.json").read_text())["ledger"]
        (said,) = ledger["not_happened"]
        assert "nothing was examined; decoder.layers.0.mlp.linear_fc2 (collective)" in said


def test_recompute_is_examined_once(tmp_path):
    """Each call of a layer that is run twice has one row a microbatch."""
    (tmp_path / "probe.yaml").write_text("strict: true\nsteps: [0]\nperturb: {list: [softmax]}\n")
    out = tmp_path / "out"
    argv = [*flags_of("recompute", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    run_forked(1, train_and_keep, [*argv, "--msprobe-output", str(out)])
    seen = [(row["name"], row["microbatch"], row["phase"]) for row in rows_of(out)]
    assert len(seen) == len(set(seen)) == 4 * 4  # layers, microbatches
    assert {phase for _, _, phase in seen} == {"forward"}


def test_what_the_dump_sees_does_not_change(tmp_path):
    """Calls and modules that are run again are no calls of the training code."""
    (tmp_path / "both.yaml").write_text("strict: true\nsteps: [1]\ndump: {level: mix}\nperturb: {budget: all}\n")
    (tmp_path / "dump.yaml").write_text("strict: true\nsteps: [1]\ndump: {level: mix}\n")
    names = []
    for which in ("both", "dump"):
        argv = [*flags_of("single", dropout=True), "--msprobe-config", str(tmp_path / f"{which}.yaml")]
        run_forked(1, train_and_keep, [*argv, "--msprobe-output", str(tmp_path / which)])
        table = pq.read_table(tmp_path / which / "step_000001/rank_00000/records.parquet")
        names.append(table.select(["name", "io", "path", "microbatch", "phase", "numel"]).to_pylist())
    assert names[0] == names[1]
    assert rows_of(tmp_path / "both")
