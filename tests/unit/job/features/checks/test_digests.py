"""Comparing digests over a group: who tells, of what, and who is odd; messages that come late or never."""

import numpy as np
import pytest

from msprobe_megatron.job.features.checks.digests import Disagreement, compare, folded, safe, same_own, untiled

RANKS = (4, 5, 6, 7)


def told(vectors):
    """What each member tells, with all messages there."""
    messages = {("fold", rank): folded(vector) for rank, vector in vectors.items()}
    messages["vector", RANKS[0]] = vectors[RANKS[0]].tobytes()
    return {
        rank: compare(vector, 0, rank, RANKS, lambda topic, other: messages[topic, other])
        for rank, vector in vectors.items()
    }


def vectors(**changed):
    found = {rank: np.arange(10, 16, dtype=np.uint64) for rank in RANKS}
    for rank, places in changed.items():
        found[int(rank[1:])][places] += np.uint64(1)
    return found


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"r6": [2, 5]}, {6: Disagreement([2, 5], [6], list(RANKS))}),
        ({"r4": [0]}, {5: Disagreement([0], [4], list(RANKS))}),
        ({"r5": [1], "r7": [3]}, {5: Disagreement([1], list(RANKS), list(RANKS))}),
        ({"r6": [1], "r7": [1]}, {6: Disagreement([1], list(RANKS), list(RANKS))}),
    ],
)
def test_one_member_tells_for_all(changed, expected):
    assert {rank: found for rank, found in told(vectors(**changed)).items() if found is not None} == expected


def test_vectors_of_different_lengths_disagree():
    found = vectors()
    found[7] = found[7][:-1]
    assert told(found)[7] == Disagreement([], [7], list(RANKS))


def test_fold_depends_on_every_word_and_its_place():
    words = np.random.default_rng(0).integers(0, 1 << 63, 50).astype(np.uint64)
    seen = {folded(words)}
    for place in range(50):
        changed = words.copy()
        changed[place] ^= np.uint64(1)
        seen.add(folded(changed))
    swapped = words.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    seen.add(folded(swapped))
    seen.add(folded(words[:-1]))
    assert len(seen) == 53


def test_bits_of_a_nan_do_not_matter_but_their_number_does():
    one, other = np.array([7, 8], np.uint64), np.array([7, 99], np.uint64)
    assert safe(one, np.array([0, 3])).tolist() == safe(other, np.array([0, 3])).tolist()
    assert safe(one, np.array([0, 3])).tolist() != safe(other, np.array([0, 2])).tolist()
    assert safe(one, np.array([0, 0])).tolist() == [7, 8]


def test_states_that_each_should_have_for_itself():
    words = np.zeros(1, np.uint64)
    read = lambda topic, rank: folded(words, own=5)  # noqa: E731
    assert same_own(5, 5, RANKS, read)
    assert not same_own(6, 5, RANKS, read)
    assert not same_own(5, 4, RANKS, read)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([(0, 3), (3, 8)], None),
        ([(3, 8), (0, 0), (0, 3)], None),
        ([(0, 3), (4, 8)], "elements 3 to 4 belong to no rank"),
        ([(0, 5), (3, 8)], "elements 3 to 5 belong to two ranks"),
        ([(0, 7)], "elements 7 to 8 belong to no rank"),
        ([], "elements 0 to 8 belong to no rank"),
    ],
)
def test_tiles(parts, said):
    assert untiled(parts, 8) == said
