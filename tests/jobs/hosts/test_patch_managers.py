"""Beside MindSpeed's and ModelLink's patch managers, in either order: never lost without a word."""

import functools
import importlib.util
import json
import re
import sys
from collections import Counter

import pytest

from tests.jobs.distributed.layouts import flags_of
from tests.jobs.hosts.patch_manager import StandInManager
from tests.support.forked import run_forked

SCHEDULE = "megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining"


def real_manager(path):
    """MindSpeed's own, from its file: the package itself asks for an NPU."""
    spec = importlib.util.spec_from_file_location("mindspeed_patch_utils", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.MindSpeedPatchesManager


def manager(path):
    return StandInManager() if path is None else real_manager(path)


def foreign(calls, *, keep_trace):
    """What a foreign feature brings: a replacement of the schedule and a wrapper around it."""
    from megatron.core.pipeline_parallel import schedules

    true_schedule = schedules.forward_backward_no_pipelining

    def replacement(*args, **kwargs):
        calls["replacement"] += 1
        return true_schedule(*args, **kwargs)

    def feature_wrapper(function):
        def around(*args, **kwargs):
            calls["wrapper"] += 1
            return function(*args, **kwargs)

        return functools.wraps(function)(around) if keep_trace else around

    return replacement, feature_wrapper


def job(out, when, path, keep_trace):
    """Train three iterations; the foreign patches come `when`: before the kit, or after its first step."""
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    calls, patches = Counter(), manager(path)
    replacement, feature_wrapper = foreign(calls, keep_trace=keep_trace)

    def bring():
        if when != "wrap after":
            patches.register_patch(SCHEDULE, replacement)
        patches.register_patch(SCHEDULE, feature_wrapper)
        patches.apply_patches()

    if when == "before":
        bring()
    after = (lambda step: bring() if step.iteration == 1 else None) if when != "before" else None
    (out.parent / "probe.yaml").write_text("steps: [0-9]\ndump: {level: L0, task: statistics, list: [output_layer]}\n")
    flags = [*flags_of("single", dropout=False), "--train-iters", "4"]
    flags += ["--msprobe-config", str(out.parent / "probe.yaml"), "--msprobe-output", str(out)]
    run(flags, Callbacks(step=after))
    return dict(calls)


def told(out):
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == "overridden"]


def microbatches(out, step):
    import pyarrow.parquet as pq

    table = pq.read_table(out / f"step_{step:06d}/rank_00000/records.parquet")
    return set(table["microbatch"].to_pylist()) - {None}


def steps(out):
    return sorted(int(path.name.removeprefix("step_")) for path in out.glob("step_*"))


def check(tmp_path, path):
    for keep_trace in (True, False):
        out = tmp_path / f"before_{keep_trace}"
        (calls,) = run_forked(1, job, out, "before", path, keep_trace)
        assert calls == {"replacement": 4, "wrapper": 4}
        assert (steps(out), told(out)) == ([0, 1, 2, 3], [])

    # A wrapper on top leaves the kit below it, seen or not: nothing is lost, nothing is counted twice.
    for keep_trace in (True, False):
        out = tmp_path / f"wrapped_{keep_trace}"
        (calls,) = run_forked(1, job, out, "wrap after", path, keep_trace)
        assert calls == {"wrapper": 3}
        assert (steps(out), told(out)) == ([0, 1, 2, 3], [])
        assert microbatches(out, 3) == {0, 1, 2, 3}

    # A replacement throws the kit out: the step it happened in is lost, which is said by name; the rest is not.
    out = tmp_path / "replaced"
    (calls,) = run_forked(1, job, out, "after", path, True)
    assert calls == {"replacement": 3, "wrapper": 3}
    assert steps(out) == [0, 2, 3]
    (event,) = told(out)
    assert "forward_backward_no_pipelining" in event["text"]
    assert microbatches(out, 3) == {0, 1, 2, 3}


def test_stand_in(tmp_path):
    check(tmp_path, None)


def test_mindspeeds_own(mindspeed, tmp_path):
    check(tmp_path, mindspeed / "mindspeed/patch_utils.py")


# Options that only tune one of those, or of which nothing is hidden.
TUNING = {"swap_modules", "swap_optimizer_times", "coc_mode", "coc_parallel_num", "coc_fused_kernel"}


def test_every_such_feature_of_mindspeed_is_in_the_table(mindspeed):
    """Fused exchanges, repeats ahead of time and trips to the host, by the words that MindSpeed's own flags have."""
    from msprobe_megatron.topology.host.blind_spots import BLIND_SPOTS

    flag = re.compile(r"add_argument\(\s*['\"]--([a-z0-9-]*(?:swap|mc2|coc|in-advance|in-bubble)[a-z0-9-]*)['\"]")
    source = "\n".join(path.read_text(errors="replace") for path in (mindspeed / "mindspeed").rglob("*.py"))
    found = {name.replace("-", "_") for name in flag.findall(source)} - TUNING
    assert {"use_ascend_mc2", "recompute_in_advance", "swap_attention"} <= found
    assert found <= {spot.option for spot in BLIND_SPOTS}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_mc2": True, "swap_attention": True}, ["use_mc2", "swap_attention"]),
        ({"recompute_in_advance": True, "use_ascend_coc": 0}, ["recompute_in_advance"]),
        ({"schedules_method": "dualpipev", "moe_fb_overlap": True}, ["moe_fb_overlap", "schedules_method=dualpipev"]),
        ({"context_parallel_algo": "megatron_cp_algo", "cuda_graph_impl": "none"}, []),
        ({"context_parallel_algo": "hybrid_cp_algo"}, ["context_parallel_algo=hybrid_cp_algo"]),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "local"}, ["enable_cuda_graph", "cuda_graph_impl=local"]),
        ({"external_cuda_graph": True}, ["external_cuda_graph"]),
    ],
)
def test_what_a_feature_hides_is_named(options, named):
    from argparse import Namespace

    from msprobe_megatron.topology.host.blind_spots import unseen

    assert [text.partition(":")[0] for text in unseen(Namespace(**options), None)] == named


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, "zigzag"),
        ({"context_parallel_algo": "megatron_cp_algo", "attention_mask_type": "causal"}, "zigzag"),
        ({"context_parallel_algo": "megatron_cp_algo", "attention_mask_type": "general"}, "contiguous"),
        ({"context_parallel_algo": "ulysses_cp_algo"}, "contiguous"),
        ({"context_parallel_algo": "ulysses_cp_algo", "reset_attention_mask": True}, "unordered"),
        ({"context_parallel_algo": "adaptive_cp_algo"}, "unordered"),
    ],
)
def test_order_of_the_sequence_over_context_parallel_ranks(options, order):
    from argparse import Namespace

    from msprobe_megatron.topology.host.blind_spots import context_parallel_order

    assert context_parallel_order(Namespace(**options)) == order
