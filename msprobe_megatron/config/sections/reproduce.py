"""The ``reproduce`` section: changes that make two jobs start from the same state. Nothing is changed without it."""

from dataclasses import dataclass
from typing import Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import BOOLEAN, ValueType, integer, key, one_of, or_null, other_settings, section

Deterministic = Literal["false", "warn", "true"]
Weights = Literal["keep", "by_name"]
_LARGEST_SEED = 2**31 - 1


def _read_deterministic(node: Node) -> str:
    if isinstance(node.value, bool):
        return "true" if node.value else "false"
    if node.value != "warn":
        raise node.error("is not known", "true, warn, false")
    return "warn"


def _write_deterministic(value: str) -> bool | str:
    return {"true": True, "false": False}.get(value, value)


_DETERMINISTIC = ValueType(_read_deterministic, {"enum": [True, "warn", False]}, _write_deterministic)


@dataclass(frozen=True)
class ReproduceConfig:
    """The ``reproduce`` section: what every rank changes before the first step.

    ``weights: by_name`` initializes them from a hash of canonical name and global index; ``dropout: false`` disables
    it; ``deterministic: warn`` continues where there is no deterministic kernel; ``noise_run`` moves every weight by
    one unit in the last place, for ``compare --noise``; ``seed: null`` leaves random generators alone.
    """

    seed: int | None = key(
        1234, or_null(integer(0, _LARGEST_SEED)), "seed of all random generators; null leaves them alone", "7"
    )
    deterministic: Deterministic = key(
        "warn", _DETERMINISTIC, "deterministic kernels; warn continues where there is none", "true"
    )
    dropout: bool = key(False, BOOLEAN, "leave dropout enabled", "true")
    weights: Weights = key(
        "keep", one_of(get_args(Weights)), "initialize weights from their names, the same in every layout", "by_name"
    )
    noise_run: bool = key(
        False, BOOLEAN, "move every weight by one unit in the last place, for compare --noise", "true"
    )

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        kernels = {"true": "deterministic kernels", "warn": "deterministic kernels where available"}
        parts = [
            f"seed {self.seed}" if self.seed is not None else "",
            kernels.get(self.deterministic, ""),
            "" if self.dropout else "dropout off",
            "weights by name" if self.weights == "by_name" else "",
            "weights moved by one unit in the last place" if self.noise_run else "",
            *other_settings(self, "seed", "deterministic", "dropout", "weights", "noise_run"),
        ]
        return f"CHANGES TRAINING: {', '.join(filter(None, parts)) or 'nothing'}"


REPRODUCE = section(ReproduceConfig)
