"""Every kind that is watched, in every layout, against what the test itself saw there."""

import pytest

from tests.unit.job.features.monitor.conftest import JOBS, rows_of
from tests.unit.job.features.monitor.ground_truth import STEP

OPTIMIZERS = {
    "tp2": {"FP32Optimizer"},
    "pp2": {"Float16OptimizerWithFloat16Params"},
    "dp4": {"DistributedOptimizer"},
    "ep2": {"DistributedOptimizer"},
}
WEIGHTS = ("grad_unreduced", "grad_reduced", "grad_clipped", "optimizer_state", "update", "parameter")
EXACT = ("min", "max", "absmax")
# A ratio is worked out from sums of squares; attention is looked at in float32 and here in float64; a singular value
# is approached from below while these weights still change by half in a step (test_metrics has it exact).
SLACK = {
    "ratio": 1e-6,
    **dict.fromkeys(("attention_entropy", "attention_logit", "router_entropy"), 1e-4),
    **{"spectral_norm": 0.15, "stable_rank": 0.3},
}


def key_of(row):
    return "|".join(map(str, (row["kind"], row["name"], row["io"], row["path"], row["microbatch"])))


def check(row, truth, what):
    low, high, total, squares, absmax, zeros, numel, magnitude = truth
    slack = SLACK.get(row["io"], 0.0)
    for column, expected in zip(EXACT, (low, high, absmax), strict=True):
        assert row[column] == pytest.approx(expected, rel=slack, abs=slack * 1e-2), f"{what}: {column}"
    assert row["numel"] == numel, what
    assert row["n_zero"] == zeros or "entropy" in row["io"], what
    assert row["n_nan"] == row["n_posinf"] == row["n_neginf"] == 0, what
    assert row["sum"] == pytest.approx(total, rel=1e-6 + slack, abs=1e-6 * magnitude), f"{what}: sum"
    assert row["sumsq"] == pytest.approx(squares, rel=3e-6 + 2 * slack), f"{what}: sumsq"


@pytest.mark.parametrize("name", JOBS)
def test_values_are_those_of_numpy(watched, name):
    out, ranks = watched.job(name)
    for rank, truth in enumerate(ranks):
        assert set(truth["optimizers"]) == OPTIMIZERS[name]
        rows = {key_of(row): row for row in rows_of(out, rank, STEP)}
        missing = [key for key in truth["found"] if key not in rows]
        assert not missing, f"rank {rank}: {missing[:3]} of {len(missing)} were not recorded"
        for key, expected in truth["found"].items():
            check(rows[key], expected, f"rank {rank} {key}")
        told = {key for key, row in rows.items() if row["kind"] in WEIGHTS and not _no_norm(row)}
        assert told == {key for key in truth["found"] if key.split("|")[0] in WEIGHTS}


def _no_norm(row):
    """The ratio to a weight of nothing but zeros: there is a row and no number."""
    return row["io"] == "ratio" and row["sum"] is None


def test_the_comparison_sees_every_kind(watched):
    for name in JOBS:
        kinds = {
            key.split("|")[0] + "|" + key.split("|")[2] for truth in watched.job(name)[1] for key in truth["found"]
        }
        expected = {"activation|input", "activation|output", "gradient|input", "gradient|output", "grad_reduced|weight"}
        expected |= {"grad_clipped|weight", "optimizer_state|exp_avg", "optimizer_state|exp_avg_sq", "update|change"}
        expected |= {"optimizer_state|sign_agreement", "parameter|weight", "update|ratio", "loss|value"}
        expected |= {"grad_unreduced|weight", "scalar|attention_entropy", "scalar|attention_logit"}
        expected |= {"scalar|spectral_norm", "scalar|stable_rank"}
        routed = {"scalar|expert_load", "scalar|dropped_tokens", "scalar|router_entropy"}
        expected |= routed if name == "ep2" else set()
        assert expected <= kinds, name
    assert any("optimizer_state|" in key and "master" in key for key in watched.job("dp4")[1][0]["found"])


