"""What a running job can be told to do: the grammar of the control file.

`msprobe-megatron ctl` writes such an order and the job reads it; both check it here, so that nonsense is refused with
the same words on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from msprobe_megatron.config.errors import ConfigError
from msprobe_megatron.config.node import Context, Node
from msprobe_megatron.config.selection import Span, StepSelection, parse_selection

LEVELS = ("L0", "L1", "mix")
KEYS = ("steps", "next", "level", "dump", "monitor")
_MOST = 1_000_000


@dataclass(frozen=True)
class Order:
    """A change while the job runs.

    ``steps`` are recorded in addition to those of the probe file, at ``level`` if there is one; ``next`` is the number
    of steps from the one on which the order takes effect. A level without steps holds for all steps from then on.
    ``dump`` and ``monitor`` switch a part off, or back to what the probe file asks.
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
        """The order as `parse_order` reads it."""
        found = {key: getattr(self, key) for key in KEYS}
        found["steps"] = self.steps.describe() if self.steps is not None else None
        return {key: value for key, value in found.items() if value is not None and (key, value) != ("next", 0)}

    def describe(self) -> str:
        """The order in words.

        Example: ``steps 200-202 at level mix``.
        """
        words = []
        if self.steps is not None:
            words.append(f"steps {self.steps.describe()}")
        if self.next:
            words.append(f"the next {self.next} steps")
        if self.level is not None:
            words.append(f"at level {self.level}" if words else f"level {self.level} from here on")
        for part in ("dump", "monitor"):
            wanted = getattr(self, part)
            if wanted is not None:
                words.append(f"{part} {'on' if wanted else 'off'}")
        return " ".join(words)


def parse_order(document: object, source: str) -> Order:
    """Read an order; raises ``ConfigError``.

    Example: ``parse_order({"steps": "200-202", "level": "mix"}, "control.json")``.
    """
    entries = Node(document, "", Context(source)).entries(KEYS)
    fields: dict[str, Any] = {}
    for key, node in entries.items():
        if key == "steps":
            fields[key] = parse_selection(node)
        elif key == "next":
            fields[key] = node.integer(1, _MOST)
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
    """An order made in Python, checked like one of a file.

    Example: ``order_of({"next": 3, "level": "mix"})``.
    """
    return parse_order({key: value for key, value in fields.items() if value is not None}, "request")
