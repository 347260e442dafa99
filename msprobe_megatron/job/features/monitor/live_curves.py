"""Live curves: TensorBoard event files that grow while the job runs, and wandb if the job uses it.

A watcher of the monitor, in the writer thread. One curve per tensor: its norm over all microbatches. Tags begin with
the layer (`layer_003/mlp.linear_fc1.weight grad_reduced`), so that TensorBoard folds by layer; now and then a heat map
of layers by steps. Every rank writes a run of its own.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from msprobe_megatron.job.features.feature import Feature, JobContext
from msprobe_megatron.job.features.loss_units import token_counts
from msprobe_megatron.job.record.monitor_files import PerRows, StepRows
from msprobe_megatron.job.record.writer import Batch
from msprobe_megatron.run_directory.encoders.png import heat_map, png
from msprobe_megatron.run_directory.encoders.tensorboard_events import header, image_record, scalars_record
from msprobe_megatron.run_directory.safe_files import OverAllowance
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.topology.layers import layer_of

HEAT_SECONDS = 30.0
"""A heat map is drawn this often, and at the end."""
HEAT_STEPS = 256
_HEAT_KINDS = ("grad_reduced", "activation")
_NUMBERS = ("loss", "scalar", "throughput")


class LiveCurves(Feature):
    """Draws what the monitor sees: `monitor.format: [tensorboard]`, and wandb."""

    name = "tensorboard"

    def __init__(self, job: JobContext, *, tensorboard: bool, now: Callable[[], float] = time.time) -> None:
        self._job, self._tensorboard, self._now = job, tensorboard, now
        self._file: IO[bytes] | None = None
        self._plan = PerRows(_Plan)
        self._heat: dict[str, deque[tuple[int, dict[int, float]]]] = {}
        self._drawn = now()
        self.steps = 0
        job.watchers.append(self)

    def next_from(self, step: int) -> int | None:
        """No step of its own: it draws what the monitor sees."""
        return None

    def describe(self) -> str:
        """Where the curves are."""
        return "curves for TensorBoard" if self._tensorboard else "curves for wandb, if the job uses it"

    def saw(self, rows: StepRows) -> None:
        """A watched step is over."""
        wandb = _wandb()
        if not self._tensorboard and wandb is None:
            return
        plan = self._plan(rows.rows)
        scalars, layers = plan.values(rows), plan.layers(rows)
        if self._tensorboard:
            whole = [
                (f"all layers/{kind} layer_{layer:03d}", value)
                for kind, values in layers.items()
                for layer, value in values.items()
            ]
            self._write(scalars_record(self._now(), rows.step, [*scalars, *whole]))
            for kind, values in layers.items():
                self._heat.setdefault(kind, deque(maxlen=HEAT_STEPS)).append((rows.step, values))
            if self._now() - self._drawn >= HEAT_SECONDS:
                self._draw()
        if wandb is not None:
            _log(wandb, rows.step, scalars, layers)
        self.steps += 1

    def _write(self, content: bytes) -> None:
        if self._file is None:
            name = f"events.out.tfevents.{int(self._now())}.msprobe"
            self._file = self._job.directory.grow_file(f"tensorboard/rank_{self._job.where.rank:05d}/{name}")
            content = header(self._now()) + content
        try:
            self._file.write(content)
        except OverAllowance:
            self._tensorboard = False
            self._job.say("limits.disk: the curves for TensorBoard end here", "drop")

    def _draw(self) -> None:
        self._drawn = self._now()
        for kind, seen in self._heat.items():
            steps = list(seen)
            layers = sorted({layer for _, values in steps for layer in values})
            table = np.array([[values.get(layer, np.nan) for _, values in steps] for layer in layers])
            with np.errstate(divide="ignore"):
                pixels = heat_map(np.where(table == 0, np.nan, np.log10(table)))
            size = (pixels.shape[0], pixels.shape[1])
            tag = f"heat map/{kind} norm: layers down, steps across"
            self._write(image_record(self._now(), steps[-1][0], tag, png(pixels), size))

    def close(self) -> None:
        """Draw the last heat map. The writer may still have steps to show: they come without one."""
        if self._tensorboard:
            self._job.submit(_LastDrawing(self))

    def end(self) -> None:
        """All steps have been seen."""
        if self._heat:
            self._draw()
        if self._file is not None:
            self._file.close()

    def ledger(self) -> dict[str, Any]:
        """How many steps were drawn."""
        return {"steps": self.steps}


class _LastDrawing(Batch):
    """Follows all steps through the writer's queue."""

    def __init__(self, curves: LiveCurves) -> None:
        self._curves = curves

    def write(self, directory: Any, identity: Any) -> int:
        self._curves.end()
        return 0


