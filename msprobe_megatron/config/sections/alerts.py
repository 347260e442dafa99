"""The rules of ``monitor.alerts``: which keys a rule takes, and what an alert does."""

from collections.abc import Callable
from typing import Any

from msprobe_megatron.config import schema
from msprobe_megatron.config.expressions import ExpressionError, parse_expression
from msprobe_megatron.config.names import parse_name_list
from msprobe_megatron.config.node import Node

ACCEPTED = (
    "nonfinite, {rule: spike, threshold: 0.5}, {rule: limit, threshold: 1e4}, vanish, replica, dead_expert,"
    " {rule: custom, expression: norm > 1e3 and zeros < 0.5}"
)
# The kinds of rows, as record/schema.py has them; a test keeps both alike.
KINDS = (
    *("activation", "gradient", "parameter", "grad_unreduced", "grad_reduced", "grad_clipped"),
    *("optimizer_state", "update", "comm", "data", "loss", "scalar", "perturb", "check", "throughput"),
)
_WITH_HISTORY = ("spike", "vanish")
_MAY_HAVE_THRESHOLD = (*_WITH_HISTORY, "limit")
_MANY = 10**9


def parse_alert(node: Node) -> schema.Alert:
    """Read one rule: its name, or a mapping with its keys.

    Example: ``{rule: spike, threshold: 0.5, kinds: [loss], action: {record: 3, level: mix}}``.
    """
    if isinstance(node.value, str):
        fields: dict[str, Any] = {"rule": node.choice(schema.RULES)}
    else:
        fields = {key: ALERT[key](child) for key, child in node.entries(ALERT).items()}
    if "rule" not in fields:
        raise node.error("has no rule", f"{{rule: one of {', '.join(schema.RULES)}, threshold: number}}")
    alert = schema.Alert(**fields)
    if alert.rule == "limit" and alert.threshold is None:
        raise node.error("needs a threshold", ACCEPTED)
    if (alert.rule == "custom") != bool(alert.expression):
        raise node.error("needs an expression" if alert.rule == "custom" else "takes no expression", ACCEPTED)
    for key, rules in _ONLY_FOR.items():
        if key in fields and alert.rule not in rules:
            raise node.error(f"takes no {key}", f"{key} with {', '.join(rules)}")
    return alert


def refuse_alone(alert: schema.Alert, config: schema.ProbeConfig, node: Node) -> None:
    """Refuse an alert that needs a section which is not there.

    Example: ``replica`` without ``checks``.
    """
    if alert.rule == "replica" and config.checks is None:
        raise node.error("needs the checks section", "checks: {} beside the monitor")
    action = alert.action or schema.AlertAction()
    if action.record and config.dump is None:
        raise node.error("is to record steps and there is no dump", "dump: {} with steps: none, or no action.record")
    if action.recorder and config.recorder is None:
        raise node.error("is to keep the flight recorder and there is none", "recorder: {} beside the monitor")


def _expression(node: Node) -> str:
    accepted = "a condition on columns such as norm > 1e3 and zeros < 0.5"
    text = node.text(accepted)
    try:
        parse_expression(text)
    except ExpressionError as error:
        raise node.context.error(node.path, f"{text!r}: {error}") from None
    return text


def _kinds(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.choice(KINDS) for item in node.items(f"a list of {', '.join(KINDS)}")))


def _action(node: Node) -> schema.AlertAction:
    action = schema.AlertAction(**{key: ACTION[key](child) for key, child in node.entries(ACTION).items()})
    if not (action.record or action.recorder or action.command):
        raise node.error("does nothing", "record: STEPS, recorder: true or command: [PROGRAM, ARGUMENT, …]")
    return action


def _command(node: Node) -> tuple[str, ...]:
    accepted = "a list: program and arguments, with {rule}, {step}, {rank}, {name} where wanted"
    words = tuple(item.text(accepted) for item in node.items(accepted))
    if not words or any("\0" in word for word in words):
        raise node.error("is no command", accepted)
    return words


_ONLY_FOR = {"threshold": _MAY_HAVE_THRESHOLD, "window": _WITH_HISTORY, "deviations": ("spike",)}
ALERT: dict[str, Callable[[Node], Any]] = {
    "rule": lambda node: node.choice(schema.RULES),
    "threshold": lambda node: node.positive_number(),
    "window": lambda node: node.integer(4, 10_000),
    "deviations": lambda node: node.positive_number(),
    "cooldown": lambda node: node.integer(0, _MANY),
    "names": parse_name_list,
    "kinds": _kinds,
    "expression": _expression,
    "action": _action,
}
ACTION: dict[str, Callable[[Node], Any]] = {
    "record": lambda node: node.integer(1, 10_000),
    "level": lambda node: node.choice(("L0", "L1", "mix")),
    "recorder": lambda node: node.boolean(),
    "command": _command,
}
