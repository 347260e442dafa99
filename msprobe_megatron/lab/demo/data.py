"""The demo's data set: endless, learnable, and the same wherever a sample lands.

Sample i depends on the seed and on i alone. Samples are dealt out in Megatron's order (microbatch, then
data-parallel rank, then row) and cut over the sequence for context parallelism as Megatron cuts them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from msprobe_megatron.lab.demo.weights import generator
from msprobe_megatron.topology.coordinates import Coordinates
from msprobe_megatron.topology.shards import ShardSpec, cut

_PERIOD = 32
_SEQUENCE = {
    "tokens": "b s[cp:zigzag]",
    "labels": "b s[cp:zigzag]",
    "position_ids": "b s[cp:zigzag]",
    "attention_mask": "b h s[cp:zigzag] k",
}


def sample(seed: int, index: int, length: int, vocab_size: int) -> torch.Tensor:
    """Draw sample `index`: a walk of constant stride over a few tokens that are spread over the vocabulary.

    The stride is hidden in the sample, so that there is something to learn beyond the frequency of tokens.

    Example::

        >>> torch.equal(sample(1, 5, 8, 64), sample(1, 5, 8, 64))
        True
    """
    period = min(_PERIOD, vocab_size)
    start, stride = torch.randint(0, period, (2,), generator=generator(seed, "sample", index)).tolist()
    walk = (start + torch.arange(length) * (1 + stride % 3)) % period
    spread: torch.Tensor = walk * (vocab_size // period)
    return spread


@dataclass(frozen=True)
class Batches:
    """What one rank reads."""

    args: Namespace
    here: Coordinates
    device: torch.device

    def sample_index(self, iteration: int, microbatch: int, row: int) -> int:
        """Tell the number of the sample in row `row` of a microbatch; `iteration` counts from 0."""
        args = self.args
        consumed = iteration * args.global_batch_size
        return int(consumed + (microbatch * args.data_parallel_size + self.here.dp) * args.micro_batch_size + row)

    def iteration(self, iteration: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the microbatches of one iteration, as the schedule asks for them."""
        for microbatch in range(self.args.num_microbatches):
            yield self.microbatch(iteration, microbatch)

    def microbatch(self, iteration: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Tokens, labels, positions and causal mask (True = hidden) of one microbatch, cut for this rank."""
        args, length = self.args, self.args.seq_length
        rows = torch.stack(
            [
                sample(args.seed, self.sample_index(iteration, microbatch, row), length + 1, args.vocab_size)
                for row in range(args.micro_batch_size)
            ]
        )
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        whole = {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "position_ids": torch.arange(length).expand(args.micro_batch_size, length),
            "attention_mask": hidden[None, None],
        }
        return {name: self._cut(name, tensor) for name, tensor in whole.items()}

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        part = cut(whole, ShardSpec.parse(_SEQUENCE[name]), self.here.of, self.here.size)
        return part.contiguous().to(self.device)
