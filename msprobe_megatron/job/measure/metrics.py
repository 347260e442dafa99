"""Figures that say more of a model than the size of its numbers: attention, routing, the spectrum of weights.

Pure: small samples of tensors in, small tensors out, on their own device. No random numbers: what is sampled is spread
evenly, and where an iteration has to begin somewhere it begins at a hash.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_SIXTEEN = 16
_FIRST_ITERATIONS = 32
_LATER_ITERATIONS = 6


class AttentionSample(NamedTuple):
    """Of each sampled row of attention its entropy (in nats) and its largest logit; (heads, rows)."""

    entropy: torch.Tensor
    largest: torch.Tensor


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` positions, evenly spread, the first and the last among them.

    Example::

        >>> spread(9, 3)
        [0, 4, 8]
    """
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def attention_sample(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    heads: int = 4,
    rows: int = 16,
) -> AttentionSample:
    """Look at some heads and rows of the first sample of ``query`` and ``key`` (positions, samples, heads, width).

    ``mask`` is true where attention is not allowed and broadcasts to (rows, columns) of a head; ``causal`` forbids what
    comes later. Fewer heads of keys than of queries are shared by equally many of them.
    """
    some_heads, some_rows = spread(query.shape[2], heads), spread(query.shape[0], rows)
    shared = query.shape[2] // key.shape[2]
    some = torch.stack([query[row, 0] for row in some_rows])
    chosen = torch.stack([some[:, head] for head in some_heads], 1).float()  # (rows, heads, width)
    keys = torch.stack([key[:, 0, head // shared] for head in some_heads]).float()  # (heads, columns, width)
    logits = torch.bmm(chosen.transpose(0, 1), keys.transpose(1, 2)) * scale
    forbidden = None
    if mask is not None:
        forbidden = mask.reshape(-1, *mask.shape[-2:])[0]
        if forbidden.shape[0] > 1:
            forbidden = torch.stack([forbidden[row] for row in some_rows])
    elif causal:
        columns = torch.arange(key.shape[0], device=key.device)
        # Rows of a query that is shorter than its keys are the last ones.
        last = key.shape[0] - query.shape[0]
        forbidden = torch.stack([columns > row + last for row in some_rows])
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -torch.inf)
    shares = torch.softmax(logits, -1)
    entropy = -torch.where(shares > 0, shares * torch.log(shares), shares.new_zeros(())).sum(-1)
    return AttentionSample(entropy, logits.amax(-1))


def expert_load(routing: torch.Tensor, experts: int) -> torch.Tensor:
    """Tokens that each expert is given: from a map (tokens, experts) of booleans, or from the numbers of the experts.

    Example::

        >>> expert_load(torch.tensor([[True, False], [True, True]]), 2)
        tensor([2., 1.])
    """
    if routing.dtype is torch.bool or (routing.is_floating_point() and routing.shape[-1] == experts):
        return (routing != 0).reshape(-1, experts).sum(0).float()
    chosen = routing.reshape(-1)
    return torch.zeros(experts, device=routing.device).index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.float))


def router_entropy(hidden: torch.Tensor, weight: torch.Tensor, rows: int = 256) -> torch.Tensor:
    """Entropy (in nats) of the choice among experts, for some of the tokens."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    step = max(1, tokens.shape[0] // rows)
    shares = torch.log_softmax(tokens[::step].float() @ weight.float().t(), -1)
    return -(shares.exp() * shares).sum(-1)


def hashed_vector(size: int, device: torch.device) -> torch.Tensor:
    """A direction that no weight is likely to be orthogonal to, the same on every rank and in every run.

    Example::

        >>> hashed_vector(4, torch.device("cpu"))
        tensor([ 0.3074,  0.3238,  0.3618, -0.3292])
    """
    number = torch.arange(1, size + 1, device=device, dtype=torch.int64)
    number = (number * 2654435761) & 0xFFFFFFFF
    number = ((number ^ (number >> _SIXTEEN)) * 2246822519) & 0xFFFFFFFF
    return (number ^ (number >> _SIXTEEN)).float() / 2.0**32 - 0.5


class SpectralNorms:
    """Largest singular values, improved a little at every look: weights change slowly, and so do their directions."""

    def __init__(self) -> None:
        self._directions: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The norm of ``weight``: thirty-two iterations at first, six at every later look."""
        matrix = weight.float()
        last = self._directions.get(name)
        start, iterations = hashed_vector(matrix.shape[1], matrix.device), _FIRST_ITERATIONS
        if last is not None and last.shape == start.shape:
            # A little of everything, or a direction that has become the largest would long be overlooked.
            start, iterations = last + start / torch.linalg.vector_norm(start) / 4, _LATER_ITERATIONS
        direction = start
        for _ in range(iterations):
            image = matrix @ direction
            direction = matrix.t() @ image
            direction = direction / torch.linalg.vector_norm(direction).clamp_min(torch.finfo(torch.float32).tiny)
        self._directions[name] = direction
        norm: torch.Tensor = torch.linalg.vector_norm(matrix @ direction)
        return norm


def stable_rank(weight: torch.Tensor, spectral: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of the singular values over the largest of them: how many directions a weight really uses.

    Example::

        >>> stable_rank(torch.eye(4), torch.tensor(1.0))
        tensor(4.)
    """
    return weight.float().square().sum() / spectral.square().clamp_min(torch.finfo(torch.float32).tiny)
