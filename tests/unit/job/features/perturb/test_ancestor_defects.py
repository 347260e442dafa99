"""Defects of msprobe's free benchmark, each turned around: what must not happen here. Numbers as in its list."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from msprobe_megatron import attach
from msprobe_megatron.config import Overrides, PerturbConfig, from_document
from msprobe_megatron.job.features.perturb.judge import checks
from msprobe_megatron.job.features.perturb.judge.verdict import (
    COLUMN,
    NAMES,
    START,
    WIDTH,
    Examined,
    PreheatSchedule,
    PreheatThresholds,
    host_verdict,
    judge,
)
from msprobe_megatron.job.features.perturb.run import changed_inputs
from msprobe_megatron.job.features.perturb.run.rerun import Guard, Refused, Rerunner, refusal
from msprobe_megatron.job.measure import pair

MODES = ["improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu"]


class Calls(nn.Module):
    """Runs a function of its input; the layers give it names to be found by."""

    def __init__(self, function):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].forward = lambda x: function(x)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.layers[0](x)


def examined(tmp_path, function, inputs, section, steps=1, start=0, backward=False):
    """Run `function` in a module under a perturb section; its results, and the rows that were written."""
    model = Calls(function)
    out = tmp_path / "out"
    config = from_document({"strict": True, "perturb": section}, "test", Overrides(output=str(out)))
    session = attach(model, None, config, step=start)
    results = []
    for _ in range(steps):
        x = inputs.clone().requires_grad_(backward)
        y = model(x)
        if backward:
            y.float().square().sum().backward()
        results.append(y.detach().clone())
        session.step()
    session.close()
    assert not session.faults
    rows = [row for file in sorted(out.glob("perturb/*/*.parquet")) for row in pq.read_table(file).to_pylist()]
    return results, [{**row, **json.loads(row["extra"])} for row in rows], session


def line_of(**figures):
    line = np.full(WIDTH, np.nan)
    for name, value in figures.items():
        line[COLUMN[name]] = value
    return line


def seen(mode="improve_precision", profile="ulp", dtype="float32", kind="elementwise", step=0, stage="forward"):
    fixed = (0, step, 0, "layers.0/torch.exp.0", "torch.exp", 0, 0, "forward", 0, "", kind, 1, dtype, (4,))
    return Examined(*fixed, mode, stage, profile)


@pytest.mark.parametrize("profile", ["ulp", "msprobe"])
@pytest.mark.parametrize("mode", MODES)
def test_1_and_8_in_place_operators_run_once_and_are_not_reported(tmp_path, mode, profile):
    def function(x):
        y = x.clone()
        y.mul_(2).add_(1)
        y[0] = 7.0
        F.relu(y, inplace=True)
        torch.mul(x[1:2], 3.0, out=y[1:2])
        return y

    inputs = torch.tensor([3.0, 4.0, -5.0])
    section = {"mode": mode, "profile": profile, "budget": "all"}
    results, rows, session = examined(tmp_path, function, inputs, section)
    plain = function(inputs)
    assert torch.equal(results[0], plain)
    assert not rows
    assert session.ledger()["perturb"]["never_run_twice"]["mutates"] >= 4


def test_2_collectives_are_refused_before_they_run(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(2)
        with pytest.raises(Refused, match="collective"), Guard():
            dist.all_reduce(x)
        assert refusal(dist.all_reduce, "torch.distributed.distributed_c10d.all_reduce") == "collective"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", MODES)
def test_3_inf_and_nan_of_the_live_result_stay(tmp_path, mode):
    section = {"mode": mode, "profile": "msprobe", "list": ["mul"]}
    results, _, _ = examined(tmp_path, lambda x: x * x, torch.tensor([300.0, float("nan"), 2.0]).half(), section)
    assert results[0][::2].tolist() == [float("inf"), 4.0]
    assert results[0].isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("mode", MODES)
def test_5_random_operators_are_not_run_again(tmp_path, mode):
    torch.manual_seed(5)
    x = torch.ones(64)
    expected = [F.dropout(x, 0.5), torch.rand(3), F.dropout(x, 0.5)]
    torch.manual_seed(5)
    got = []

    def function(x):
        got.append(F.dropout(x, 0.5))
        got.append(torch.rand_like(x[:3]))
        got.append(F.dropout(x, 0.5))
        return x

    _, rows, session = examined(tmp_path, function, x, {"mode": mode, "budget": "all"})
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert not rows
    assert session.ledger()["perturb"]["never_run_twice"]["random"] >= 2


def test_5_a_function_that_draws_without_saying_so_is_found_out():
    def draws(x):
        torch.default_generator.manual_seed(3)
        return x + 1

    before = torch.get_rng_state()
    with pytest.raises(Refused, match="random"):
        Rerunner().run(draws, (torch.ones(1),), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_6_no_part_of_a_large_result_is_forgotten(monkeypatch):
    live = torch.ones((1 << 23) + 9)  # more than 32 MiB
    out = torch.empty(pair.COUNT, dtype=torch.float64)
    for where in (0, 1 << 22, (1 << 23) + 5, live.numel() - 1):
        other = live.clone()
        other[where] = 3.0
        pair.compare(live, other, out, 1e-4)
        assert [out[pair.NAMES.index(name)] for name in ("ratio", "different", "where")] == [3.0, 1.0, where]
    monkeypatch.setattr(pair, "_PIECE", 1000)
    monkeypatch.setattr(pair.library, "kernel", lambda: None)
    for where in (0, 999, 1000, 2499):
        other = live[:2500].clone()
        other[where] = 3.0
        pair.compare(live[:2500], other, out, 1e-4)
        assert [out[pair.NAMES.index(name)] for name in ("ratio", "different", "where")] == [3.0, 1.0, where]


def test_7_nan_counts_and_hides_nothing():
    live = torch.tensor([1.0, float("nan"), -2.0, 4.0])
    other = torch.tensor([1.0, 1.0, 2.0, 4.0])
    out = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
    pair.compare(live, other, out, 1e-4)
    assert out[COLUMN["nan_apart"]] == 1
    assert out[COLUMN["flipped"]] == 1
    assert judge(seen("no_change", "msprobe"), out.numpy()).word == "nan"


HEALTHY = {
    "relu": F.relu,
    "times two": lambda x: x * 2,
    "gelu": F.gelu,
    "softmax": lambda x: F.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "matmul": lambda x: x @ x.flatten(0, 1).t()[:, :16],
    "sum": lambda x: x.sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_9_and_10_healthy_operators_are_not_reported(tmp_path, mode, dtype):
    torch.manual_seed(1)
    x = torch.randn(8, 4, 48).to(dtype)

    def function(x):
        return [operator(x) for operator in HEALTHY.values()][0]

    _, rows, _ = examined(tmp_path, function, x, {"mode": mode, "budget": "all"})
    assert [(row["op"], row["verdict"]) for row in rows if row["verdict"] != "ok"] == []
    assert len(rows) >= (3 if mode == "change_value" else len(HEALTHY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_11_noise_moves_every_normal_element_by_one_unit(dtype):
    torch.manual_seed(2)
    x = torch.randn(50, 40).to(dtype)
    x.view(-1)[:4] = torch.tensor([0.0, float("inf"), float("nan"), torch.finfo(dtype).smallest_normal / 4])
    state = torch.get_rng_state()
    moved = changed_inputs.add_ulps(x, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.view(-1)[:4].nan_to_num(9.0), moved.view(-1)[:4].nan_to_num(9.0))
    a, b = x.view(-1)[4:].double().numpy(), moved.view(-1)[4:].double().numpy()
    bits = round(-np.log2(torch.finfo(dtype).eps))
    unit = np.exp2(np.floor(np.log2(np.maximum(abs(a), abs(b)))) - bits)
    steps = (b - a) / unit
    assert set(np.round(abs(steps), 6)) <= {1.0, 0.5}  # below a power of two units are half as large
    assert 0.3 < (steps > 0).mean() < 0.7


def test_11_a_shard_gets_its_part_of_the_noise_of_the_whole():
    whole = torch.randn(8, 12)
    expected = changed_inputs.add_ulps(whole, 2)
    for tp in range(2):
        numbering = ((12, ((0, 8, 0),)), (1, ((0, 6, 6 * tp),)))
        part = changed_inputs.add_ulps(
            whole[:, 6 * tp : 6 * tp + 6].contiguous(), 2, ((12, ((0, 8, 0),)), numbering[1])
        )
        assert torch.equal(part, expected[:, 6 * tp : 6 * tp + 6])


@pytest.mark.parametrize("table", [1 << 16, 8])
@pytest.mark.parametrize("piece", [1 << 19, 50])
def test_11_in_pieces_too_and_beyond_the_table_of_signs(monkeypatch, piece, table):
    """Whole, cut over its wide dimension (as zig-zag too), and by pieces: an element moves the same way."""
    monkeypatch.setattr(changed_inputs, "_TABLE", table)
    changed_inputs._table.cache_clear()
    whole = torch.randn(3, 100)
    expected = changed_inputs.add_ulps(whole, 1)
    monkeypatch.setattr(changed_inputs, "_PIECE", piece)
    assert torch.equal(changed_inputs.add_ulps(whole, 1), expected)
    assert torch.equal(changed_inputs.add_ulps(whole.t().contiguous().t(), 1), expected)
    rows = (100, ((0, 3, 0),))
    right = changed_inputs.add_ulps(whole[:, 50:], 1, (rows, (1, ((0, 50, 50),))))
    assert torch.equal(right, expected[:, 50:])
    outer = torch.cat([whole[:, :25], whole[:, 75:]], 1)
    moved = changed_inputs.add_ulps(outer, 1, (rows, (1, ((0, 25, 0), (25, 25, 75)))))
    assert torch.equal(moved, torch.cat([expected[:, :25], expected[:, 75:]], 1))
    flat = whole.reshape(-1)
    assert torch.equal(
        changed_inputs.add_ulps(flat[200:], 1, ((1, ((0, 100, 200),)),)), changed_inputs.add_ulps(flat, 1)[200:]
    )
    signs = (expected.view(torch.int32) - whole.view(torch.int32)).double()
    assert abs(signs.mean()) < 0.3 and abs((signs[:, 1:] * signs[:, :-1]).mean()) < 0.3
    changed_inputs._table.cache_clear()


def test_12_the_verdict_is_a_condition_number(tmp_path):
    for ulps in (1, 16):
        section = {"mode": "add_noise", "ulps": ulps, "list": ["mul"]}
        _, rows, _ = examined(tmp_path / str(ulps), lambda x: x * 3, torch.randn(64, 64), section)
        assert rows[0]["kappa"] == pytest.approx(1.0, rel=0.3)
    _, rows, _ = examined(
        tmp_path / "fragile", lambda x: x - 1.0, 1 + 1e-5 * torch.randn(64, 64), {"mode": "add_noise", "list": ["sub"]}
    )
    assert rows[0]["verdict"] == "fragile"
    assert rows[0]["kappa"] > 1e4


def test_14_a_bias_counts_on_both_sides():
    live = torch.ones(1000) * 0.5
    for sign in (1, -1):
        line = torch.full((WIDTH,), torch.nan, dtype=torch.float64)
        checks.against_host(live, live - sign * 2e-4, line)
        values = dict(zip(NAMES, line.tolist(), strict=True))
        assert host_verdict(seen("to_cpu", "msprobe", "bfloat16"), values).word == "changed"
        assert values["cpu_balance"] == pytest.approx(sign * 2e-4, rel=1e-3)


def test_15_the_walk_of_preheat_takes_every_call_once_whatever_the_first_step_is():
    walk = PreheatSchedule(steps=5, most=20)
    taken = []
    for _ in range(8):
        walk.begin()
        taken.append([call for call in range(11) if walk.chooses("torch.matmul")])
    assert taken[0] == []
    assert sorted(call for calls in taken for call in calls) == list(range(11))
    assert taken[5:] == [[], [], []]


def test_15_where_there_are_too_many_calls_the_walk_is_spread_over_all_of_them():
    """As many as `max_samples` allows, from the first layer to the last, none of them twice."""
    walk, calls = PreheatSchedule(steps=4, most=5), 100
    taken = []
    for _ in range(6):
        walk.begin()
        taken.append([call for call in range(calls) if walk.chooses("torch.matmul")])
    every = sorted(call for of_step in taken for call in of_step)
    assert [len(of_step) for of_step in taken] == [0, 5, 5, 5, 0, 0]
    assert len(set(every)) == 15
    assert max(b - a for a, b in zip([-1, *every], [*every, calls], strict=True)) <= 8


def test_15_thresholds_of_a_healthy_call_go_down_by_half():
    preheat = PreheatThresholds()
    thresholds = []
    for step in range(6):
        one = seen(profile="msprobe", dtype="float16", step=step)
        thresholds.append(preheat.threshold(one))
        preheat.add(one, line_of(ratio=1.0001, cpu_abs=0.0, cpu_rel=0.0, cpu_balance=0.0))
    assert thresholds == pytest.approx([START, 1.525, 1.2625, 1.13125, 1.065625, 1.0328125])
    bad = seen(profile="msprobe", dtype="float16", step=6)
    preheat.threshold(bad)
    preheat.add(bad, line_of(ratio=1.01, cpu_abs=1.0, cpu_rel=0.0, cpu_balance=0.0))
    assert preheat.threshold(seen(profile="msprobe", dtype="float16", step=7)) == pytest.approx(1.01)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_15_preheat_learns_in_both_stages_and_in_a_resumed_run(tmp_path, stage):
    section = {"preheat": True, "preheat_steps": 4, "list": ["softmax"], "stage": stage}
    x = torch.randn(16, 16).half()
    _, rows, session = examined(tmp_path, lambda x: F.softmax(x, -1), x, section, 6, start=70, backward=True)
    part = session.features.all[0]
    assert part._judge.preheat.thresholds
    assert all(1.002 <= value < START for value in part._judge.preheat.thresholds.values())
    assert min(row["step"] for row in rows) == 71


def test_16_one_row_for_each_gradient(tmp_path):
    section = {"stage": "backward", "list": ["matmul"]}
    _, rows, _ = examined(tmp_path, lambda x: x @ x.t(), torch.randn(6, 6), section, backward=True)
    assert len(rows) == len({(row["name"], row["path"]) for row in rows}) == 2
    assert PerturbConfig().max_samples == 20


def test_13_and_17_rows_say_where(tmp_path):
    _, rows, _ = examined(tmp_path, lambda x: x.exp(), torch.randn(4), {"list": ["exp"]}, steps=2)
    assert [row["step"] for row in rows] == [0, 1]
    assert {row["name"] for row in rows} == {"layers.0/torch.Tensor.exp.0"}
    assert {row["layer"] for row in rows} == {0}
    assert {(row["microbatch"], row["phase"], row["rank"], row["tp"]) for row in rows} == {(0, "forward", 0, 0)}


def test_18_the_device_is_not_waited_for():
    """A read of a number would raise: there is none in the checks on tensors of a device that has no values."""
    x = torch.ones(64, 64, device="meta")
    line = torch.empty(WIDTH, dtype=torch.float64, device="meta")
    for check in (*checks.ULP.values(), *(checks.as_msprobe(mode) for mode in MODES)):
        if check in (checks.ULP["to_cpu"],):
            continue
        run = (lambda y: y, lambda a, k: torch.exp(*a))
        case = checks.CheckedCall("torch.exp", "elementwise", (x,), {}, x.exp(), *run, 16, 1)
        try:
            check(case, line)
        except NotImplementedError as error:  # to_cpu has to copy, which a meta tensor cannot
            assert "meta" in str(error)
