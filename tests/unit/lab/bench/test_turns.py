"""The clockwork of the benches: whose turn it is, medians of what was measured, and what the command refuses."""

import contextlib
import cProfile
import io
import json
import pstats
from pathlib import Path

import numpy as np
import pytest
import torch

from msprobe_megatron import attach
from msprobe_megatron.cli import main
from msprobe_megatron.cli.bench import KEYS
from msprobe_megatron.job.measure.stats import measure
from msprobe_megatron.job.session.patch_scopes import ROUTER
from msprobe_megatron.lab.bench.clockwork.paired import Step, cost
from msprobe_megatron.lab.bench.clockwork.turns import PLAIN, BenchFailed, Turns, Workload
from msprobe_megatron.lab.bench.models.workloads import asked
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.profiles.profile import _job, profiles, text
from msprobe_megatron.lab.bench.tables import dump, layers, monitor, perturb
from msprobe_megatron.lab.bench.tables.volume import _models
from tests.unit.lab.bench.forks import bench, forked


def turns_of(tmp_path, variants, turns=4, **more):
    return Turns(Workload("w", "", turns, 1, **more), variants, tmp_path)


def test_every_variant_has_its_turn_and_none_always_follows_the_same(tmp_path):
    some = turns_of(tmp_path, dict.fromkeys("abcd", {}))
    orders = [some._order(lap) for lap in range(1, 13)]
    assert all(sorted(order) == ["a", "b", "c", "d", PLAIN, PLAIN] for order in orders)
    before = {order[at - 1] for order in orders for at, name in enumerate(order) if at and name == "a"}
    assert before == {"b", "c", "d", PLAIN}
    assert some._order(3) == turns_of(tmp_path, dict.fromkeys("abcd", {}))._order(3)  # that of another process
    assert turns_of(tmp_path, {"a": {}})._order(1) == ["a", PLAIN]


def test_no_tool_is_as_exact_as_what_is_compared_with_it(tmp_path):
    for count, times in ((1, 1), (2, 1), (3, 2), (7, 3)):
        order = turns_of(tmp_path, dict.fromkeys("abcdefg"[:count], {}))._order(1)
        assert order.count(PLAIN) == times, order


def test_what_must_be_known_best_has_two_places_in_a_turn(tmp_path):
    some = turns_of(tmp_path, {"a": {}, "b": {}}, twice=("b",))
    assert sorted(some._order(2)) == ["a", "b", "b", PLAIN, PLAIN]
    assert some._order(0) == [PLAIN, "a", PLAIN, "b"]
    assert some.iterations == 2 + 3 * 4 * (1 + 2) + 4 * 5 * (1 + 1)
    both = [some._order(lap).index("a") for lap in range(1, 13)]
    assert len(set(both)) > 2


def test_steps_of_a_job(tmp_path):
    """Two to begin with; three turns for memory, two steps a variant and two before it; the turns."""
    assert turns_of(tmp_path, {"a": {}, "b": {}}).iterations == 2 + 3 * 4 * (1 + 2) + 4 * 3 * (1 + 1)
    assert turns_of(tmp_path, {"a": {}, "b": {}}, fresh=True).iterations == 2 + 4 * 3 * (1 + 1)
    assert turns_of(tmp_path, {"a": {}, "b": {}}, warm_up=0).iterations == 2 + 3 * 4 * 2 + 4 * 3


def test_a_machine_that_changes_its_pace_does_not_change_the_figure():
    """By turns, while all becomes three times as slow; the medians of the times alone would be far off."""
    pace = [1.0] * 30 + [3.0] * 34
    steps = [
        Step(name, pace[i] * took, pace[i] * trained)
        for i, (name, took, trained) in enumerate([(PLAIN, 1.0, 0.9), ("a", 1.5, 1.2)] * 32)
    ]
    found = cost(steps, "a", PLAIN)
    assert found.ratio == pytest.approx(1.5)
    assert found.training_ratio == pytest.approx(1.2 / 0.9)
    lopsided = [step for at, step in enumerate(steps) if step.name == "a" or at < 40]  # as if interrupted
    assert cost(lopsided, "a", PLAIN).ratio == pytest.approx(1.5, rel=0.01)
    assert cost([Step(PLAIN, 1.0, 1.0), Step("a", 1.5, 1.25)], "a", PLAIN) == (1.5, 1.25, 0.25, 0.0)


def test_one_step_of_a_neighbour_does_not_count():
    steps = [Step(PLAIN, 1.0, 1.0), Step("a", 1.1, 1.05)] * 10
    steps[6] = Step(PLAIN, 9.0, 9.0)
    steps[7] = Step("a", 0.1, 0.1)
    assert cost(steps, "a", PLAIN)[:3] == (pytest.approx(1.1), pytest.approx(1.05), pytest.approx(0.05))


def test_how_well_a_ratio_is_known():
    """Against the spread of the figure over many runs of noise whose size is known."""
    noise = np.random.default_rng(0)

    def run():
        took = noise.normal(1.0, 0.05, size=120)
        return cost([Step((PLAIN, "a")[i % 2], t * (1, 1.2)[i % 2], 1.0) for i, t in enumerate(took)], "a", PLAIN)

    runs = [run() for _ in range(200)]
    seen = np.std([found.ratio for found in runs])
    told = np.mean([found.uncertainty for found in runs])
    assert 0.6 * seen < told < 1.5 * seen, (seen, told)