def test_shards_of_several_buckets_tile_every_parameter(watched):
    out, ranks = watched.job("dp4")
    parts: dict[str, list[tuple[int, int]]] = {}
    whole: dict[str, int] = {}
    for rank in range(len(ranks)):
        for row in rows_of(out, rank, STEP):
            if row["kind"] == "optimizer_state" and row["io"] == "exp_avg":
                start, stop = row["shard"].rpartition("flat ")[2].split(":")
                parts.setdefault(row["name"], []).append((int(start), int(stop)))
                size = 1
                for extent in row["global_shape"]:
                    size *= extent
                whole[row["name"]] = size
    assert max(map(len, parts.values())) > 2, "no parameter lies on more than two ranks: the test shows little"
    for name, found in parts.items():
        assert sorted(found)[0][0] == 0 and sorted(found)[-1][1] == whole[name], name
        assert all(left[1] == right[0] for left, right in zip(sorted(found), sorted(found)[1:], strict=False)), name


def test_experts_are_reduced_over_their_own_group(watched):
    out, ranks = watched.job("ep2")
    for rank in range(len(ranks)):
        rows = rows_of(out, rank, STEP)
        experts = {row["name"] for row in rows if "experts" in row["name"] and row["kind"] == "grad_unreduced"}
        # EP2 over four ranks: an expert is on two of them, and a rank has two of the four.
        assert {name.split("local_experts.")[1].split(".")[0] for name in experts} in ({"0", "1"}, {"2", "3"})


def test_losses_are_those_of_the_job(watched):
    out, ranks = watched.job("pp2")
    rows = [row for row in rows_of(out, 1, STEP) if row["kind"] == "loss" and row["name"] == "lm loss"]
    assert {row["microbatch"] for row in rows} == set(range(8))
    assert not [row for row in rows_of(out, 0, STEP) if row["name"] == "lm loss"]


@pytest.mark.parametrize("name", JOBS)
def test_scalars_and_throughput(watched, name):
    out, ranks = watched.job(name)
    for rank in range(len(ranks)):
        rows = {row["name"]: row for row in rows_of(out, rank, STEP) if row["kind"] in ("scalar", "throughput")}
        assert rows["learning_rate"]["sum"] == pytest.approx(1e-2)
        assert rows["loss_scale"]["sum"] == 1.0 and rows["skipped"]["sum"] == 0.0
        assert 0 < rows["seconds"]["sum"] <= rows["interval_seconds"]["sum"] < 120
        assert rows["host_bytes"]["sum"] > 1 << 26
        data_parallel = {"dp4": 4, "ep2": 4}.get(name, 1)
        assert rows["samples"]["sum"] == 8 / data_parallel and rows["tokens"]["sum"] == 16 * 8 / data_parallel


def test_data_of_ranks_that_share_a_microbatch_is_the_same(watched):
    out, _ = watched.job("tp2")
    digests = [
        [(row["microbatch"], row["path"], row["digest"]) for row in rows_of(out, rank) if row["kind"] == "data"]
        for rank in range(2)
    ]
    assert digests[0] == digests[1] and all(digest for *_, digest in digests[0])
    rows = [row for row in rows_of(out, 0) if row["kind"] == "data" and row["name"] == "input_ids"]
    assert len(rows) == 3 * 8
    samples = {row["digest"]: (row["min"], row["max"], row["sum"], row["sumsq"]) for row in rows}
    assert all(samples[row["digest"]] == (row["min"], row["max"], row["sum"], row["sumsq"]) for row in rows)
    # The demo draws its tokens from a short text, so that some samples come twice.
    assert len(samples) >= len(set(samples.values())) > 8


def test_communication_is_watched(watched):
    out, _ = watched.job("tp2")
    rows = [row for row in rows_of(out, 0, STEP) if row["kind"] == "comm"]
    assert any("all_gather" in row["op"] for row in rows) and any("reduce_scatter" in row["op"] for row in rows)


@pytest.mark.parametrize("name", JOBS)
def test_every_step_has_the_same_rows(watched, name):
    """The first one too, in which Megatron's overlapped reduction begins only when all gradients are there."""
    out, ranks = watched.job(name)
    for rank in range(len(ranks)):
        steps = [{key_of(row) for row in rows_of(out, rank, step)} for step in range(3)]
        # There is no momentum before the first step, and no interval to the one before.
        steps[0] |= {key for key in steps[1] if "sign_agreement" in key or "interval_seconds" in key}
        assert steps[0] == steps[1] == steps[2]
