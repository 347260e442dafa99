"""The `targets` of the monitor: which modules, tensors and parameters are watched.

A target is the name of a module, or a prefix of the names of parameters. Its setting for a side ("tuple[2]:0") selects
among the tensors there; without any target everything is watched.
"""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_megatron.config import Target, TensorChoice

# The path of the layers in Megatron's legacy model, which published settings still use.
_LEGACY = "language_model.encoder."
_TODAY = "decoder."


class Targets:
    """The targets of a probe file, looked up by name.

    Example::

        >>> targets = Targets([Target("decoder.layers.0", input=TensorChoice(2, 0))])
        >>> targets.module("decoder.layers.0")
        True
        >>> targets.tensor("decoder.layers.0", "input", False, 0)
        True
        >>> targets.parameter("decoder.layers.0.mlp.linear_fc1.weight")
        True
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._all = not targets
        self._targets = {name: target for target in targets for name in _spellings(target.name)}
        self._asked = {name: target.name for target in targets for name in _spellings(target.name)}
        self.matched: set[str] = set()

    def module(self, name: str) -> bool:
        """True if the module of this name is watched."""
        return self._all or self._found(name)

    def parameter(self, name: str) -> bool:
        """True if the parameter of this name is watched: a target is a prefix of its name."""
        if self._all:
            return True
        parts = name.split(".")
        hits = [start for n in range(1, len(parts) + 1) if self._found(start := ".".join(parts[:n]))]
        return bool(hits)

    def inside(self, name: str) -> bool:
        """True if the module of this name, or one that contains it, is watched."""
        return self.parameter(name)

    def tensor(self, name: str, io: str, gradient: bool, position: int) -> bool:
        """True if the tensor at ``position`` of the arguments or results of a module is watched."""
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
        """Targets that matched no module or parameter."""
        return [name for name in dict.fromkeys(self._asked.values()) if name not in self.matched]

    def _found(self, name: str) -> bool:
        if name not in self._targets:
            return False
        self.matched.add(self._asked[name])
        return True


def _spellings(name: str) -> tuple[str, ...]:
    """The name as written and in the current model; wrappers are never part of a name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return (name, _TODAY + name.removeprefix(_LEGACY)) if name.startswith(_LEGACY) else (name,)
