"""What the dump must cost on a card, by calculation: bytes that it reads over the card's bandwidth, and launches.

Nothing here was measured on a card. The bytes are those of an inventory of the tensors that modules take and give,
each read once; a test holds it against what the simulated device counts for a model of the same layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_BANDWIDTH_SHARE, _UTILISATION = 0.8, 0.45
_HALF, _SINGLE = 2, 4


@dataclass(frozen=True)
class Card:
    """An accelerator by its published figures; `launch_us`, what a launch costs its host, is an assumption."""

    name: str
    bytes_s: float
    flops: float
    launch_us: float

    @property
    def assumed(self) -> str:
        """The figures in words."""
        return f"{self.bytes_s / 1e12:g} TB/s, {self.flops / 1e12:g} TFLOPS bf16, {self.launch_us:g} µs a launch"


CARDS = (
    Card("H100", 3.35e12, 989e12, 5.0),
    Card("A100", 2.04e12, 312e12, 5.0),
    Card("Ascend 910B", 1.6e12, 313e12, 10.0),
)


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind: their elements together, and how many there are."""

    elements: float = 0.0
    count: float = 0.0

    def __add__(self, other: Tensors) -> Tensors:
        return Tensors(self.elements + other.elements, self.count + other.count)

    def __mul__(self, times: float) -> Tensors:
        return Tensors(self.elements * times, self.count * times)


def _of(*widths: float) -> Tensors:
    return Tensors(sum(widths), len(widths))


@dataclass(frozen=True)
class Attention:
    """What modules take and give for a token between the norm before attention and its output, and its weights.

    ``query`` is the width of all heads together, for the operations of the product of queries and keys.
    """

    query: int
    seen: Tensors
    weights: Tensors


def grouped(hidden: int, query: int, keys: int, *, core: bool = True) -> Attention:
    """Attention with groups of keys; ``core``: its inner part is a module, whose inputs are seen."""
    inside = _of(query, keys, keys) if core else Tensors()
    return Attention(query, _of(query + 2 * keys, query) + inside, _of(hidden * (query + 2 * keys), query * hidden))


def latent(hidden: int, heads: int, of_query: int, of_keys: int, plain: int, rotary: int, values: int) -> Attention:
    """Multi-head latent attention: queries, keys and values through low ranks, a part of each key rotated."""
    query, expanded, inner = heads * (plain + rotary), heads * (plain + values), heads * values
    seen = _of(of_query, query, of_keys + rotary, expanded, query, query, inner, inner)
    weights = _of(hidden * of_query, of_query * query, hidden * (of_keys + rotary), of_keys * expanded, inner * hidden)
    return Attention(query, seen, weights)


