"""Control orders: changes requested of a running job, and the grammar of the control file.

`msprobe-megatron ctl` writes an order and the job reads it; both validate it here, so that both refuse an invalid one
with the same message.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msprobe_megatron.config.document import ConfigError, Context, Node
from msprobe_megatron.config.selection import Span, StepSelection, parse_selection

LEVELS = ("L0", "L1", "mix")
KEYS = ("steps", "next", "level", "dump", "monitor")
_MOST_STEPS = 1_000_000


@dataclass(frozen=True)
class Order:
    """A change requested while the job runs.

    ``steps`` are recorded in addition to those of the probe file, at ``level`` if given; ``next`` is a number of steps,
    counted from the one on which the order takes effect. A level without steps applies to all later steps. ``dump`` and
    ``monitor`` switch a feature off, or back to what the probe file requests.
    """

    steps: StepSelection | None = None
    next: int = 0
    level: str | None = None
    dump: bool | None = None
    monitor: bool | None = None

    def starting(self, step: int) -> "Order":
        """The order with ``next`` counted from ``step``."""
        if not self.next:
            return self
        return replace(self, steps=StepSelection((Span(step, step + self.next - 1),)), next=0)

    def as_dict(self) -> dict[str, Any]:
        """The order as a document that `parse_order` reads."""
        found = {key: getattr(self, key) for key in KEYS}
        found["steps"] = self.steps.describe() if self.steps is not None else None
        return {key: value for key, value in found.items() if value is not None and (key, value) != ("next", 0)}

    def describe(self) -> str:
        """The order as a line for the user."""
        parts = []
        if self.steps is not None:
            parts.append(f"steps {self.steps.describe()}")
        if self.next:
            parts.append(f"the next {self.next} steps")
        if self.level is not None:
            parts.append(f"at level {self.level}" if parts else f"level {self.level} from now on")
        for feature in ("dump", "monitor"):
            on = getattr(self, feature)
            if on is not None:
                parts.append(f"{feature} {'on' if on else 'off'}")
        return " ".join(parts)


def parse_order(document: object, source: str) -> Order:
    """Read an order; raises ``ConfigError``."""
    entries = Node(document, "", Context(source)).entries(KEYS)
    fields: dict[str, Any] = {}
    for key, node in entries.items():
        if key == "steps":
            fields[key] = parse_selection(node)
        elif key == "next":
            fields[key] = node.integer(1, _MOST_STEPS)
        elif key == "level":
            fields[key] = node.choice(LEVELS)
        else:
            fields[key] = node.boolean()
    if not fields:
        raise ConfigError(f"{source}: orders nothing; accepted: some of {', '.join(KEYS)}")
    order = Order(**fields)
    if order.steps is not None and order.next:
        raise ConfigError(f"{source}: next: stands beside steps; accepted: one of them")
    if order.dump is False and (order.steps or order.next or order.level):
        raise ConfigError(f"{source}: dump: false stands beside steps or a level; accepted: dump: false alone")
    return order


def order_of(fields: Mapping[str, Any]) -> Order:
    """An order from Python arguments, validated like one of a file."""
    return parse_order({key: value for key, value in fields.items() if value is not None}, "request")
