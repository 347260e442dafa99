"""The data set: the same sample wherever it lands, dealt out in Megatron's order, cut over the sequence."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
import torch

from msprobe_megatron.lab.demo.data import Batches, sample
from msprobe_megatron.topology.coordinates import Coordinates


def job(**changes: int) -> Namespace:
    values = {"seed": 1, "seq_length": 16, "vocab_size": 128, "micro_batch_size": 2, "global_batch_size": 8}
    values.update(data_parallel_size=1, num_microbatches=4)
    values.update(changes)
    return Namespace(**values)


def read(args: Namespace, here: Coordinates, iteration: int = 0) -> dict[str, np.ndarray]:
    batches = list(Batches(args, here, torch.device("cpu")).iteration(iteration))
    return {name: np.stack([batch[name].numpy() for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 128, 1000])
def test_tokens_are_inside_the_vocabulary(vocab_size: int) -> None:
    tokens = torch.stack([sample(3, index, 40, vocab_size) for index in range(50)])
    assert tokens.min() >= 0
    assert tokens.max() < vocab_size
    assert tokens.dtype == torch.int64


def test_sample_is_a_walk_of_constant_stride_that_differs_between_samples() -> None:
    strides = set()
    for index in range(40):
        steps = np.diff(sample(1, index, 12, 128).numpy() // 4) % 32
        assert (steps == steps[0]).all()
        strides.add(int(steps[0]))
    assert strides == {1, 2, 3}


def test_batch_is_dealt_out_microbatch_then_rank_then_row() -> None:
    alone = read(job(), Coordinates(), iteration=2)["tokens"].reshape(8, 16)
    args = job(data_parallel_size=2, num_microbatches=2)
    ranks = [read(args, Coordinates(dp=dp, dp_size=2), iteration=2)["tokens"] for dp in range(2)]
    # [microbatch, dp, row] in this order is the order of the samples
    np.testing.assert_array_equal(np.stack(ranks, axis=1).reshape(8, 16), alone)
    np.testing.assert_array_equal(alone[5], sample(1, 2 * 8 + 5, 17, 128).numpy()[:-1])


def test_labels_are_the_next_tokens() -> None:
    batch = read(job(), Coordinates())
    np.testing.assert_array_equal(batch["tokens"][..., 1:], batch["labels"][..., :-1])


def test_context_parallel_ranks_hold_first_and_last_chunks() -> None:
    whole = read(job(), Coordinates())
    for cp in range(2):
        part = read(job(), Coordinates(cp=cp, cp_size=2))
        chosen = np.concatenate([np.arange(cp * 4, cp * 4 + 4), np.arange((3 - cp) * 4, (4 - cp) * 4)])
        for name in ("tokens", "labels", "position_ids"):
            np.testing.assert_array_equal(part[name], whole[name][..., chosen])
        np.testing.assert_array_equal(part["attention_mask"], whole["attention_mask"][..., chosen, :])
        np.testing.assert_array_equal(part["position_ids"][0, 0], chosen)


def test_mask_hides_what_comes_later() -> None:
    mask = read(job(), Coordinates())["attention_mask"][0, 0, 0]
    np.testing.assert_array_equal(mask, np.arange(16)[None, :] > np.arange(16)[:, None])
