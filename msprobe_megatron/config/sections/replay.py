"""The ``replay`` section: modules that are given the inputs which another run has recorded. Only if it is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msprobe_megatron.config.names import parse_name_list
from msprobe_megatron.config.node import Node

_MANY = 10**9


@dataclass(frozen=True)
class ReplayConfig:
    """The ``replay`` section: what is fed to which modules on the recorded steps.

    ``run`` is a run directory with ``dump: {task: tensor}``, of any layout; ``modules`` holds parts of canonical names,
    or regular expressions between slashes; ``step`` is the step of that run, by default the same as here.
    """

    run: Path
    modules: tuple[str, ...]
    step: int | None = None


def parse_replay(node: Node) -> ReplayConfig:
    """Read the section.

    Example: ``{run: ./golden, modules: [mlp]}``.
    """
    fields = {key: REPLAY[key](child) for key, child in node.entries(REPLAY).items()}
    for key in ("run", "modules"):
        if not fields.get(key):
            raise node.error(f"has no {key}", "{run: a run directory, modules: [part of a name, …]}")
    return ReplayConfig(**fields)


REPLAY: Mapping[str, Callable[[Node], Any]] = {
    "run": lambda node: Path(node.text("a run directory")).expanduser(),
    "modules": parse_name_list,
    "step": lambda node: None if node.value is None else node.integer(0, _MANY),
}
