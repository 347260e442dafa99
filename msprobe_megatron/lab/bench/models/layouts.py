"""How a model is cut over ranks, as far as the size of a dump goes: flags, ranks of stages, what can be divided."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed

if TYPE_CHECKING:
    from msprobe_megatron.lab.bench.tables.volume import Shape

_PADDED_TO = 128
_COMMON = 8
"""What sequences and widths of the small models are multiples of."""


@dataclass(frozen=True)
class Layout:
    """Tensor, pipeline and context parallel sizes."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        """Ranks that hold the model once."""
        return self.tp * self.pp * self.cp

    def flags(self) -> list[str]:
        """What Megatron is told; a rank without the others computes with whatever has not arrived."""
        if self.world == 1:
            return []
        sizes = (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
            f" --context-parallel-size {self.cp} --no-check-for-nan-in-loss-and-grad"
        ).split()
        return [*sizes, "--sequence-parallel"] if self.sequence_parallel else sizes

    def stages(self) -> dict[str, tuple[int, int]]:
        """Stages that differ in what they hold: number of the first such stage, and how many of them there are."""
        if self.pp == 1:
            return {"": (0, 1)}
        middle = {"middle": (1, self.pp - 2)} if self.pp > 2 else {}  # noqa: PLR2004
        return {"first": (0, 1), **middle, "last": (self.pp - 1, 1)}

    def rank(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * self.tp * self.cp

    def divided(self, model: Shape) -> Shape:
        """The shape with the layers of one stage and the vocabulary as Megatron pads it; raises what does not fit."""
        needed = {
            "--num-layers": (model.layers, self.pp),
            "--num-attention-heads": (model.heads, self.tp),
            "--ffn-hidden-size": (model.ffn, self.tp),
            "--seq-length": (model.sequence, self._parts_of_sequence()),
        }
        for flag, (size, by) in needed.items():
            if size % by:
                raise BenchFailed(f"{flag} {size}: this layout needs a multiple of {by}")
        whole = _PADDED_TO * self.tp
        return replace(model, layers=model.layers // self.pp, vocabulary=-(-model.vocabulary // whole) * whole)

    def fitting(self, small: Shape) -> Shape:
        """A small model made larger until this layout can cut it."""
        heads = self.tp // math.gcd(self.tp, 2)
        parts = self._parts_of_sequence()
        return replace(
            small,
            hidden=small.hidden * heads,
            heads=small.heads * heads,
            ffn=small.ffn * (self.tp // math.gcd(self.tp, _COMMON)),
            sequence=small.sequence * (parts // math.gcd(parts, _COMMON)),
            vocabulary=small.vocabulary * self.tp,
        )

    def _parts_of_sequence(self) -> int:
        """Context parallel ranks hold two pieces each; sequence parallel ones cut what is left."""
        return (2 * self.cp if self.cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)


ONE_CARD = Layout()
