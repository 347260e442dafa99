"""Rows of every layout: canonical names, nothing twice, nothing missing."""

import pytest

from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.distributed.layouts import LAYOUTS

_WHAT = "kind, name, io, path"


def keys(path, step=0):
    return set(open_run(path).rows(step=step).project(_WHAT).distinct().fetchall())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("single", "moe")])
def test_canonical_names_are_those_of_the_single_run(jobs, layout):
    out, _ = jobs.probed(layout, dropout=True)
    single, _ = jobs.probed(LAYOUTS[layout].single, dropout=True)
    assert keys(out) == keys(single)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_is_there_exactly_once_per_shard(jobs, layout):
    out, _ = jobs.probed(layout, dropout=True)
    rows = open_run(out).rows()
    twice = rows.aggregate(
        "step, rank, vpp, microbatch, phase, kind, name, io, path, count(*) as n",
        "step, rank, vpp, microbatch, phase, kind, name, io, path",
    ).filter("n > 1")
    assert twice.fetchall() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_microbatch_has_the_same_rows(jobs, layout):
    """Each (microbatch, phase) of a rank holds the same names: none is missing in any of them."""
    out, _ = jobs.probed(layout, dropout=True)
    found = {}
    for step, rank, vpp, microbatch, phase, *what in (
        open_run(out)
        .rows()
        .filter("microbatch is not null")
        .project(f"step, rank, vpp, microbatch, phase, {_WHAT}")
        .fetchall()
    ):
        found.setdefault((step, rank, vpp, phase), {}).setdefault(microbatch, set()).add(tuple(what))
    assert found
    data_parallel = LAYOUTS[layout].world if layout.startswith(("dp2", "ep2")) else 1
    for by_microbatch in found.values():
        assert sorted(by_microbatch) == list(range(4 // data_parallel))
        first = by_microbatch[0]
        assert all(names == first for names in by_microbatch.values())


def test_order_of_execution_and_coordinates(jobs):
    out, _ = jobs.probed("tp2_pp2", dropout=True)
    rows = open_run(out).rows(step=0)
    for rank in range(4):
        mine = rows.filter(f"rank = {rank}")
        seqs = [n for (n,) in mine.project("seq").order("seq").fetchall()]
        assert seqs == list(range(len(seqs)))
        assert mine.project("tp, pp").distinct().fetchall() == [(rank % 2, rank // 2)]
    layers = {0: set(), 1: set()}
    for pp, name in rows.filter("name like 'decoder.layers.%'").project("pp, name").distinct().fetchall():
        layers[pp].add(int(name.split(".")[2]))
    assert layers == {0: {0, 1}, 1: {2, 3}}


def test_virtual_stages_are_told_apart(jobs):
    out, _ = jobs.probed("pp2_vpp2", dropout=True)
    rows = open_run(out).rows(step=0).filter("name like 'decoder.layers.%'")
    where = {int(n.split(".")[2]): (pp, vpp) for pp, vpp, n in rows.project("pp, vpp, name").distinct().fetchall()}
    assert where == {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}


def test_uneven_stages_have_global_layer_numbers(jobs):
    out, _ = jobs.probed("pp2_uneven", dropout=True)
    chunks = {rank: facts["chunks"][0]["layers"] for rank, facts in open_run(out).ranks.items()}
    assert chunks == {0: [0], 1: [1, 2, 3]}


def test_recomputation_is_its_own_phase_and_keeps_the_microbatch(jobs):
    out, _ = jobs.probed("pp2_recompute", dropout=True)
    rows = open_run(out).rows(step=0).filter("kind = 'activation' and name like 'decoder.layers.%'")
    columns = "rank, microbatch, name, io, path, sum, sumsq, min, max"
    forward = sorted(rows.filter("phase = 'forward'").project(columns).fetchall())
    again = sorted(rows.filter("phase = 'recompute'").project(columns).fetchall())
    # Recomputation restores the random state, so that even with dropout the numbers are the same ones.
    assert forward
    assert forward == again


def test_run_json_and_rank_files(jobs):
    out, _ = jobs.probed("tp2_pp2", dropout=True)
    run = open_run(out)
    assert run.facts["world"] == 4
    assert run.sizes["tp"] == run.sizes["pp"] == 2
    assert [(c["tp"], c["pp"]) for c in run.facts["ranks"]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert run.facts["arguments"]["num_layers"] == 4
    assert sorted(run.ranks) == [0, 1, 2, 3]
    for rank, facts in run.ranks.items():
        assert facts["coordinates"]["rank"] == rank
        assert facts["closed"]
        assert facts["ledger"]["steps"] == [0, 2]
        assert facts["ledger"]["faults"] == []
        assert facts["ledger"]["not_happened"] == []
    assert run.ranks[2]["chunks"][0]["layers"] == [2, 3]
