"""Numbers from places: against NumPy's unsigned arithmetic, the same from every cut, and nearly normal."""

import numpy as np
import pytest
import torch

from msprobe_megatron.job.measure.hashed import bell, numbered_pieces, words
from msprobe_megatron.topology.index_map import index_map
from msprobe_megatron.topology.shards import ShardSpec, cut


def expected(count, key):
    """splitmix64 of each number, then four 16-bit fields added up."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    fields = sum(((z >> np.uint64(s)) & np.uint64(0xFFFF)).astype(np.float64) for s in (0, 16, 32, 48))
    return (fields - 2 * 65535) / 65536 * np.sqrt(3)


@pytest.mark.parametrize("key", [0, 7, 2**64 - 1, 0x8000000000000000])
def test_the_numbers_are_those_of_the_formula(key):
    found = bell(words(torch.arange(5000), key)).double().numpy()
    np.testing.assert_allclose(found, expected(5000, key), rtol=1e-6, atol=1e-7)


def test_they_are_nearly_normal():
    values = bell(words(torch.arange(200_000), 3)).double()
    assert abs(values.mean()) < 0.01
    assert values.std().item() == pytest.approx(1, abs=0.01)
    assert ((values.abs() < 1).double().mean()).item() == pytest.approx(0.6827, abs=0.02)
    neighbours = (values[1:] * values[:-1]).mean()
    assert abs(neighbours) < 0.01


@pytest.mark.parametrize("text", ["a b", "a[tp] b", "a b[tp]", "a[tp:gated] b", "a[cp:zigzag,tp] b"])
def test_every_cut_gives_its_part_of_the_whole(text):
    spec, sizes = ShardSpec.parse(text), {"tp": 2, "cp": 2}
    whole = torch.from_numpy(expected(16 * 6, 11).astype(np.float32)).reshape(16, 6)
    for tp in range(2):
        for cp in range(2):
            place = {"tp": tp, "cp": cp}
            wanted = cut(whole, spec, place.get, sizes.get)
            found = torch.zeros_like(wanted)
            for part, index in numbered_pieces(found, index_map(spec, found.shape, place.get, sizes.get)):
                part.copy_(bell(words(index, 11)))
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_large_tensors_in_pieces(monkeypatch):
    from msprobe_megatron.job.measure import hashed

    x = torch.zeros(37, 5)
    numbering = index_map(ShardSpec.parse("a b"), x.shape, lambda a: 0, lambda a: 1)
    monkeypatch.setattr(hashed, "PIECE", 16)
    numbers = torch.cat([index.reshape(-1) for _, index in numbered_pieces(x, numbering)])
    assert numbers.tolist() == list(range(37 * 5))
