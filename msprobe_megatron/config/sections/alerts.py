"""The rules of ``monitor.alerts``, and what an alert triggers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.expressions import ExpressionError, parse_expression
from msprobe_megatron.config.keys import (
    BOOLEAN,
    POSITIVE_NUMBER,
    ValueType,
    any_schema,
    integer,
    key,
    list_of,
    list_schema,
    one_of,
    read_section,
    required_key,
    section,
    section_schema,
    some_of,
)
from msprobe_megatron.config.name_patterns import NAME_PATTERNS

Rule = Literal["nonfinite", "spike", "limit", "vanish", "replica", "dead_expert", "custom"]
ActionLevel = Literal["L0", "L1", "mix"]
RULES: tuple[str, ...] = get_args(Rule)
# The kinds of rows, as run_directory/schema.py has them; a test keeps both alike.
KINDS = (
    "activation",
    "gradient",
    "parameter",
    "buffer",
    "grad_unreduced",
    "grad_reduced",
    "grad_clipped",
    "optimizer_state",
    "update",
    "comm",
    "data",
    "loss",
    "scalar",
    "routing",
    "token",
    "perturb",
    "check",
    "throughput",
)
ACCEPTED = (
    "nonfinite, {rule: spike, threshold: 0.5}, {rule: limit, threshold: 1e4}, vanish, replica, dead_expert,"
    " {rule: custom, expression: norm > 1e3 and zeros < 0.5}"
)
_ONLY_FOR = {"threshold": ("spike", "vanish", "limit"), "window": ("spike", "vanish"), "deviations": ("spike",)}
_FORM = f"{{rule: one of {', '.join(RULES)}, threshold: number}}"


def _read_command(node: Node) -> tuple[str, ...]:
    accepted = "a list: program and arguments, with {rule}, {step}, {rank}, {name} where wanted"
    words = tuple(item.text(accepted) for item in node.items(accepted))
    if not words or any("\0" in word for word in words):
        raise node.error("is no command", accepted)
    return words


def _read_expression(node: Node) -> str:
    text = node.text("a condition on columns such as norm > 1e3 and zeros < 0.5")
    try:
        parse_expression(text)
    except ExpressionError as error:
        raise node.context.error(node.path, f"{text!r}: {error}") from None
    return text


_COMMAND = ValueType(_read_command, list_schema({"type": "string", "minLength": 1}, 1))
_EXPRESSION = ValueType(_read_expression, {"type": "string", "minLength": 1})


@dataclass(frozen=True)
class AlertAction:
    """What an alert triggers besides the message.

    ``record`` steps are dumped at ``level``, beginning with the next one; ``recorder`` writes the flight recorder;
    ``command`` is run in the background, never through a shell.
    """

    record: int = key(0, integer(1, 10_000), "number of following steps that are dumped", "3")
    level: ActionLevel = key("mix", one_of(get_args(ActionLevel)), "level of that dump", "L0")
    recorder: bool = key(False, BOOLEAN, "write the flight recorder", "true")
    command: tuple[str, ...] = key(
        (), _COMMAND, "program that is run in the background", '[notify, "{rule} at step {step}"]'
    )


def _check_action(action: AlertAction, node: Node) -> None:
    if not (action.record or action.recorder or action.command):
        raise node.error("does nothing", "record: STEPS, recorder: true or command: [PROGRAM, ARGUMENT, …]")


@dataclass(frozen=True)
class Alert:
    """A rule of the monitor.

    ``nonfinite``: a NaN or an Inf. ``spike``: a magnitude (root mean square) more than (1 + threshold) times above or
    below the median of the last ``window`` steps, and more than ``deviations`` robust deviations from it (0.4 times as
    many for the gradient norm); the default threshold is 0.25 for losses, 1 for the gradient norm, 3 for activations (9
    for those of a single expert), 6 for updates, 9 for clipped gradients, 29 for gradients of routers and experts, 2
    for other gradients. ``limit``: an absolute value above the threshold. ``vanish``: a magnitude below threshold times
    the median, or only zeros where there were few. ``replica``: ranks that should hold the same values do not (needs
    ``checks``). ``dead_expert``: an expert that no token reached. ``custom``: the condition ``expression`` on a row.
    ``cooldown`` counts steps; ``names`` and ``kinds`` select rows, empty is all.
    """

    rule: Rule = required_key(one_of(RULES), "condition that raises the alert", "spike")
    threshold: float | None = key(None, POSITIVE_NUMBER, "threshold, in the units of the rule", "0.5")
    window: int = key(32, integer(4, 10_000), "steps of history that a spike is measured against", "64")
    deviations: float = key(10.0, POSITIVE_NUMBER, "robust deviations that a spike also has to exceed", "6")
    cooldown: int = key(100, integer(0), "steps without further alerts of the rule after an alert", "20")
    names: tuple[str, ...] = key((), NAME_PATTERNS, "names that the rule applies to", "[lm loss]")
    kinds: tuple[str, ...] = key(
        (), some_of(KINDS, empty=True), "kinds of rows that the rule applies to", "[loss, grad_reduced]"
    )
    expression: str = key("", _EXPRESSION, "the condition of a custom rule", "norm > 1e3 and layer < 2")
    action: AlertAction | None = key(
        None, section(AlertAction, _check_action), "what the alert triggers", "{record: 3, level: mix}"
    )

    def describe(self) -> str:
        """The rule and its threshold, for `msprobe-megatron validate`."""
        return self.rule if self.threshold is None else f"{self.rule} {self.threshold:g}"


def parse_alert(node: Node) -> Alert:
    """Read one rule: its name, or a mapping with its keys."""
    if isinstance(node.value, str):
        node.choice(RULES)
        alert = read_section(Alert, Node({"rule": node.value}, node.path, node.context))
    else:
        alert = read_section(Alert, node, _FORM)
    if alert.rule == "limit" and alert.threshold is None:
        raise node.error("needs a threshold", ACCEPTED)
    if (alert.rule == "custom") != bool(alert.expression):
        raise node.error("needs an expression" if alert.rule == "custom" else "takes no expression", ACCEPTED)
    given = node.value if isinstance(node.value, Mapping) else {}
    for name, rules in _ONLY_FOR.items():
        if name in given and alert.rule not in rules:
            raise node.error(f"takes no {name}", f"{name} with {', '.join(rules)}")
    return alert


ALERTS = list_of(
    ValueType(parse_alert, any_schema([{"enum": list(RULES)}, section_schema(Alert)]), section=Alert), "a list of rules"
)
