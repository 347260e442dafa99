"""The ``reproduce`` section: what is changed so that two jobs start alike. Only there if it is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from msprobe_megatron.config.node import Node

Deterministic = Literal["false", "warn", "true"]
Weights = Literal["keep", "by_name"]
WEIGHTS = ("keep", "by_name")
_LARGEST_SEED = 2**31 - 1


@dataclass(frozen=True)
class ReproduceConfig:
    """The ``reproduce`` section: what every rank changes before the first step.

    ``weights: by_name`` fills them from a hash of canonical name and global index; ``dropout: false`` switches it
    off; ``deterministic: warn`` goes on where there is no deterministic kernel; ``noise_run`` moves every weight by one
    unit in its last place, for ``compare --noise``; ``seed: null`` leaves generators alone.
    """

    seed: int | None = 1234
    deterministic: Deterministic = "warn"
    dropout: bool = False
    weights: Weights = "keep"
    noise_run: bool = False


def parse_reproduce(node: Node) -> ReproduceConfig:
    """Read the section.

    Example: ``{seed: 7, weights: by_name}``.
    """
    return ReproduceConfig(**{key: REPRODUCE[key](child) for key, child in node.entries(REPRODUCE).items()})


def _seed(node: Node) -> int | None:
    return None if node.value is None else node.integer(0, _LARGEST_SEED)


def _deterministic(node: Node) -> str:
    if isinstance(node.value, bool):
        return "true" if node.value else "false"
    if node.value != "warn":
        raise node.error("is not known", "true, warn, false")
    return "warn"


REPRODUCE: Mapping[str, Callable[[Node], Any]] = {
    "seed": _seed,
    "deterministic": _deterministic,
    "dropout": lambda node: node.boolean(),
    "weights": lambda node: node.choice(WEIGHTS),
    "noise_run": lambda node: node.boolean(),
}
