"""All laws, and what becomes of each of them on one run: it holds, it is broken, or it could not be checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from msprobe_megatron.analysis.laws import (
    attention,
    blocks,
    communication,
    construction,
    dropout,
    experts,
    gradients,
    groups,
    identity,
    loss,
    optimizer,
    products,
    updates,
    wiring,
)
from msprobe_megatron.analysis.laws.law import Breach, Law, NotChecked
from msprobe_megatron.analysis.laws.scene import Scene
from msprobe_megatron.analysis.load.run import Run

# In the order of cause: data, forward, loss, backward, reduction, optimizer.
LAWS: tuple[Law, ...] = (
    *construction.LAWS,
    *identity.LAWS,
    *wiring.LAWS,
    *dropout.LAWS,
    *attention.LAWS,
    *blocks.LAWS,
    *experts.LAWS,
    *communication.LAWS,
    *loss.LAWS,
    *gradients.LAWS,
    *products.LAWS,
    *optimizer.LAWS,
    *updates.LAWS,
    *groups.LAWS,
)


@dataclass
class Examined:
    """The laws of one run: those that hold, the breaches of the others, and what the rest would have needed."""

    held: list[str] = field(default_factory=list)
    broken: list[tuple[Law, Breach]] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[Law, Breach]] = field(default_factory=list)
    """What healthy jobs may do on purpose: the law holds."""

    def states(self) -> dict[str, str]:
        """Every law that was looked at and what became of it, in the order of the laws."""
        broken = {law.name for law, _ in self.broken}
        found = dict.fromkeys(self.held, "holds") | dict.fromkeys(broken, "broken")
        found |= {name: f"not checked: {text}" for name, text in self.not_checked.items()}
        return {law.name: found[law.name] for law in LAWS if law.name in found}


def examine(run: Run, step: int | None = None) -> Examined:
    """Check every law on a run, or on one of its steps."""
    found = Examined()
    if not run.files and not run.monitor and not run.laws and not run.products:
        return found
    scene = Scene(run, step)
    for law in LAWS:
        try:
            breaches = law.check(scene)
        except NotChecked as reason:
            found.not_checked[law.name] = f"needs {reason}"
            continue
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            # A damaged or foreign file must not hide what the other laws find.
            found.not_checked[law.name] = f"needs rows that can be read: {type(error).__name__}: {error}"
            continue
        broken = [(law, breach) for breach in breaches if breach.sure != "note"]
        found.broken += broken
        found.notes += [(law, breach) for breach in breaches if breach.sure == "note"]
        if not broken:
            found.held.append(law.name)
    return found
