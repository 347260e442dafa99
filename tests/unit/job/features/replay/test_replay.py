"""`replay`: a module that is given the inputs of another run shows whether it is the one that is wrong."""

import json
from itertools import count

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.job.features.replay.recorded_inputs import RecordedInputs
from tests.jobs.compare.faults import train
from tests.jobs.compare.layouts import MORE, Runs
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import RankFailed, run_forked

_LAYERS = r"/layers\.\d+$/"


@pytest.fixture(scope="session")
def replayed(jobs, tmp_path_factory):
    """Golden runs with tensors, and jobs of any layout whose layers are fed from one."""
    root = tmp_path_factory.mktemp("replay")
    runs, known, number = Runs(jobs, root), {}, count()

    def of(golden, layout, fault="none", modules=_LAYERS, step=None):
        key = (golden, layout, fault, modules, step)
        if key not in known:
            out = root / f"replayed_{next(number)}"
            probe = out.with_suffix(".yaml")
            section = json.dumps({"run": str(runs.saved(golden)), "modules": [modules], "step": step})
            probe.write_text(f"steps: [0]\ndump: {{level: L0, task: tensor}}\nreplay: {section}\n")
            layouts = {**LAYOUTS, **MORE}
            argv = [*flags_of("single", dropout=False), *layouts[layout].flags.split(), "--train-iters", "1"]
            argv += ["--no-check-for-nan-in-loss-and-grad"]
            argv += ["--msprobe-config", str(probe), "--msprobe-output", str(out)]
            run_forked(layouts[layout].world, train, argv, fault)
            known[key] = out
        return runs, known[key]

    return of


def _outputs(result):
    """State of every layer's output in the forward."""
    rows = [r for r in result.table.to_pylist() if (r["kind"], r["io"]) == ("activation", "output")]
    return {int(r["name"].split(".")[-1]): r["state"] for r in rows if r["name"].split(".")[-2:-1] == ["layers"]}


def test_what_comes_after_a_fault_agrees_again(replayed):
    runs, fed = replayed("single", "tp2", "no_reduction")
    golden, plain = open_run(runs.saved("single")), open_run(runs.saved("tp2", "no_reduction"))
    # Not fed: all layers from the faulty one on differ.
    assert {layer for layer, state in _outputs(compare(golden, plain)).items() if state != "agree"} == {2, 3}
    result = compare(golden, open_run(fed))
    assert result.verdict == "diverged"
    assert {layer for layer, state in _outputs(result).items() if state != "agree"} == {2}
    assert result.first_divergence.name == "decoder.layers.2.mlp.linear_fc2"


_LONG = [pytest.param(layout, marks=pytest.mark.slow) for layout in ("cp2", "pp2_recompute")]


@pytest.mark.parametrize("layout", ["tp2_sp", "mbs1_dp2", *_LONG])
def test_a_clean_job_agrees_and_was_fed(replayed, layout):
    runs, fed = replayed("single", layout)
    run = open_run(fed)
    result = compare(open_run(runs.saved("single")), run)
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    counts = {}
    for facts in run.ranks.values():
        for name, fed_inputs in facts["ledger"]["replay"]["fed"].items():
            counts[name] = counts.get(name, 0) + fed_inputs
        assert facts["ledger"]["not_happened"] == []
    assert set(counts) == {f"decoder.layers.{i}" for i in range(4)}
    assert min(counts.values()) >= 4
    # Inputs are the golden run's to the bit.
    rows = [r for r in result.table.to_pylist() if r["name"] in counts and r["kind"] == "activation"]
    hidden = [r for r in rows if r["path"] == "hidden_states"]
    assert hidden
    assert {r["max_abs"] for r in hidden} == {0.0}


@pytest.mark.slow
def test_a_run_of_another_micro_batch_size(replayed):
    runs, fed = replayed("mbs1", "tp2_sp")
    result = compare(open_run(runs.saved("mbs1")), open_run(fed))
    assert result.verdict == "agree", result.first_divergence


def test_whole_inputs_from_shards(replayed):
    """The inputs of a TP2+SP run, put together, are those of the single run, sample by sample."""
    runs, _ = replayed("single", "tp2_sp")
    single, cut = (RecordedInputs(open_run(runs.saved(layout)), 0) for layout in ("single", "tp2_sp"))
    for first, samples in ((0, 2), (2, 2), (1, 3), (0, 8)):
        left = single.whole("decoder.layers.0", "hidden_states", first, samples)
        right = cut.whole("decoder.layers.0", "hidden_states", first, samples)
        assert left[0] == right[0] == ("s", "b", "h")
        assert left[1].shape == (16, samples, 32)
        assert abs(left[1] - right[1]).max() < 1e-6


def test_what_cannot_be_replayed_is_refused(replayed, tmp_path):
    probe = tmp_path / "probe.yaml"
    probe.write_text("steps: [0]\ndump: {level: L0}\nreplay: {run: /nowhere/at/all, modules: [mlp]}\n")
    argv = [*flags_of("single", dropout=False), "--train-iters", "1"]
    argv += ["--msprobe-config", str(probe), "--msprobe-output", str(tmp_path / "out")]
    with pytest.raises(RankFailed, match=r"replay\.run: .*not a directory"):
        run_forked(1, train, argv, "none")
    with pytest.raises(RankFailed, match="match no module"):
        replayed("single", "single", modules="no_such_module")


def test_a_step_that_was_not_recorded_is_told(replayed):
    """The golden run has step 0 only; the job goes on with its own inputs and says so."""
    _, fed = replayed("single", "single", step=7)
    (facts,) = open_run(fed).ranks.values()
    assert facts["ledger"]["replay"]["fed"] == {}
    assert any("step 7" in text and "has steps [0]" in text for text in facts["ledger"]["not_happened"])


def test_tensors_inside_of_arguments_are_replaced_under_the_paths_of_a_dump():
    from typing import NamedTuple

    import torch

    from msprobe_megatron.job.sites.calls.arguments import find_tensors, with_other_tensors

    class Pair(NamedTuple):
        left: torch.Tensor
        right: object

    x = [torch.full((2,), float(i)) for i in range(4)]
    value = (x[0], {"a": [x[1], None], "b": "text"}, Pair(x[2], x[3]))
    found, seen = [], []
    find_tensors(value, "rotary", found)

    def other(path, given):
        seen.append((path, given))
        return given + 10 if path in ("rotary.1.a.0", "rotary.2.0") else given

    new = with_other_tensors(value, "rotary", other)
    assert [path for path, _ in seen] == [path for path, _ in found]
    assert all(a is b for (_, a), (_, b) in zip(seen, found, strict=True))
    assert new[0] is x[0]
    assert new[1]["a"][0].tolist() == [11.0, 11.0]
    assert new[1]["b"] == "text"
    assert isinstance(new[2], Pair)
    assert (new[2].left.tolist(), new[2].right is x[3]) == ([12.0, 12.0], True)
    assert value[1]["a"][0] is x[1], "what was given is not changed"
    assert with_other_tensors(value, "", lambda path, given: given) is value
