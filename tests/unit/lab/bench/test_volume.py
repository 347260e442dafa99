"""How much the task `tensor` writes: the calculation finds known coefficients, and meets a run it has not seen."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.models.layouts import Layout
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.profiles.profile import profiles
from msprobe_megatron.lab.bench.tables import volume
from msprobe_megatron.lab.bench.tables.volume import (
    CALIBRATION,
    HELD_OUT,
    MODELS,
    Shape,
    bench,
    calculation,
    fitted,
    recorded,
    speeds,
)
from tests.support.forked import run_forked


def test_coefficients_are_found_from_the_small_models():
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 60, len(HELD_OUT.terms())).astype(float)
    sizes = [round(float(np.array(shape.terms()) @ weights)) for shape in CALIBRATION]
    found = fitted(CALIBRATION, sizes)
    assert np.allclose(found, weights, atol=0.3)
    for shape in (HELD_OUT, *MODELS.values()):
        assert calculation(found, shape) == pytest.approx(float(np.array(shape.terms()) @ weights), rel=1e-3)


def of_one(level):
    import torch

    torch.set_num_threads(1)
    sizes = [recorded(shape, level)[0] for shape in CALIBRATION]
    weights = fitted(CALIBRATION, sizes)
    actual, _ = recorded(HELD_OUT, level)
    return calculation(weights, HELD_OUT) / actual - 1


@pytest.mark.slow
@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_the_calculation_meets_a_model_that_was_not_used(level):
    (error,) = run_forked(1, of_one, level, timeout=600)
    assert abs(error) < 0.02


def test_speeds_are_of_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("msprobe_megatron.lab.bench.tables.write_speed._SPEED_BYTES", 1 << 20)
    monkeypatch.setattr("msprobe_megatron.lab.bench.tables.write_speed._SPEED_TENSOR", 1 << 16)
    found = speeds(tmp_path, turns=1)
    assert found["bytes"] == 1 << 20 and found["share"] > 0
    (why,) = profiles(volume, [{"name": "speed", **found, "share": 0.7, "target": 0.8}], tmp_path)
    stages = re.findall(r"(copies|waits for room|writes|syncs|opens and renames|waits for packs) (-?\d+)%", why)
    shares = {stage: int(share) for stage, share in stages}
    assert len(shares) == 6 and all(0 <= share <= 100 for share in shares.values()), why
    assert sum(list(shares.values())[2:]) == pytest.approx(100, abs=3), "all the time of the writer thread"
    assert re.search(r"the plain writer takes [\d.]+ s, its sync \d+% of them", why)
    assert list(tmp_path.iterdir()) == []


def of_a_job(level, shape, layout):
    """The bytes that this rank of a real job saves."""
    # The groups are those of the ranks that are really there.
    with mock.patch.object(volume, "lone_rank", lambda rank, world: contextlib.nullcontext()):
        return recorded(shape, level, layout)[0]


def alone(level, shape, layout, stages):
    return [recorded(shape, level, layout, stage)[0] for stage in stages]


SMALL = Shape(1, 32, 48, 4, 16, 256, 2, 2)


@pytest.mark.parametrize(
    ("layout", "level"),
    [
        (Layout(tp=2, sequence_parallel=True), "mix"),
        (Layout(pp=2), "L1"),
        (Layout(tp=2), "L0"),
        pytest.param(Layout(cp=2), "mix", marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, pp=2), "mix", marks=pytest.mark.slow),
    ],
    ids=lambda value: volume.layout_text(value) if isinstance(value, Layout) else value,
)
def test_a_rank_without_the_others_saves_what_it_saves_in_a_job(layout, level):
    (alone_bytes,) = run_forked(1, alone, level, SMALL, layout, list(range(layout.pp)))
    together = run_forked(layout.world, of_a_job, level, SMALL, layout)
    assert together == [size for size in alone_bytes for _ in range(layout.tp * layout.cp)]
    assert len(set(alone_bytes)) == layout.pp, "stages hold different things"


def calculated(level, layout, stages):
    import torch

    torch.set_num_threads(1)
    return [
        calculation(volume._calibrated(level, layout, stage, Options(Path()))[0], layout.fitting(HELD_OUT))
        for stage in stages
    ]


@pytest.mark.parametrize(
    ("layout", "level"),
    [
        (Layout(tp=2), "L1"),
        pytest.param(Layout(pp=2), "L1", marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, sequence_parallel=True), "mix", marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, pp=2), "L0", marks=pytest.mark.slow),
        pytest.param(Layout(cp=2), "L1", marks=pytest.mark.slow),
    ],
    ids=lambda value: volume.layout_text(value) if isinstance(value, Layout) else value,
)
def test_the_calculation_meets_a_real_job_of_a_layout(layout, level):
    (found,) = run_forked(1, calculated, level, layout, list(range(layout.pp)), timeout=600)
    together = run_forked(layout.world, of_a_job, level, layout.fitting(HELD_OUT), layout)
    assert found == pytest.approx(together[:: layout.tp * layout.cp], rel=0.02)


def test_lines_of_a_layout_are_those_of_its_stages(monkeypatch):
    """Sizes that are a known sum: 7 a layer and 100 on the last stage of three, 1,000 on the first."""

    def size(shape, level, layout, stage):
        return (7 * shape.layers * shape.hidden + {0: 1000, layout.pp - 1: 100}.get(stage, 0) * shape.microbatches, 3)

    monkeypatch.setattr(volume, "recorded", size)
    flags = "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 1000"
    cut = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 2"
    found = {line["name"]: line for line in bench(Options(Path(), only="L1", model=f"{flags} {cut}"))}
    assert [name for name in found if "held out" in name] == [
        f"held out:L1:tp2 pp4 cp2:{stage}" for stage in ("first", "middle", "last")
    ]
    inside = 7 * 3 * 64
    for batch in (1, 2, 3):
        lines = [found[f"model:L1:batch {batch}:{stage}"] for stage in ("first", "middle", "last")]
        sizes = [inside + 1000 * batch, inside, inside + 100 * batch]
        assert [line["bytes"] for line in lines] == pytest.approx(sizes, abs=2)
        whole = 4 * (sizes[0] + 2 * sizes[1] + sizes[2])
        assert [line["bytes_of_16_ranks"] for line in lines] == pytest.approx([whole] * 3, abs=40)


def test_what_a_layout_cannot_cut_is_refused():
    for layout, message in (
        (Layout(pp=3), "--num-layers 32: this layout needs a multiple of 3"),
        (Layout(tp=64), "--num-attention-heads 32: this layout needs a multiple of 64"),
        (Layout(cp=3), "--seq-length 4096: this layout needs a multiple of 6"),
    ):
        with pytest.raises(BenchFailed, match=message):
            layout.divided(MODELS["LLaMA2-7B"])
    assert Layout(tp=8).divided(MODELS["LLaMA2-7B"]).vocabulary == 32768