class _Plan:
    """The mapping of rows to curves, built once per list of rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        tags: dict[str, int] = {}
        counts = token_counts(rows)
        hidden = set(counts[counts >= 0].tolist())
        drawn = [(i, row) for i, row in enumerate(rows) if row.slot >= 0 and i not in hidden]
        pairs = [(row.slot, tags.setdefault(tag_of(row), len(tags))) for _, row in drawn]
        # A loss that is reported as [sum over tokens, tokens] is drawn as the log shows it: all sums over all tokens.
        per_token = [(tags[tag_of(row)], rows[counts[i]].slot) for i, row in drawn if counts[i] >= 0]
        self._per_token = np.array(per_token, np.int64).reshape(-1, 2)
        self._tags = list(tags)
        self._slots = np.array([slot for slot, _ in pairs], np.int64)
        self._tag = np.array([tag for _, tag in pairs], np.int64)
        number = {tag_of(row) for row in rows if row.kind in _NUMBERS}
        self._number = np.array([tag in number for tag in tags], bool)
        self._layers: dict[str, dict[int, npt.NDArray[np.int64]]] = {}
        for kind in _HEAT_KINDS:
            found: dict[int, list[int]] = {}
            for row in rows:
                layer = layer_of(row.name)
                whole = kind != "activation" or (row.io == "output" and row.name.endswith(f"layers.{layer}"))
                if row.kind == kind and layer is not None and whole and row.slot >= 0:
                    found.setdefault(layer, []).append(row.slot)
            if found:
                self._layers[kind] = {layer: np.array(slots) for layer, slots in found.items()}

    def values(self, seen: StepRows) -> list[tuple[str, float]]:
        """Tag and value of every curve: a norm, or for numbers their mean over microbatches."""
        floats, bad = seen.floats[self._slots], seen.counts[self._slots, :3].sum(axis=1)
        many = len(self._tags)
        with np.errstate(invalid="ignore", divide="ignore"):
            norm = np.sqrt(np.bincount(self._tag, np.nan_to_num(floats[:, 3]), many))
            weight = np.bincount(self._tag, minlength=many).astype(np.float64)
            tag, slot = self._per_token.T
            weight[tag] = np.bincount(tag, seen.floats[slot, 2], many)[tag]
            mean = np.bincount(self._tag, floats[:, 2], many) / weight
        value = np.where(self._number, mean, norm)
        value[np.bincount(self._tag, np.maximum(bad, 0), many) > 0] = np.nan
        return [(tag, float(x)) for tag, x in zip(self._tags, value, strict=True)]

    def layers(self, seen: StepRows) -> dict[str, dict[int, float]]:
        """Norm by layer of what the heat map shows; infinite where something is not finite."""
        found = {}
        for kind, layers in self._layers.items():
            found[kind] = {
                layer: float(np.sqrt(np.nansum(seen.floats[slots, 3])))
                if seen.counts[slots, :3].max() <= 0
                else float("inf")
                for layer, slots in layers.items()
            }
        return found


def tag_of(row: Row) -> str:
    """The name of a curve: the group that TensorBoard folds, a slash, the rest."""
    layer = layer_of(row.name)
    if row.kind == "loss" and row.path in ("", "0"):
        # As Megatron's own curve: `lm loss`.
        return f"{row.kind}/{row.name}"
    io = f" {row.io}" if row.io not in ("", "value", "weight") else ""
    rest = f"{io}{'.' + row.path if row.path else ''}"
    if row.kind in _NUMBERS:
        return f"{row.kind}/{row.name}{rest}"
    if layer is None:
        top, _, inner = row.name.partition(".")
        return f"{top}/{inner or top}{rest} {row.kind}"
    inner = row.name.partition(f"layers.{layer}")[2].lstrip(".")
    return f"layer_{layer:03d}/{inner or 'whole'}{rest} {row.kind}"


def _wandb() -> Any:
    """The job's own wandb, if it has started a run in this process."""
    module = sys.modules.get("wandb")
    return module if getattr(module, "run", None) is not None else None


def _log(wandb: Any, step: int, scalars: list[tuple[str, float]], layers: dict[str, dict[int, float]]) -> None:
    """Log the numbers of the whole job and of each layer together with what the job logs next."""
    values_by_tag: dict[str, float] = {f"msprobe/{tag}": value for tag, value in scalars if tag.startswith(_NUMBERS)}
    for kind, values in layers.items():
        values_by_tag.update({f"msprobe/layer_{layer:03d}/{kind} norm": value for layer, value in values.items()})
    # Not committed: the step that wandb counts is the job's own.
    wandb.log({**values_by_tag, "msprobe/step": step}, commit=False)
