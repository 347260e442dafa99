"""API calls, digests and sketches in real layouts: no bit changes, names stay, digests add up."""

import json

import pytest

from msprobe_megatron.analysis.compare.merge import merged
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.distributed.layouts import LAYOUTS, flags_of, train_and_keep
from tests.jobs.distributed.test_bit_exact import same
from tests.support.forked import run_forked

_LAYOUTS = ("single", "tp2", "pp2", "recompute", "ep2")
_PROBE = "steps: [0]\ndump: {level: mix, digest: true, sketch: 8, apis: all}\n"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Run directory and numbers of a layout under mix, digest and sketch; each run once."""
    root, done = tmp_path_factory.mktemp("mixed"), {}
    (root / "probe.yaml").write_text(_PROBE)

    def run(layout, dropout=True):
        if (layout, dropout) not in done:
            out = root / f"{layout}_{dropout}"
            argv = [*flags_of(layout, dropout=dropout), "--msprobe-config", str(root / "probe.yaml")]
            argv += ["--msprobe-output", str(out)]
            done[layout, dropout] = (out, run_forked(LAYOUTS[layout].world, train_and_keep, argv))
        return done[layout, dropout]

    return run


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_no_bit_changes(jobs, mixed, layout):
    out, probed = mixed(layout)
    rows = open_run(out).rows(step=0)
    assert rows.filter("name like '%/%' and kind = 'gradient'").aggregate("count(*)").fetchall()[0][0] > 100
    for rank, (left, right) in enumerate(zip(jobs.plain(layout), probed, strict=True)):
        for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
            assert same(left[what], right[what]), f"{layout}, rank {rank}: {what} differ"


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_nothing_failed_and_no_row_is_there_twice(mixed, layout):
    run = open_run(mixed(layout)[0])
    assert [facts["ledger"]["faults"] for facts in run.ranks.values()] == [[]] * LAYOUTS[layout].world
    columns = "step, rank, vpp, microbatch, phase, kind, name, io, path"
    assert run.rows().aggregate(f"{columns}, count(*) as n", columns).filter("n > 1").fetchall() == []


def test_saving_tensors_changes_no_bit(jobs, tmp_path):
    (tmp_path / "probe.yaml").write_text("steps: [0, 2]\ndump: {level: mix, task: tensor}\n")
    argv = [*flags_of("single", dropout=True), "--msprobe-config", str(tmp_path / "probe.yaml")]
    (probed,) = run_forked(1, train_and_keep, [*argv, "--msprobe-output", str(tmp_path / "run")])
    assert (tmp_path / "run/step_000002/rank_00000/tensors.safetensors").stat().st_size > 100_000
    for what in ("losses", "grad_norms", "gradients", "parameters", "optimizer", "rng"):
        assert same(jobs.plain("single")[0][what], probed[what]), what


def calls(path, where):
    rows = (
        open_run(path)
        .rows(step=0)
        .filter("name like '%/%' and name not like 'outside/%' and kind <> 'comm'")
        .filter(where)
    )
    return set(rows.project("kind, name, io, path").distinct().fetchall())


def test_names_of_calls_do_not_depend_on_the_pipeline(mixed):
    single = calls(mixed("single")[0], "true")
    assert ("activation", "decoder.layers.3.mlp/torch.nn.functional.silu.0", "output", "") in single
    assert ("gradient", "decoder.layers.3.mlp/torch.nn.functional.silu.0", "input", "0") in single
    assert calls(mixed("pp2")[0], "true") == single


def test_repeated_calls_have_their_own_phase_and_the_same_numbers(mixed):
    out, _ = mixed("recompute")
    assert calls(out, "true") >= calls(mixed("single")[0], "true")
    rows = open_run(out).rows(step=0).filter("kind = 'activation' and name like 'decoder.layers.%/%'")
    columns = "microbatch, name, io, path, sum, sumsq, digest"
    forward = sorted(rows.filter("phase = 'forward'").project(columns).fetchall())
    assert forward and forward == sorted(rows.filter("phase = 'recompute'").project(columns).fetchall())


def test_functions_of_megatron_have_their_own_names(mixed):
    ops = open_run(mixed("tp2")[0]).rows(step=0).filter("name like '%/%'").project("op").distinct().fetchall()
    names = {op.rpartition(".")[2] for (op,) in ops}
    assert {"_ReduceFromModelParallelRegion", "_VocabParallelCrossEntropy"} <= names


def test_router_and_dispatcher_have_their_own_names_and_gradients(mixed):
    rows = open_run(mixed("ep2")[0]).rows(step=0).filter("name like 'decoder.layers.0.%/%'")
    found = {(op.rpartition(".")[2], kind) for op, kind in rows.project("op, kind").distinct().fetchall()}
    for name in ("topk_routing_with_score_function", "permute", "unpermute", "token_dispatch", "combine_postprocess"):
        assert (name, "activation") in found and (name, "gradient") in found, name
    assert {("RouterGatingLinearFunction", "gradient"), ("_AllToAll", "gradient")} <= found


def test_calls_of_the_same_tensors_have_the_figures_of_the_module(mixed):
    """mix: what goes into the activation function is what came out of the layer before it."""
    rows = open_run(mixed("single")[0]).rows(step=0).filter("microbatch = 0 and phase = 'forward'")
    figures = "sum, sumsq, min, max, n_zero"
    module = rows.filter("name = 'decoder.layers.0.input_layernorm' and io = 'output'").project(figures).fetchall()
    inside = rows.filter("name like 'decoder.layers.0.input_layernorm/%' and io = 'output'").project(figures).fetchall()
    assert module and module[0] in inside


@pytest.mark.parametrize("layout", ["tp2", "pp2", "recompute"])
def test_digests_and_sketches_of_shards_add_up_to_those_of_the_single_run(mixed, layout):
    """Weights and tokens are the same numbers in every layout: so are their digests, to the bit."""
    columns = "kind, name, io, path, microbatch, digest"
    exact = "(kind = 'parameter' or path in ('input_ids', 'labels', 'position_ids')) and reason = ''"
    found = [
        sorted(merged(open_run(mixed(name)[0]), 0).filter(exact).project(columns).fetchall(), key=str)
        for name in ("single", layout)
    ]
    assert len(found[0]) > 40 and all(row[-1] is not None for row in found[0])
    assert found[0] == found[1]


def test_sketches_of_shards_add_up(mixed):
    def sketches(name):
        rows = open_run(mixed(name)[0]).rows(step=0).filter("kind = 'parameter' and shard like '%tp%'")
        if name == "single":
            rows = open_run(mixed(name)[0]).rows(step=0).filter("kind = 'parameter'")
        total = {}
        for key, cells in rows.project("name, sketch").fetchall():
            total[key] = [a + b for a, b in zip(total.get(key, [0.0] * 8), cells, strict=True)]
        return total

    whole, parts = sketches("single"), sketches("tp2")
    assert parts and all(parts[name] == pytest.approx(whole[name], abs=1e-4) for name in parts)


def comm(path, where, columns):
    rows = open_run(path).rows(step=0).filter(f"kind = 'comm' and {where}").order("seq")
    return rows.project(columns).fetchall()


def test_what_one_stage_sends_the_next_receives(mixed):
    """In order, to the bit, forward and backward; both rows name the other rank."""
    figures = "sum, sumsq, min, max, digest, cast(json_extract(extra, '$.peer') as int)"
    both = [
        comm(mixed("pp2")[0], f"rank = {rank} and op like '%.{op}' and name like 'comm/pp/%'", figures)
        for rank, op in ((0, "send"), (1, "recv"), (1, "send"), (0, "recv"))
    ]
    assert len(both[0]) == len(both[2]) == 4  # as many as microbatches
    for sent, received in (both[:2], both[2:]):
        assert [row[:-1] for row in sent] == [row[:-1] for row in received]
    assert {row[-1] for row in both[0] + both[3]} == {1} and {row[-1] for row in both[1] + both[2]} == {0}


def test_collectives_of_a_module_have_its_name_and_all_ranks_get_the_same(mixed):
    name = "decoder.layers.1.mlp.linear_fc2/torch.distributed.all_reduce.0"
    columns = "rank, microbatch, io, sum, json_extract_string(extra, '$.group'), json_extract(extra, '$.bytes'), numel"
    rows = comm(mixed("tp2")[0], f"name = '{name}' and phase = 'forward'", columns)
    assert len(rows) == 2 * 4 * 2
    assert {row[4] for row in rows} == {"tp"} and all(int(row[5]) == 4 * row[6] for row in rows)
    for microbatch in range(4):
        given = [row[3] for row in rows if row[1] == microbatch and row[2] == "input"]
        got = [row[3] for row in rows if row[1] == microbatch and row[2] == "output"]
        assert got[0] == got[1] == pytest.approx(sum(given), abs=1e-4)


def test_collectives_of_backward_and_optimizer_are_told_apart(mixed):
    phases = dict(comm(mixed("tp2")[0], "rank = 0", "phase, op"))
    assert {"forward", "backward", "optimizer"} <= set(phases)


def test_what_has_no_fixed_place_is_marked(mixed):
    rows = open_run(mixed("ep2")[0]).rows(step=0).filter("digest is not null")
    unordered = rows.filter("shard like '%unordered%'").project("extra").distinct().fetchall()
    assert unordered and all(json.loads(extra)["digest"] == "local" for (extra,) in unordered)
    assert rows.filter("kind = 'parameter' and shard not like '?%'").project("extra").distinct().fetchall() == [(None,)]


def test_sites_have_stacks_of_the_training_code(mixed):
    out, _ = mixed("single")
    sites = json.loads((out / "step_000000/rank_00000/sites.json").read_text())
    silu = next(s for s in sites["apis"] if s["name"] == "decoder.layers.0.mlp/torch.nn.functional.silu.0")
    assert "mlp.py" in silu["stack"][0] and not any("/msprobe_megatron/job/" in line for line in silu["stack"])
    ids = [site["site"] for site in (*sites["modules"], *sites["apis"])]
    assert len(ids) == len(set(ids))
