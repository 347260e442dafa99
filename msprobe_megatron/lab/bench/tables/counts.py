"""What recording adds to a step that can be counted, so that it is the same on every machine.

Operations that torch dispatches, those among them that make the host wait for a device, collectives, tensors that are
allocated, hooks on modules and rows. Tests hold these figures; `bench counts` prints them for the demo GPT.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_megatron.lab.bench.clockwork.turns import BenchFailed
from msprobe_megatron.lab.bench.models.workloads import WORKLOADS
from msprobe_megatron.lab.bench.options import Options
from msprobe_megatron.lab.bench.profiles.callers import caller

ABOUT = (
    "What a step has more than the same step without the kit, counted in the training thread: the same on every machine"
    " of one kind. An operation that waits is one that an accelerator's host would stand still for."
)
# What makes the host wait on an accelerator: reading one number, and finding out how many there are.
WAITING = frozenset({"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique2"})
ALLOCATING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "clone", "_to_copy", "zeros", "full"})
_COLLECTIVES = "c10d"
_STEPS = 4
_WARM_UP = 2
_LINES = 8

VARIANTS: dict[str, dict[str, Any]] = {
    "dump L0": {"dump": {"level": "L0"}},
    "dump L1": {"dump": {"level": "L1"}},
    "dump mix": {"dump": {"level": "mix"}},
    "dump mix+digest": {"dump": {"level": "mix", "digest": True}},
    "dump idle": {"steps": [10**8], "dump": {"level": "mix"}},
    "monitor all": {"monitor": {"activations": True, "gradients": True, "optimizer": True}},
    "monitor idle": {"monitor": {"activations": True, "gradients": True, "optimizer": True, "start_step": 10**8}},
}
# Both issues ask for it: at most one wait a step when dumping, none when watching, no collective in either.
ASKED = {
    "dump": {"host_synchronisations": 1, "collectives": 0},
    "monitor": {"host_synchronisations": 0, "collectives": 0},
}


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts dispatched operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.collectives = 0
        self.callers: Counter[str] = Counter()
        """Who called what waits or communicates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the name, do the work."""
        self.counts[func.overloadpacket.__name__] += 1
        self.collectives += func.namespace == _COLLECTIVES
        if func.namespace == _COLLECTIVES or func.overloadpacket.__name__ in WAITING:
            self.callers[caller(func.overloadpacket.__name__)[0]] += 1
        return func(*args, **(kwargs or {}))

    def waits(self) -> int:
        """Operations for which a host would wait."""
        return sum(self.counts[name] for name in WAITING)

    def allocations(self) -> int:
        """Operations that make a new tensor and nothing else."""
        return sum(self.counts[name] for name in ALLOCATING)


def hooks(module: Any) -> int:
    """Hooks on a module and all below it."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) + len(m._backward_pre_hooks)
        for m in module.modules()
    )


def bench(options: Options) -> list[dict[str, Any]]:
    """A line for each variant, on the demo GPT."""
    chosen = {name: file for name, file in VARIANTS.items() if options.only in (None, name)}
    if not chosen:
        return []
    plain = _count(None, options)
    lines = []
    for at, (name, document) in enumerate(chosen.items()):
        options.progress(f"counts: {name}", at / len(chosen))
        found = _count((name, document), options)
        added = {key: (found[key] - plain[key]) / _STEPS for key in plain if key != "rows"}
        rows = found["rows"]
        line = {"name": name, "rows": rows, "hooks": found["hooks"] - plain["hooks"]}
        line |= {key: _whole(added[key]) for key in ("host_synchronisations", "collectives", "allocations")}
        line["operations"] = _whole(added["operations"])
        line["operations_a_row"] = round(added["operations"] / rows, 3) if rows else None
        lines.append({**line, "asked": ASKED[name.partition(" ")[0]]})
    return lines


def why_missed(line: Mapping[str, Any], out: Path) -> list[str]:
    """Who makes the host wait, or communicates, in a step of a variant and not in one without the kit."""
    name = str(line["name"])
    options = Options(out / "profile")
    plain, found = Counter[str](), Counter[str]()
    _count(None, options, plain)
    _count((name, VARIANTS[name]), options, found)
    listed = [f"`{who}` {_whole(times / _STEPS)}" for who, times in (found - plain).most_common(_LINES)]
    return [f"waits and collectives of a step by who calls them: {', '.join(listed) or 'none'}"]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else round(value, 2)


def _count(
    variant: tuple[str, Mapping[str, Any]] | None, options: Options, callers: Counter[str] | None = None
) -> dict[str, int]:
    """Counts of some steps of h64, after the first ones; ``callers`` is told who waits."""
    from msprobe_megatron import attach
    from msprobe_megatron.config import Overrides, from_document
    from msprobe_megatron.lab.demo.pretrain_gpt import run
    from msprobe_megatron.lab.demo.train import Callbacks

    counting, stack = Counting(), contextlib.ExitStack()
    held: list[Any] = []
    model: list[Any] = []
    most = [0]

    def ready(chunks: Any, optimizer: Any) -> None:
        model.extend(chunks)
        # Hooks are looked at from within a step: they are gone after it.
        model[0].register_forward_hook(lambda *_: most.__setitem__(0, max(most[0], hooks(model[0]))))
        if variant is not None:
            folder = options.out / f"counts_{variant[0].replace(' ', '_').replace('+', '_')}"
            config = from_document(dict(variant[1]), "bench", Overrides(output=str(folder)))
            held.append(attach(chunks, optimizer, config, step=0))

    def after(step: Any) -> None:
        if step.iteration == _WARM_UP:
            stack.enter_context(counting)
        elif step.iteration == _WARM_UP + _STEPS:
            stack.close()

    flags = [*WORKLOADS["h64"].flags.split(), "--train-iters", str(_WARM_UP + _STEPS + 1), "--log-interval", "1000000"]
    with _quiet():
        run(flags, Callbacks(ready=ready, step=after))
        rows = _rows(held[0]) if held else 0
    if callers is not None:
        callers.update(counting.callers)
    return {
        "operations": sum(counting.counts.values()),
        "host_synchronisations": counting.waits(),
        "collectives": counting.collectives,
        "allocations": counting.allocations(),
        "hooks": most[0],
        "rows": rows,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _rows(session: Any) -> int:
    """Rows of a step."""
    session.close()
    if session.faults:
        raise BenchFailed(f"counts: {session.faults[0]}")
    counts = session.writer.counts.as_dict()
    return int(counts["rows_written"] // max(1, counts["steps_written"]))
