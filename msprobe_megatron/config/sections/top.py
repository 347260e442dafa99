"""The top level of the probe file: which ranks and steps, and one key per section."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import BOOLEAN, ValueType, as_text, key, keys_of, read_section
from msprobe_megatron.config.sections.alerts import Alert, AlertAction
from msprobe_megatron.config.sections.checks import CHECKS, ChecksConfig
from msprobe_megatron.config.sections.dump import DUMP, DumpConfig
from msprobe_megatron.config.sections.limits import LIMITS, Limits
from msprobe_megatron.config.sections.monitor import MONITOR, MonitorConfig
from msprobe_megatron.config.sections.perturb import PERTURB, PerturbConfig
from msprobe_megatron.config.sections.recorder import RECORDER, RecorderConfig
from msprobe_megatron.config.sections.replay import REPLAY, ReplayConfig
from msprobe_megatron.config.sections.reproduce import REPRODUCE, ReproduceConfig
from msprobe_megatron.config.sections.shards import SHARDS, ShardRule
from msprobe_megatron.config.selection import RANKS, STEPS, RankSelection, StepSelection

# Sections that observe something; a probe file has at least one of them.
SECTIONS = ("dump", "monitor", "perturb", "checks", "recorder")


def parse_output(node: Node) -> Path:
    """Read the name of a directory; a leading ``~`` is the home directory."""
    accepted = "the name of a directory"
    text = node.text(accepted)
    try:
        if b"\0" in os.fsencode(text):
            raise ValueError
        return Path(text).expanduser()
    except (ValueError, RuntimeError):
        raise node.error("cannot be the name of a directory", accepted) from None


def _parse_forward_passes(node: Node) -> str:
    if isinstance(node.value, bool):
        return "call" if node.value else "off"
    return node.choice(get_args(ForwardPasses))


ForwardPasses = Literal["off", "call", "step"]
_FORWARD_PASSES = ValueType(_parse_forward_passes, {"enum": [*get_args(ForwardPasses), True, False]})
_OUTPUT = ValueType(parse_output, {"type": "string", "minLength": 1})


@dataclass(frozen=True)
class ProbeConfig:
    """A checked probe file.

    Sections that are absent are None. ``raw`` is the document as written, for run.json; ``notes`` says how a file of
    msprobe was translated.
    """

    output: Path = key(Path("probe_out"), _OUTPUT, "run directory that is written", "./probe_out")
    ranks: RankSelection = key(
        RankSelection(), RANKS, "ranks that take part, by number or by parallel coordinates", "{tp: 0, dp: 0}"
    )
    steps: StepSelection = key(
        StepSelection(),
        STEPS,
        "steps that are dumped and examined, counted from 0; with after_start from the first step of the job",
        '[10, "20-22", "100-1000/100"]',
    )
    forward_passes: ForwardPasses = key(
        "off",
        _FORWARD_PASSES,
        "passes without backward are the steps: each call of the model (call), or all up to session.step() (step)",
        "call",
    )
    dump: DumpConfig | None = key(None, DUMP, "record modules and API calls on the chosen steps", "{level: mix}")
    monitor: MonitorConfig | None = key(
        None, MONITOR, "record statistics throughout the training", "{every: 10, alerts: [nonfinite]}"
    )
    perturb: PerturbConfig | None = key(
        None, PERTURB, "run operators again to find fragile or wrong ones", "{budget: 5%}"
    )
    checks: ChecksConfig | None = key(None, CHECKS, "compare ranks that should hold the same values", "{every: 100}")
    recorder: RecorderConfig | None = key(
        None, RECORDER, "keep the last steps in memory, write them when something happens", "{keep_steps: 4}"
    )
    shards: tuple[ShardRule, ...] = key(
        (), SHARDS, "how tensors are sharded, where the kit cannot know", "[{name: my_gate, shard: 's b h[tp]'}]"
    )
    reproduce: ReproduceConfig | None = key(
        None, REPRODUCE, "make two jobs start from the same state", "{seed: 7, weights: by_name}"
    )
    replay: ReplayConfig | None = key(
        None, REPLAY, "feed modules the inputs of another run", "{run: ./golden, modules: [mlp]}"
    )
    limits: Limits = key(
        Limits(), LIMITS, "memory and disk space that the kit may use", "{host_memory: 4GiB, disk: 100GiB}"
    )
    strict: bool = key(False, BOOLEAN, "stop the job on an internal error of the kit", "true")
    source: str = ""
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = ()


def read_probe_file(root: Node) -> ProbeConfig:
    """Read a whole document; raises ``ConfigError``."""
    config = read_section(ProbeConfig, root, source=root.context.source)
    if all(getattr(config, name) is None for name in SECTIONS):
        accepted = "at least one, e.g. dump: {level: L0}"
        raise root.context.error("", f"requests nothing: none of {', '.join(SECTIONS)}", accepted)
    for index, alert in enumerate(config.monitor.alerts if config.monitor is not None else ()):
        _check_alert(alert, config, Node(alert.rule, f"monitor.alerts[{index}]", root.context))
    return config


def _check_alert(alert: Alert, config: ProbeConfig, node: Node) -> None:
    """Refuse an alert that needs a section which is absent."""
    if alert.rule == "replica" and config.checks is None:
        raise node.error("needs the checks section", "checks: {} beside the monitor")
    action = alert.action or AlertAction()
    if action.record and config.dump is None:
        raise node.error("is to record steps and there is no dump", "dump: {} with steps: none, or no action.record")
    if action.recorder and config.recorder is None:
        raise node.error("is to keep the flight recorder and there is none", "recorder: {} beside the monitor")


def describe(config: ProbeConfig) -> str:
    """The summary that `msprobe-megatron validate FILE` prints: one line for each thing that will happen."""
    lines = {}
    for name, declared in keys_of(type(config)).items():
        value = getattr(config, name)
        if name == "strict":
            lines["faults"] = "stop the job (strict)" if value else "disable the probe, training continues"
        elif name == "forward_passes":
            ends = {"call": "every call of the model is one", "step": "session.step() ends one"}
            lines["steps of"] = f"forward passes: {ends[value]}" if value in ends else ""
        elif name == "shards":
            lines[name] = f"{len(value)} rule(s): {', '.join(rule.name for rule in value)}" if value else ""
        elif hasattr(value, "describe"):
            lines[name] = value.describe()
        elif value is not None:
            lines[name] = as_text(declared.type.write(value))
    body = [f"  {name:<9} {text}" for name, text in lines.items() if text]
    return "\n".join([config.source, *body, *(f"  {'note':<9} {note}" for note in config.notes)])
