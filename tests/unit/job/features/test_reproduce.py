"""`reproduce`: jobs that were started with other weights, other seeds and dropout agree whatever their layouts."""

import json

import numpy as np
import pytest
import torch

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from tests.jobs.compare.layouts import MORE
from tests.jobs.distributed.layouts import LAYOUTS, flags_of
from tests.support.forked import run_forked

_SECTION = "reproduce: {seed: 5, weights: by_name}"


def train(argv):
    """Train with weights and seeds that no two ranks share, until the kit attaches."""
    import random

    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    def scramble(chunks, optimizer):
        torch.manual_seed(torch.distributed.get_rank() + len(chunks))
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.1)
        if hasattr(optimizer, "reload_model_params"):
            optimizer.reload_model_params()

    seen = {}

    def first(iteration):
        if "torch" not in seen:
            from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

            states = get_cuda_rng_tracker().get_states()
            seen["torch"], seen["python"] = torch.initial_seed(), random.getstate()[1][1]
            seen["tracker"] = {name: state.clone() for name, state in states.items()}
            seen["deterministic"] = torch.are_deterministic_algorithms_enabled()

    run(argv, Callbacks(ready=scramble, gradients=first))
    return seen


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory):
    """Run directories of jobs with a `reproduce` section, each trained once, and what their ranks had."""
    root, known = tmp_path_factory.mktemp("reproduce"), {}

    def of(layout, section=_SECTION, *more):
        key = (layout, section, more)
        if key not in known:
            out = root / str(len(known))
            probe = root / f"{len(known)}.yaml"
            probe.write_text(f"steps: [0, 1]\ndump: {{level: L0, digest: true, sketch: 64}}\n{section}\n")
            layouts = {**LAYOUTS, **MORE}
            argv = [*flags_of("single", dropout=True), *layouts[layout].flags.split(), *more, "--train-iters", "2"]
            argv += ["--msprobe-config", str(probe), "--msprobe-output", str(out)]
            known[key] = (out, run_forked(layouts[layout].world, train, argv))
        return known[key]

    return of


@pytest.mark.parametrize(
    ("golden", "other"),
    [("single", "tp2_sp"), ("single", "pp2_vpp2"), pytest.param("moe", "ep2", marks=pytest.mark.slow)],
)
def test_jobs_that_began_differently_agree(reproduced, golden, other):
    left, right = (open_run(reproduced(layout)[0]) for layout in (golden, other))
    result = compare(left, right)
    assert (result.verdict, result.reason) == ("agree", ""), result.first_divergence
    weights = [row for row in result.table.to_pylist() if row["kind"] == "parameter" and row["step"] == 0]
    assert len(weights) > 30


def test_without_it_they_do_not(reproduced):
    nothing = "strict: false"
    result = compare(open_run(reproduced("single", nothing)[0]), open_run(reproduced("tp2_sp", nothing)[0]))
    assert result.verdict == "diverged"
    assert result.first_divergence.kind == "parameter"


def test_the_optimizer_has_the_new_weights_too(reproduced):
    """In bf16 it keeps fp32 copies: were they the old ones, the second step would begin with other weights."""
    golden, other = (open_run(reproduced(layout)[0]) for layout in ("bf16", "bf16_tp2"))
    result = compare(golden, other)
    assert (result.verdict, result.steps) == ("agree", [0, 1]), result.first_divergence


def test_generators_are_seeded_as_megatron_does_it(reproduced):
    first, second = reproduced("pp2_vpp2")[1]
    assert (first["torch"], second["torch"]) == (5, 105)
    assert first["python"] != second["python"]
    left, right = reproduced("tp2_sp")[1]
    assert left["torch"] == right["torch"] == 5
    own = "model-parallel-rng"
    assert not torch.equal(left["tracker"][own], right["tracker"][own])
    again = reproduced("tp2_sp", _SECTION, "--seed", "99")[1]
    assert torch.equal(left["tracker"][own], again[0]["tracker"][own])
    assert left["deterministic"] is True


def test_a_noise_run_is_one_unit_away(reproduced):
    golden = open_run(reproduced("single")[0])
    noise = open_run(reproduced("single", "reproduce: {seed: 5, weights: by_name, noise_run: true}")[0])
    other = open_run(reproduced("tp2_sp")[0])
    result = compare(golden, other, 0, noise)
    assert result.verdict == "agree"
    moved = compare(golden, noise, 0)
    distances = [row for row in moved.table.to_pylist() if row["kind"] == "parameter"]
    for row in distances:
        # Half of the elements go up, half down: the norm stays, and no element moves by more than one unit.
        assert abs(row["absmax_golden"] - row["absmax_run"]) <= 2.0**-22 * row["absmax_golden"]
    assert moved.verdict == "diverged"  # bit for bit they are other weights
    plain, raised = (np.array(r.table.column("tolerance")) for r in (compare(golden, other, 0), result))
    assert (raised >= plain).all()


def test_what_was_done_is_in_the_run(reproduced):
    facts = json.loads((reproduced("single")[0] / "run.json").read_text())
    assert facts["probe"]["content"]["reproduce"] == {"seed": 5, "weights": "by_name"}
