"""The ``replay`` section: modules are fed inputs that another run has recorded."""

from dataclasses import dataclass
from pathlib import Path

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import ValueType, integer, key, or_null, other_settings, required_key, section
from msprobe_megatron.config.name_patterns import NAME_PATTERNS

_FORM = "{run: a run directory, modules: [part of a name, …]}"
_RUN = ValueType(lambda node: Path(node.text("a run directory")).expanduser(), {"type": "string", "minLength": 1})


@dataclass(frozen=True)
class ReplayConfig:
    """The ``replay`` section: on recorded steps, the chosen modules are fed the inputs of another run.

    ``run`` is a run directory with ``dump: {task: tensor}``, of any parallel layout; ``modules`` holds parts of
    canonical names, or regular expressions between slashes; ``step`` is the step of that run, by default the current
    one.
    """

    run: Path = required_key(_RUN, "run directory whose tensors are fed", "./golden")
    modules: tuple[str, ...] = required_key(NAME_PATTERNS, "modules that get recorded inputs", "[mlp]")
    step: int | None = key(None, or_null(integer(0)), "step of that run; the current step if absent", "10")

    def describe(self) -> str:
        """One line for `msprobe-megatron validate`."""
        first = f"CHANGES TRAINING: {', '.join(self.modules)} get the inputs of {self.run}"
        return ", ".join([first, *other_settings(self, "run", "modules")])


def _check(config: ReplayConfig, node: Node) -> None:
    if not config.modules:
        raise node.error("has no modules", _FORM)


REPLAY = section(ReplayConfig, _check, _FORM)
