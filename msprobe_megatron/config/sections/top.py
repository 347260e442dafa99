"""From a document to a ``ProbeConfig``: every key has one reader, and no key goes unread.

One table for each section says which reader a key has; the tables have exactly the fields of the dataclasses
in ``schema``. Rules that concern two keys at once come after the tables. Nothing here knows which parts of
the kit this release already has: see ``availability``.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_megatron.config import schema
from msprobe_megatron.config.alerts import ACTION, ALERT, parse_alert, refuse_alone
from msprobe_megatron.config.names import parse_name_list
from msprobe_megatron.config.narrowing import check_together, parse_functions, parse_slices
from msprobe_megatron.config.node import Node
from msprobe_megatron.config.replay import REPLAY, ReplayConfig, parse_replay
from msprobe_megatron.config.reproduce import REPRODUCE, ReproduceConfig, parse_reproduce
from msprobe_megatron.config.selection import parse_ranks, parse_selection, parse_steps_or_none
from msprobe_megatron.config.shards import SHARD, ShardRule, parse_shards
from msprobe_megatron.config.sizes import parse_size

Reader = Callable[[Node], Any]
_MANY = 10**9
_TENSOR = re.compile(r"tensor|tuple\[([0-9]{1,4})\](?::([0-9]{1,4}))?")
_ACCEPTED_TENSOR = "tensor, tuple[N] or tuple[N]:i with i below N"
# The modes whose second result is better than the first; only such a result may take its place.
_FIXING_MODES = ("improve_precision", "to_cpu")
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")
_WHOLE = 100


def validate(node: Node) -> schema.ProbeConfig:
    """Return the configuration a document describes, or raise ``ConfigError``.

    Example: ``validate(Node({"dump": {}}, "", Context("probe.yaml"))).dump.level == "L0"``.
    """
    config = schema.ProbeConfig(**_read(node, _TOP), source=node.context.source)
    if all(getattr(config, section) is None for section in schema.SECTIONS):
        sections = ", ".join(schema.SECTIONS)
        raise node.context.error("", f"nothing asked: none of {sections}", "at least one, e.g. dump: {level: L0}")
    for index, alert in enumerate(config.monitor.alerts if config.monitor is not None else ()):
        refuse_alone(alert, config, Node(alert.rule, f"monitor.alerts[{index}]", node.context))
    return config


def parse_output(node: Node) -> Path:
    """Read the name of a directory; a leading ``~`` is the home directory.

    Example: ``./probe_out``.
    """
    accepted = "the name of a directory"
    text = node.text(accepted)
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError
        return Path(text).expanduser()
    except (ValueError, RuntimeError):
        raise node.error("cannot be the name of a directory", accepted) from None


def _read(node: Node, readers: Mapping[str, Reader]) -> dict[str, Any]:
    return {key: readers[key](child) for key, child in node.entries(readers).items()}


def _boolean(node: Node) -> bool:
    return node.boolean()


def _choice(words: Sequence[str]) -> Reader:
    return lambda node: node.choice(words)


def _integer(low: int, high: int = _MANY) -> Reader:
    return lambda node: node.integer(low, high)


def _some_of(words: Sequence[str]) -> Reader:
    def read(node: Node) -> tuple[str, ...]:
        items = node.items(f"a list of {', '.join(words)}")
        if not items:
            raise node.error("selects nothing", ", ".join(words))
        # Asked twice is asked once; the order of writing is kept.
        return tuple(dict.fromkeys(item.choice(words) for item in items))

    return read


def _digest(node: Node) -> bool | str:
    if isinstance(node.value, bool):
        return node.value
    if node.value not in ("md5", "crc32"):
        raise node.error("is not a digest", "false, true, md5, crc32")
    return str(node.value)


def _two_names(node: Node) -> tuple[str, ...]:
    accepted = "[] or [name of the first, name of the last]"
    names = tuple(item.text() for item in node.items(accepted))
    if len(names) not in (0, 2):
        raise node.error(f"has {len(names)} names", accepted)
    return names


def _data_mode(node: Node) -> tuple[str, ...]:
    modes: tuple[str, ...] = _some_of(schema.DATA_MODES)(node)
    if "all" in modes and len(modes) > 1:
        raise node.error("mixes all with others", "[all], or some of forward, backward, input, output")
    return modes


def _dump(node: Node) -> schema.DumpConfig:
    config = schema.DumpConfig(**_read(node, _DUMP))
    if config.task == "structure" and (config.digest is not False or config.sketch):
        key = "digest" if config.digest is not False else "sketch"
        raise node.context.error(f"{node.path}.{key}", "has no values to work on: task is structure", "task statistics")
    check_together(config, node)
    return config


def _tensor(node: Node) -> schema.TensorChoice:
    match = _TENSOR.fullmatch(node.text(_ACCEPTED_TENSOR))
    if match is None:
        raise node.error("does not say which tensor", _ACCEPTED_TENSOR)
    count, index = (None if group is None else int(group) for group in match.groups())
    if count is not None and (count == 0 or (index is not None and index >= count)):
        raise node.error("names a tensor that is not there", _ACCEPTED_TENSOR)
    return schema.TensorChoice(count, index)


def _targets(node: Node) -> tuple[schema.Target, ...]:
    targets = node.mapping("a mapping from module names to {} or {input: tensor, …}")
    for name, child in targets.items():
        if not name.strip():
            raise child.error("stands under an empty name", "the name of a module or parameter")
    return tuple(schema.Target(name, **_read(child, _TARGET)) for name, child in targets.items())


def _monitor(node: Node) -> schema.MonitorConfig:
    config = schema.MonitorConfig(**_read(node, _MONITOR))
    watched = (
        *("activations", "gradients", "clipped", "microbatch_gradients", "optimizer", "master_weights", "update"),
        *("agreement", "parameters", "data", "comm", "metrics"),
    )
    if not any(getattr(config, name) for name in watched):
        raise node.context.error(node.path, "nothing asked", f"at least one of {', '.join(watched)}")
    return config


def _perturb(node: Node) -> schema.PerturbConfig:
    config = schema.PerturbConfig(**_read(node, _PERTURB))

    def refuse(key: str, problem: str, accepted: str) -> None:
        value = getattr(config, key)
        shown = list(value) if isinstance(value, tuple) else value
        raise Node(shown, f"{node.path}.{key}", node.context).error(problem, accepted)

    if config.list and config.scope:
        refuse("scope", "stands beside a list", "either list or scope")
    if config.mode == "to_cpu" and config.device not in (None, "cpu"):
        refuse("device", "is not where mode to_cpu runs", "device: cpu, or another mode")
    if config.device == "cpu" and config.mode != "to_cpu":
        refuse("device", f"is not where mode {config.mode} runs", "mode: to_cpu, or leave device out")
    if config.profile == "msprobe" and config.stage == "backward" and config.whole:
        problem = "of the whole network is not affordable with profile msprobe"
        refuse("stage", problem, "backward with a list, or profile: ulp")
    if config.handler == "fix":
        if config.mode not in _FIXING_MODES:
            refuse("handler", f"cannot repair with mode {config.mode}", f"mode: {' or '.join(_FIXING_MODES)}")
        if config.preheat:
            refuse("handler", "has no thresholds to preheat", "check, or preheat: false")
        if config.budget is not None and config.budget < 1:
            refuse("budget", "would repair an operator at some steps only", "budget: all, or handler: check")
    if config.twin == "sibling" and not (config.handler == "fix" and config.modules):
        refuse("twin", "is the code of the same module in another layer", "handler: fix with names in modules")
    if config.preheat and config.budget is not None and config.budget < 1:
        refuse("preheat", "counts every call", "budget: all, or preheat: false")
    return config


def _budget(node: Node) -> float:
    accepted = "a share of the step such as 5%, or all"
    if node.value == "all":
        return 1.0
    match = _PERCENT.fullmatch(node.value) if isinstance(node.value, str) else None
    if match is None or not 0 < float(match[1]) <= _WHOLE:
        raise node.error("is not a share", accepted)
    return float(match[1]) / _WHOLE


def _rows(node: Node) -> int:
    if node.value == "all":
        return 0
    accepted = "a whole number from 1 to 1000000, or all"
    if isinstance(node.value, bool) or not isinstance(node.value, int):
        raise node.error("is not a whole number", accepted)
    if not 1 <= node.value <= 10**6:
        raise node.error("is out of range", accepted)
    return node.value


def _checks(node: Node) -> schema.ChecksConfig:
    config = schema.ChecksConfig(**_read(node, _CHECKS))
    kinds = ("replicas", "optimizer", "rng", "collectives")
    if not any(getattr(config, kind) for kind in kinds):
        raise node.context.error(node.path, "nothing asked", f"at least one of {', '.join(kinds)}")
    return config


def _recorder(node: Node) -> schema.RecorderConfig:
    return schema.RecorderConfig(**_read(node, _RECORDER))


def _limits(node: Node) -> schema.Limits:
    return schema.Limits(**_read(node, _LIMITS))


def _names(node: Node) -> tuple[str, ...]:
    return tuple(item.text() for item in node.items("a list of names of calls"))


_DUMP: dict[str, Reader] = {
    "level": _choice(schema.LEVELS),
    "task": _choice(schema.TASKS),
    "digest": _digest,
    "sketch": _integer(0, 4096),
    "apis": _choice(schema.APIS),
    "list": parse_name_list,
    "scope": _two_names,
    "data_mode": _data_mode,
    "stacks": _boolean,
    "microbatches": parse_selection,
    "layers": parse_selection,
    "tensor_list": parse_name_list,
    "slice": parse_slices,
    "functions": parse_functions,
}
_TARGET: dict[str, Reader] = {key: _tensor for key in ("input", "output", "input_grad", "output_grad")}
_MONITOR: dict[str, Reader] = {
    "activations": _boolean,
    "direction": _choice(schema.DIRECTIONS),
    "microbatches": _choice(schema.MICROBATCHES),
    "gradients": _boolean,
    "clipped": _boolean,
    "microbatch_gradients": _boolean,
    "optimizer": _boolean,
    "master_weights": _boolean,
    "update": _boolean,
    "agreement": _boolean,
    "parameters": _boolean,
    "data": _boolean,
    "comm": _boolean,
    "metrics": lambda node: tuple(
        dict.fromkeys(item.choice(schema.METRICS) for item in node.items(f"a list of {', '.join(schema.METRICS)}"))
    ),
    "start_step": _integer(0),
    "every": _integer(1),
    "collect_times": _integer(1),
    "window": parse_selection,
    "targets": _targets,
    "alerts": lambda node: tuple(parse_alert(item) for item in node.items("a list of rules")),
    "format": _some_of(schema.FORMATS),
}
_PERTURB: dict[str, Reader] = {
    "mode": _choice(schema.MODES),
    "handler": _choice(schema.HANDLERS),
    "stage": _choice(schema.STAGES),
    "list": parse_name_list,
    "scope": _names,
    "modules": parse_name_list,
    "layers": parse_selection,
    "microbatches": parse_selection,
    "profile": _choice(schema.PROFILES),
    "budget": _budget,
    "device": _choice(("cpu", "npu", "cuda")),
    "ulps": _integer(1, 1000),
    "rows": _rows,
    "twin": _choice(schema.TWINS),
    "preheat": _boolean,
    "preheat_steps": _integer(1),
    "max_samples": _integer(1),
}
_CHECKS: dict[str, Reader] = {
    **dict.fromkeys(("replicas", "optimizer", "rng", "collectives"), _boolean),
    "every": _integer(1),
}
_RECORDER: dict[str, Reader] = {
    "keep_steps": _integer(1, 10_000),
    "on": _some_of(schema.TRIGGERS),
    "times": _integer(1),
}
_LIMITS: dict[str, Reader] = {"host_memory": parse_size, "disk": parse_size}
_TOP: dict[str, Reader] = {
    "output": parse_output,
    "ranks": parse_ranks,
    "steps": parse_steps_or_none,
    "dump": _dump,
    "monitor": _monitor,
    "perturb": _perturb,
    "checks": _checks,
    "recorder": _recorder,
    "shards": parse_shards,
    "reproduce": parse_reproduce,
    "replay": parse_replay,
    "limits": _limits,
    "strict": _boolean,
}
TABLES: dict[type, Mapping[str, Reader]] = {
    schema.ProbeConfig: _TOP,
    schema.DumpConfig: _DUMP,
    schema.MonitorConfig: _MONITOR,
    schema.PerturbConfig: _PERTURB,
    schema.ChecksConfig: _CHECKS,
    schema.RecorderConfig: _RECORDER,
    schema.Limits: _LIMITS,
    ShardRule: SHARD,
    ReproduceConfig: REPRODUCE,
    ReplayConfig: REPLAY,
    schema.Alert: ALERT,
    schema.AlertAction: ACTION,
}
