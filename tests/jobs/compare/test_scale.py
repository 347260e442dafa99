"""A pair of runs of many ranks: quick in a small form, and as large as promised behind `-m slow`."""

import resource

import pytest

from msprobe_megatron.analysis.compare.compare import compare
from msprobe_megatron.analysis.load.run import open_run
from msprobe_megatron.lab.bench.models.synthetic_runs import make


def _check(tmp_path, *, layers, samples, fault, golden, other, first_rank):
    make(tmp_path / "golden", layers=layers, samples=samples, **golden)
    make(tmp_path / "clean", layers=layers, samples=samples, **other)
    make(tmp_path / "faulty", layers=layers, samples=samples, fault=fault, **other)
    tensors = layers * 20 * samples // 2
    clean = compare(open_run(tmp_path / "golden"), open_run(tmp_path / "clean"))
    assert (clean.verdict, clean.counts["agree"]) == ("agree", tensors)
    found = compare(open_run(tmp_path / "golden"), open_run(tmp_path / "faulty"))
    assert found.verdict == "diverged"
    first = found.first_divergence
    assert (first.name, first.microbatch) == (f"decoder.layers.{fault}.module_0", 0)
    assert first.ranks[0] == first_rank
    assert found.counts["diverged"] + found.counts["inherited"] == tensors // layers


def test_sixty_four_ranks(tmp_path):
    golden, other = {"tp": 4, "pp": 4, "dp": 4}, {"tp": 2, "pp": 8, "dp": 4}
    # Layer 10 of 16 is on stage 5 of 8, whose ranks begin at 5 * 8.
    _check(tmp_path, layers=16, samples=16, fault=10, golden=golden, other=other, first_rank=40)


@pytest.mark.slow
def test_a_thousand_ranks_of_four_thousand_rows(tmp_path):
    layout = {"tp": 8, "pp": 8, "dp": 16}
    # Layer 100 of 160 is on stage 5 of 8, whose ranks begin at 5 * 128.
    _check(tmp_path, layers=160, samples=320, fault=100, golden=layout, other=layout, first_rank=640)
    gibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert gibibytes < 4
