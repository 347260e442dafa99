"""Readers of the keys of ``dump`` that narrow or widen what is seen, and the rules of what excludes what."""

import re

from msprobe_megatron.config.node import Node
from msprobe_megatron.config.schema import DumpConfig, Slice

_MANY = 10**9
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
ACCEPTED_FUNCTION = "module:function or module:Class.method, such as mypackage.ops:fused_gelu"


def parse_slices(node: Node) -> tuple[Slice, ...]:
    """Read the rules of ``slice``.

    Example: ``[{dim: 1, begin: 0, end: 16}]``.
    """
    found = []
    for item in node.items("a list such as [{dim: 0, begin: 0, end: 16}]"):
        entries = item.entries(("dim", "size", "begin", "end"))
        given = {key: child for key, child in entries.items() if child.value is not None}
        if not given:
            raise item.error("cuts nothing", "some of dim, size, begin, end")
        lowest = {"dim": 0, "size": 1, "begin": 0, "end": 1}
        rule = Slice(**{key: child.integer(lowest[key], _MANY) for key, child in given.items()})
        if rule.end is not None and rule.end <= rule.begin:
            raise given["end"].error(f"is not beyond begin, which is {rule.begin}", "a number above begin")
        found.append(rule)
    return tuple(found)


def parse_functions(node: Node) -> tuple[str, ...]:
    """Read ``functions``: where each is found.

    Example: ``[mypackage.ops:fused_gelu]``.
    """
    names = []
    for item in node.items(f"a list; each item {ACCEPTED_FUNCTION}"):
        text = item.text(ACCEPTED_FUNCTION)
        if _FUNCTION.fullmatch(text) is None:
            raise item.error("does not say where the function is", ACCEPTED_FUNCTION)
        names.append(text)
    return tuple(dict.fromkeys(names))


def check_together(config: DumpConfig, node: Node) -> None:
    """Refuse keys that contradict each other; raises ``ConfigError``."""

    def refuse(key: str, problem: str, accepted: str) -> None:
        value = getattr(config, key)
        shown = list(value) if isinstance(value, tuple) else value
        raise Node(shown, f"{node.path}.{key}", node.context).error(problem, accepted)

    if config.scope and config.list:
        refuse("scope", "stands beside a list", "either list or scope")
    if config.scope and config.level == "debug":
        refuse("scope", "has no calls to work on: level is debug", "L0, L1, mix")
    if config.tensor_list and config.task != "statistics":
        refuse("tensor_list", f"belongs to task statistics; task is {config.task}", "task statistics, or names in list")
    if config.slice and config.task == "structure":
        refuse("slice", "has no values to work on: task is structure", "task statistics or tensor")
    if config.slice and (config.digest is True or config.sketch):
        refuse("slice", "leaves no whole tensor for digests and sketches to add up to", "digest: false and sketch: 0")
    if config.functions and config.level not in ("L1", "mix"):
        refuse("functions", f"are API calls; level is {config.level}", "level L1 or mix")