@dataclass(frozen=True)
class Decoder:
    """A decoder as Megatron trains it with fused attention, and the rank of it that is looked at.

    With experts, ``ffn`` is that of a dense layer and ``expert`` that of one expert, of which a token takes ``active``
    and has ``shared`` besides.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    attention: Attention
    vocabulary: int
    sequence: int
    microbatches: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dense: int = 0
    expert: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0

    @property
    def assumed(self) -> str:
        """Layout and batch in words."""
        sizes = [f"{axis}{size}" for axis, size in (("TP", self.tp), ("PP", self.pp), ("EP", self.ep)) if size > 1]
        where = " ".join(sizes) or "one card"
        return f"{where}, {self.microbatches} microbatches of {self.sequence} tokens, {_UTILISATION:.0%} of the peak"

    def per_token(self) -> Tensors:
        """What the modules of this rank take and give for a token in forward, each tensor once."""
        h, experts = self.hidden, self.experts > 0
        attention = _of(h, h, h) + self.attention.seen
        dense = attention + _of(h, h, 2 * self.ffn, self.ffn, h)
        sparse = attention + _of(h, h, h)
        sparse += _of(self.experts, self.active * h, 2 * self.active * self.expert, self.active * self.expert)
        sparse += _of(self.active * h, 2 * self.shared * self.expert, self.shared * self.expert, h)
        layers = dense * self.dense + sparse * (self.layers - self.dense) if experts else dense * self.layers
        layers = layers * (1 / self.pp)
        outside = _of(h, h, self.vocabulary) if self.pp == 1 else Tensors()
        return Tensors((layers + outside).elements / self.tp, (layers + outside).count)

    def _layer_weights(self, *, active: bool) -> Iterator[tuple[int, Tensors]]:
        """How many layers of a kind there are, and their weights: all of this rank, or those that a token uses."""
        h = self.hidden
        attention = self.attention.weights + _of(h, h)
        yield (self.dense if self.experts else self.layers), attention + _of(2 * h * self.ffn, self.ffn * h)
        if self.experts:
            held = self.active if active else self.experts / self.ep
            yield (
                self.layers - self.dense,
                attention + _of(h * self.experts) + _of(2 * h * self.expert, h * self.expert) * (held + self.shared),
            )

    def weights(self, *, active: bool = False) -> Tensors:
        """Parameters of this rank; ``active``: those that a token goes through."""
        found = Tensors()
        for count, layer in self._layer_weights(active=active):
            found += layer * (count / self.pp)
        if self.pp == 1:
            found += _of(self.vocabulary * self.hidden, self.vocabulary * self.hidden, self.hidden)
        return Tensors(found.elements / self.tp, found.count)

    def step_seconds(self, card: Card) -> float:
        """The step without the kit: six operations a weight and token, causal attention, at the assumed utilisation."""
        tokens = self.sequence * self.microbatches
        flops = 6 * self.weights(active=True).elements * tokens
        flops += 6 * self.layers / self.pp * self.sequence * self.attention.query / self.tp * tokens
        return flops / (card.flops * _UTILISATION)

    def reads(self, width: int = _HALF, gradients: int = _SINGLE) -> tuple[float, float, float]:
        """Bytes of activations and of weights with their gradients that L0 reads in a step, and its launches."""
        tokens, seen, weights = self.sequence * self.microbatches, self.per_token(), self.weights()
        launches = 2 * seen.count * self.microbatches + 2 * weights.count
        return 2 * seen.elements * tokens * width, weights.elements * (width + gradients), launches


# Published shapes; layouts of the kind in which they are trained.
MODELS = (
    Decoder("Llama-3 8B", 32, 4096, 14336, grouped(4096, 4096, 1024), 128256, 8192, 8),
    Decoder("Llama-3 70B", 80, 8192, 28672, grouped(8192, 8192, 1024), 128256, 8192, 16, tp=8, pp=4),
    Decoder(
        "DeepSeek-V3",
        61,
        7168,
        18432,
        latent(7168, 128, 1536, 512, 128, 64, 128),
        129280,
        4096,
        32,
        pp=16,
        ep=64,
        dense=3,
        expert=2048,
        experts=256,
        active=8,
        shared=1,
    ),
)


@dataclass(frozen=True)
class Predicted:
    """The calculated cost of a dump that reads ``factor`` times the activations of L0."""

    model: Decoder
    card: Card
    level: str
    bytes_factor: float = 1.0
    launch_factor: float = 1.0

    def line(self) -> dict[str, object]:
        """The line of the table, with its assumptions."""
        activations, weights, launches = self.model.reads()
        size = activations * self.bytes_factor + weights
        launched = launches * self.launch_factor
        reading = size / (self.card.bytes_s * _BANDWIDTH_SHARE)
        launching = launched * self.card.launch_us * 1e-6
        step = self.model.step_seconds(self.card)
        return {
            "name": f"predicted:{self.card.name}:{self.model.name}:{self.level}",
            "predicted_overhead": round((reading + launching) / step, 5),
            "reading_ms": round(reading * 1e3, 2),
            "launching_ms": round(launching * 1e3, 2),
            "assumed_step_ms": round(step * 1e3, 1),
            "launches": round(launched),
            "bytes_read": round(size),
            "notes": {self.card.name: self.card.assumed, self.model.name: self.model.assumed},
        }
