"""Which calls and modules the probe file means: names, scope, layers, microbatches."""

from __future__ import annotations

import re
from collections.abc import Callable

from msprobe_megatron.config import PerturbConfig
from msprobe_megatron.probes.perturb.classes import short_name
from msprobe_megatron.topology.layers import layer_of

_GROUPS = (("torch.nn.functional.", "Functional"), ("torch.Tensor.", "Tensor"), ("torch.", "Torch"))


def msprobe_name(api: str, number: int, stage: str) -> str:
    """A call's name as msprobe writes it.

    Example::

        >>> msprobe_name("torch.nn.functional.softmax", 3, "forward")
        'Functional.softmax.3.forward'
    """
    group = next((name for prefix, name in _GROUPS if api.startswith(prefix)), "Aten")
    bare = api.rpartition(".")[2] if api.startswith("torch.") else short_name(api)
    return f"{group}.{bare}.{number}.{stage}"


def call_name(module: str, api: str, number: int) -> str:
    """A call's name in rows: the module it is made in, the API, and which of the module's calls of it this is.

    Example::

        >>> call_name("decoder.layers.0.mlp", "torch.nn.functional.silu", 0)
        'decoder.layers.0.mlp/torch.nn.functional.silu.0'
    """
    return f"{module}/{api}.{number}"


class Selection:
    """Answers for the `perturb` section; remembers which of its patterns have matched.

    Example::

        chosen = Selection(PerturbConfig(list=("softmax",)))
        chosen.call("decoder.layers.0.mlp", "torch.softmax", 0, 0)      # True
    """

    def __init__(self, asked: PerturbConfig) -> None:
        self._asked = asked
        self._calls = {text: _matcher(text) for text in asked.list}
        self._modules = {text: _matcher(text) for text in asked.modules}
        self._scope = frozenset(asked.scope)
        self.matched: set[str] = set()

    def place(self, module: str, microbatch: int) -> bool:
        """Whether layer and microbatch are selected; what stands outside of layers always is."""
        layers, microbatches = self._asked.layers, self._asked.microbatches
        if microbatches is not None and microbatch not in microbatches:
            return False
        return layers is None or (layer := layer_of(module)) is None or layer in layers

    def call(self, module: str, api: str, number: int, in_step: int) -> bool:
        """Whether this call is meant: ``number`` counts within its module, ``in_step`` within the step."""
        if self._asked.whole:
            return True
        if self._scope:
            name = call_name(module, api, number)
            theirs = msprobe_name(api, in_step, self._asked.stage)
            hits = self._scope & {name, theirs}
            self.matched |= hits
            return bool(hits)
        return self._hit(self._calls, api, call_name(module, api, number))

    def module(self, name: str) -> bool:
        """Whether this module itself is to be examined, by name."""
        return self._hit(self._modules, name.rpartition(".")[2], name)

    def _hit(self, patterns: dict[str, Callable[[str, str], bool]], short: str, full: str) -> bool:
        hits = [text for text, matches in patterns.items() if matches(short, full)]
        self.matched.update(hits)
        return bool(hits)

    def unmatched(self) -> list[str]:
        """Patterns that nothing had."""
        return [text for text in (*self._calls, *self._modules, *self._scope) if text not in self.matched]


def _matcher(text: str) -> Callable[[str, str], bool]:
    """A word is looked for in the short name; with a dot or a slash, or as an expression, in the whole name."""
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):  # noqa: PLR2004
        pattern = re.compile(text[1:-1])
        return lambda short, full: pattern.search(full) is not None
    if "." in text or "/" in text:
        return lambda short, full: text in full
    return lambda short, full: text in short
