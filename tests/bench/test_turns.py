"""The clockwork of the benches: whose turn it is, medians of what was measured, and what the command refuses."""

import contextlib
import cProfile
import io
import json
import pstats
from pathlib import Path

import pytest
import torch

from msprobe_megatron.bench import dump, layers, monitor, perturb
from msprobe_megatron.bench.options import Options
from msprobe_megatron.bench.profile import _job, profiles, text
from msprobe_megatron.bench.turns import PLAIN, BenchFailed, Turns, Workload
from msprobe_megatron.bench.volume import _models
from msprobe_megatron.bench.workloads import asked
from msprobe_megatron.cli import main
from msprobe_megatron.commands.bench import KEYS
from msprobe_megatron.measure.stats import measure
from tests.bench.forks import bench, forked


def turns_of(tmp_path, variants, turns=4):
    return Turns(Workload("w", "", turns, 1), variants, tmp_path)


def test_every_variant_has_its_turn_and_none_always_follows_the_same(tmp_path):
    some = turns_of(tmp_path, dict.fromkeys("abcd", {}))
    orders = [some._order(turn) for turn in range(4)]
    assert all(sorted(order) == ["a", "b", "c", "d", PLAIN, PLAIN] for order in orders)
    assert len({order[0] for order in orders}) == 3
    assert some.iterations == 2 + 4 * 6 * 2
    assert turns_of(tmp_path, {"a": {}})._order(1) == ["a", PLAIN]


def test_ratios_are_of_medians(tmp_path):
    some = turns_of(tmp_path, {"a": {}})
    some.times = {PLAIN: [1.0, 1.2, 9.0], "a": [1.5, 1.8, 90.0]}
    some.training = {PLAIN: [1.0, 1.0, 1.0], "a": [1.25, 1.25, 9.0]}
    some._peaks = {PLAIN: [100, 100, 300], "a": [110, 110, 900]}
    some._rows["a"] = 1000
    plain, line = (result.as_dict() for result in some.results())
    assert plain["ratio"] == plain["least_ratio"] == 1.0
    assert line["ratio"] == pytest.approx(1.5)
    assert line["least_ratio"] == pytest.approx(1.5 / 1.0)
    assert line["training_ratio"] == pytest.approx(1.25)
    assert line["microseconds"] == pytest.approx(0.25e6 / 1000)
    assert (line["memory_ratio"], line["extra_bytes"], line["peak_bytes"]) == (pytest.approx(1.1), 10, 900)


def test_a_kit_that_switched_itself_off_gives_no_figure(tmp_path):
    class Off:
        faults, selected, writer = [OSError("no space left")], True, None

        def close(self):
            pass

    some = turns_of(tmp_path, {"a": {}})
    some._session = Off()
    with pytest.raises(BenchFailed, match="w:a: no space left"):
        some._detach("a", 0)


def test_a_profile_names_the_functions_of_the_kit_and_what_they_call():
    profile = cProfile.Profile()
    x = torch.ones(1 << 16)
    with profile:
        for _ in range(20):
            measure(x)
    line = {"name": "h64:L0", "ratio": 1.5, "training_ratio": 1.4}
    with contextlib.redirect_stdout(io.StringIO()):
        found = text(pstats.Stats(profile), line)
    assert found.startswith("h64:L0: the writer thread 20% of what is added")
    assert "`measure/" in found


def test_models_by_name_and_by_flags():
    usual = [Workload("usual", "", 9, 9)]
    assert asked(Options(Path(), only="usual"), usual) == usual
    assert [w.name for w in asked(Options(Path(), model="bloom", turns=2), usual)] == ["bloom"]
    assert len(asked(Options(Path(), model="all"), usual)) == 7
    (own,) = asked(Options(Path(), model="--num-layers 2"), usual)
    assert own.flags == "--num-layers 2"
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16"
    ((shape, layout),) = _models(flags).values()
    assert (shape.layers, shape.ffn, shape.sequence, shape.microbatch, layout.world) == (2, 32, 16, 1, 1)
    ((_, cut),) = _models(f"{flags} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2").values()
    assert (cut.tp, cut.pp, cut.cp, cut.sequence_parallel, cut.world) == (2, 2, 1, False, 4)
    with pytest.raises(BenchFailed, match="--num-attention-heads 2: this layout needs a multiple of 4"):
        _models(f"{flags} --tensor-model-parallel-size 4")
    with pytest.raises(BenchFailed, match="parallel sizes from 1"):
        _models(f"{flags} --context-parallel-size 0")
    with pytest.raises(BenchFailed, match="needs --num-layers N --hidden-size N"):
        _models("--num-layers 2")
    with pytest.raises(BenchFailed, match="accepted are llama2, aquila2"):
        asked(Options(Path(), model="llama3"), usual)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["dump", "--turns", "0"], "whole numbers from 1"),
        (["dump", "--turns", "-3"], "whole numbers from 1"),
        (["dump", "--ranks", "two"], "whole numbers from 1"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["layers", "--model", "llama2"], "bench layers has no --model"),
        (["monitor", "--model", "llama3"], "accepted are llama2"),
        (["compare", "--ranks", "6", "--only", "rows"], "powers of two up to 1024"),
        (["perturb", "--only", "h65"], "nothing is called 'h65'"),
        (["scaling", "--model", "llama2"], "accepted are flags of Megatron"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(words, says, capsys):
    try:
        code = main(["bench", *words])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "counts", "--out", str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_every_line_has_the_keys_and_a_second_call_may_use_the_same_place(tmp_path):
    for _ in range(2):
        code, printed = bench("counts", "--only", "monitor idle", "--json", "--out", str(tmp_path))
        assert code == 0
        report = json.loads(printed)
    assert report["machine"]["cores"] >= 1
    assert all(set(KEYS) <= set(line) for line in report["results"])
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"counts_monitor_idle.{ending}" for ending in ("json", "md", "svg")),
        "runs",
    }


def test_only_what_missed_is_profiled(tmp_path):
    line = {"name": "h64:L0", "ratio": 1.2, "training_ratio": 1.2, "median_s": 0.02, "microseconds": 4.0, "target": 1.5}
    met = {**line, "name": "h64:L1", "target": 4.0}
    assert profiles(dump, [line, met], tmp_path) == []
    (found,) = forked(profiles, dump, [{**line, "asked": {"microseconds": 3.0}}, met], tmp_path)
    assert found.startswith("h64:L0: the writer thread 0% of what is added; of the training thread's part `")


def test_every_line_with_a_target_has_something_to_profile():
    for one in (dump, monitor, perturb):
        assert all(_job(one, name) is not None for name in one.TARGETS), one
    assert _job(monitor, "plain_torch:h64:all") is None
    workload, variant = _job(layers, "L1: 192 layers over 24")
    assert "--num-layers 192" in workload.flags and variant == {"dump": {"level": "L1"}}


def test_memory_that_is_missed_has_a_profile_of_memory(tmp_path):
    line = {
        "name": "h64:L0",
        "ratio": 1.2,
        "median_s": 0.02,
        "extra_bytes": 5,
        "target": 1.5,
        "asked": {"extra_bytes": 4},
    }
    found, tensors = forked(profiles, dump, [line], tmp_path)
    assert found.startswith("h64:L0: Python holds ")
    assert "`topology/" in found
    assert tensors.startswith("h64:L0: tensors alive at the peak are ")
    assert "; beyond those of plain training `" in tensors and "`record." in tensors
