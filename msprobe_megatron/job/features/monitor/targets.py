"""Which modules, tensors and parameters the `targets` of the monitor choose.

A target is the name of a module, or the beginning of the names of parameters. What it says of a side ("tuple[2]:0")
chooses among the tensors there; with no target at all everything is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_megatron.config import Target, TensorChoice

# The path of the layers in Megatron's model before megatron-core, which published settings still have.
_LEGACY = "language_model.encoder."
_TODAY = "decoder."


class Targets:
    """The targets of a probe file, asked by name.

    Example::

        targets = Targets([Target("decoder.layers.0", input=TensorChoice(2, 0))])
        targets.module("decoder.layers.0")                                     # True
        targets.tensor("decoder.layers.0", "input", False, 0)                  # True
        targets.parameter("decoder.layers.0.mlp.linear_fc1.weight")            # True
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._all = not targets
        self._targets = {name: target for target in targets for name in _spellings(target.name)}
        self._asked = {name: target.name for target in targets for name in _spellings(target.name)}
        self.matched: set[str] = set()

    def module(self, name: str) -> bool:
        """Whether the module of this name is watched."""
        return self._all or self._found(name)

    def parameter(self, name: str) -> bool:
        """Whether the parameter of this name is watched: a target is the beginning of its name."""
        if self._all:
            return True
        parts = name.split(".")
        hits = [start for n in range(1, len(parts) + 1) if self._found(start := ".".join(parts[:n]))]
        return bool(hits)

    def inside(self, name: str) -> bool:
        """Whether the module of this name is watched, or is part of one that is."""
        return self.parameter(name)

    def tensor(self, name: str, io: str, gradient: bool, position: int) -> bool:
        """Whether a tensor is watched: the one at ``position`` of the arguments or results of a module."""
        target = self._targets.get(name)
        if target is None:
            return self._all
        sides: list[TensorChoice | None] = [target.input, target.output, target.input_grad, target.output_grad]
        if sides == [None] * 4:
            return True
        choice: TensorChoice | None = getattr(target, f"{io}_grad" if gradient else io)
        if choice is None:
            return False
        if choice.count is None:
            return position == 0
        return choice.index is None or choice.index == position

    def unmatched(self) -> list[str]:
        """Targets that no module or parameter asked about has."""
        return [name for name in dict.fromkeys(self._asked.values()) if name not in self.matched]

    def _found(self, name: str) -> bool:
        if name not in self._targets:
            return False
        self.matched.add(self._asked[name])
        return True


def _spellings(name: str) -> tuple[str, ...]:
    """The name as it is written and as the model of today has it; wrappers are never part of a name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return (name, _TODAY + name.removeprefix(_LEGACY)) if name.startswith(_LEGACY) else (name,)
