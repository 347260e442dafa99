"""Merged shards are the tensors of the single run: inputs, outputs, gradients, parameters of every module."""

import math

import pytest

from msprobe_megatron.analysis.compare.merge import merged
from msprobe_megatron.analysis.load.run import open_run

_LAYOUTS = ("tp2", "tp2_sp", "pp2", "pp2_vpp2", "tp2_pp2", "cp2", "recompute")
_KINDS = ("activation", "gradient", "parameter", "grad_reduced")


def tensors(path, step):
    columns = (
        "microbatch, phase, kind, name, io, path, numel, min, max, sum, sumsq, absmax, n_zero, n_nan, global_shape,"
        " replicas_agree, reason"
    )
    rows = merged(open_run(path), step).filter("kind <> 'loss' and phase <> 'recompute'").project(columns).fetchall()
    return {row[:6]: row[6:] for row in rows}


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("layout", _LAYOUTS)
def test_merged_shards_equal_the_single_run(jobs, layout, step):
    single = tensors(jobs.probed("single", dropout=False)[0], step)
    whole = tensors(jobs.probed(layout, dropout=False)[0], step)
    assert whole.keys() == single.keys()
    assert {key[2] for key in whole} == set(_KINDS)
    # After two steps of Adam the rounding of the layouts has been amplified a little.
    relative = 2e-5 if step == 0 else 2e-3
    for key, (numel, low, high, total, squares, largest, zeros, nans, shape, agree, reason) in whole.items():
        expected = single[key]
        assert reason == "", f"{key}: {reason}"
        assert agree, f"{key}: replicas differ"
        assert numel == expected[0], key
        assert shape == expected[8], key
        assert (zeros, nans) == (expected[6], expected[7]) or key[2] in ("gradient", "grad_reduced"), key
        scale = expected[5] or 0.0
        assert math.isclose(low, expected[1], rel_tol=relative, abs_tol=relative * scale), key
        assert math.isclose(high, expected[2], rel_tol=relative, abs_tol=relative * scale), key
        assert math.isclose(squares, expected[4], rel_tol=2 * relative, abs_tol=1e-30), key
        # A sum may cancel: its error is measured against what was added up.
        bound = relative * math.sqrt(numel * (expected[4] or 0.0)) + 1e-12
        assert abs(total - expected[3]) <= bound, key


def test_distributed_optimizer_ranges_tile_the_gradients(jobs):
    """Each rank holds ranges of reduced gradients; together they are those of plain data parallel."""
    plain = tensors(jobs.probed("dp2", dropout=False)[0], 0)
    cut = tensors(jobs.probed("dp2_distopt", dropout=False)[0], 0)
    gradients = {key for key in plain if key[2] == "grad_reduced"}
    assert gradients
    for key in gradients:
        assert cut[key][0] == plain[key][0], key
        assert math.isclose(cut[key][4], plain[key][4], rel_tol=1e-5), key
    rows = open_run(jobs.probed("dp2_distopt", dropout=False)[0]).rows(step=0).filter("kind = 'grad_reduced'")
    assert rows.filter("shard like '%flat%'").aggregate("count(distinct rank)").fetchall() == [(2,)]


def test_a_wrong_shard_is_seen(jobs, monkeypatch):
    """The comparison fails when the merge forgets that TP ranks hold different parts."""
    from msprobe_megatron.analysis.compare import merge

    original = merge.merge_plan
    monkeypatch.setattr(merge, "merge_plan", lambda text, sizes: original(text.replace("[tp]", ""), sizes))
    single = tensors(jobs.probed("single", dropout=False)[0], 0)
    whole = tensors(jobs.probed("tp2", dropout=False)[0], 0)
    assert any(whole[key][0] != single[key][0] for key in whole)
    assert not all(row[9] for row in whole.values())