def test_lines_of_what_was_measured(tmp_path):
    some = turns_of(tmp_path, {"a": {}})
    some.steps = [Step(PLAIN, 1.0, 0.8), Step("a", 1.5, 1.0)] * 8
    some._peaks = {PLAIN: [100, 100, 300], "a": [110, 110, 900]}
    some._added = {PLAIN: [], "a": [10, 10, 600]}
    some._rows["a"] = 1000
    plain, line = (result.as_dict() for result in some.results())
    assert plain["ratio"] == plain["least_ratio"] == 1.0
    assert (line["ratio"], line["least_ratio"], line["spread"]) == (1.5, 1.5, 0.0)
    assert (plain["median_s"], line["median_s"]) == (1.0, 1.5)
    assert line["training_ratio"] == pytest.approx(1.25)
    assert line["microseconds"] == pytest.approx(0.2e6 / 1000)
    assert (line["memory_ratio"], line["extra_bytes"], line["peak_bytes"]) == (pytest.approx(1.1), 10, 900)


@pytest.mark.parametrize("fresh", [True, False])
def test_sessions_sleep_between_their_turns(tmp_path, monkeypatch, fresh):
    """A net in a plain loop: who is there in each step, and what is left at the end."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = []
    monkeypatch.setattr("msprobe_megatron.attach", lambda *a, **k: made.append(attach(*a, **k)) or made[-1])
    variants = {"idle": {"steps": [10**8], "dump": {"level": "L0"}}, "L0": {"dump": {"level": "L0"}}}
    some = turns_of(tmp_path, variants, turns=3, fresh=fresh, twice=() if fresh else ("idle",))
    some.ready([model], optimizer)
    there = []
    for _ in range(some.iterations):
        there.append(len(ROUTER.sessions()))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        some.after_step()
    assert set(there) == {0, 1}
    assert all(session.closed and session.faults == [] for session in made)
    assert len(made) == (6 if fresh else 2 * (3 + 1))
    seen = [len(session.steps_recorded) for session in made if session.steps_recorded]
    assert seen == ([2, 2, 2] if fresh else [3, 3, 3, 6])
    names = [step.name for step in some.steps]
    idles, plains = (3, 3) if fresh else (6, 6)
    assert {name: names.count(name) for name in set(names)} == {"idle": idles, "L0": 3, PLAIN: plains}
    idle, line = some.results()[1:]
    assert (idle.rows, line.rows > 0) == (0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"w_{name}_{1 if fresh else 0}" for name in ("L0", "idle")
    ]


def test_memory_is_that_of_the_same_step_without_the_kit_just_before(tmp_path, monkeypatch):
    """Whatever the job holds by then; 7 bytes are the session's."""
    some = turns_of(tmp_path, {"a": {}, "b": {}}, turns=1)
    grown = iter(range(0, 100_000, 1000))
    level = [0]

    def begin(name, lap):
        some._now = []
        level[0] = next(grown) if name == PLAIN else level[0] + 7

    monkeypatch.setattr(some, "_begin", begin)
    monkeypatch.setattr(some._memory, "peak", lambda: level[0] + 50 * len(some._now))
    some.ready(None, None)
    for _ in range(some.iterations):
        some.after_step()
    assert [line.extra_bytes for line in some.results()] == [0, 7, 7]


def test_memory_that_nothing_stood_before_is_not_left_out(tmp_path):
    some = turns_of(tmp_path, {"a": {}}, turns=1, fresh=True)
    assert some._order(1) == ["a", PLAIN]
    some.steps = [Step("a", 1.5, 1.0), Step(PLAIN, 1.0, 0.8)]
    some._peaks = {PLAIN: [100], "a": [150]}
    assert [(line.extra_bytes, line.memory_ratio) for line in some.results()] == [(0, 1.0), (50, 1.5)]


def test_a_kit_that_switched_itself_off_gives_no_figure(tmp_path):
    class Off:
        faults, selected, writer = [OSError("no space left")], True, None

        def close(self):
            pass

        sleep = close

    for lap in (0, 1):
        some = turns_of(tmp_path, {"a": {}})
        some._session = Off()
        with pytest.raises(BenchFailed, match="w:a: no space left"):
            some._end("a", lap)


def test_growth_with_layers_is_of_what_is_added(tmp_path, monkeypatch):
    """24 layers add 0.02 s known to 0.002, 192 add 0.15 known to 0.003: 7.5 times, known to a tenth of it and more."""
    rest = dict.fromkeys(("spread", "peak_bytes", "bytes", "files", "rows", "microseconds", "extra_bytes"), 0)

    def measured(workload, variants, options):
        seconds, ratio, error = (0.1, 1.2, 0.02) if "--num-layers 24 " in workload.flags else (1.0, 1.15, 0.003)
        lines = {PLAIN: (1.0, 0.0, seconds), "L0": (ratio, error, seconds * ratio)}
        return [
            {"name": f"w:{name}", "ratio": ratio, "uncertainty": error, "median_s": median, **rest}
            for name, (ratio, error, median) in lines.items()
        ]

    monkeypatch.setattr(layers, "measured", measured)
    (line,) = layers.bench(Options(tmp_path, only="L0"))
    assert (line["ratio"], line["target"]) == (pytest.approx(7.5), 8.5)
    assert line["uncertainty"] == pytest.approx(7.5 * (0.1**2 + 0.02**2) ** 0.5)


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
    assert "`job/measure/" in found


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
        (["nothing"], "'nothing' is not known; accepted: dump"),
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
    assert "; beyond those of plain training `" in tensors and "`job.record." in tensors
