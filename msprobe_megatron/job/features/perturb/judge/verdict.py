"""Statistics of examined results, and the verdicts on them.

The statistics stay on the device that computed them (`StatisticsTable`) until a few steps are written. `Judge` runs in
the writer thread, where they arrive, in the order of execution; `judge` itself is a pure function. Verdicts:

    ok                nothing to report
    nan, inf          the live result has one where the other has none, or where all inputs are finite
    wrong             further from the exact result than a healthy operator of its class
    nondeterministic  the same call on the same inputs gave another result
    fragile           a change of the inputs in their last place is amplified more than the class allows
    changed           msprobe's ratio is over its threshold; `sign` when signs flipped
    odd               a call with another constant than the same call of the other layers

Preheat learns the thresholds of msprobe's ratio in the first steps, one per API and dtype. The first observed step
counts the calls of each API. In the steps after it a few calls per step are also computed on the host, until each was
chosen once; the comparison with the host shows whether the ratio was that of a healthy call. Judging and learning both
happen in the writer thread in the order of execution, so thresholds do not depend on how far behind that thread is.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from msprobe_megatron.job.features.perturb.judge.tolerance import REFERENCE_NAMES, fragile_above
from msprobe_megatron.job.measure import pair
from msprobe_megatron.run_directory.schema import Row
from msprobe_megatron.topology.layers import layer_of

_OTHERS = ("dx_squares", "x_squares", "input_sum", "cpu_abs", "cpu_rel", "cpu_balance")
NAMES = (*pair.NAMES, *REFERENCE_NAMES, *_OTHERS)
WIDTH = len(NAMES)
COLUMN = {name: index for index, name in enumerate(NAMES)}
REFERENCE = slice(pair.COUNT, pair.COUNT + len(REFERENCE_NAMES))
_ROWS = 256


class StatisticsTable:
    """One line per examined result, on the device; NaN where something was not computed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, to_host: Callable[[torch.Tensor], Any]) -> None:
        self._device, self._dtype, self._to_host = device, dtype, to_host
        self._blocks: list[torch.Tensor] = []
        self._lines: list[torch.Tensor] = []
        self._next = itertools.count()
        self.lock = threading.RLock()
        """Held while a line is taken, while a result that refers to it is kept, and while the table is sealed."""
        self.generation = 0
        """How often the table was sealed: a line of an earlier generation is invalid."""

    def take(self) -> tuple[int, torch.Tensor]:
        """A new line and its index."""
        with self.lock:
            number = next(self._next)
            if number >= len(self._lines):
                with torch.inference_mode(False), torch.no_grad():
                    block = torch.full((_ROWS, WIDTH), torch.nan, dtype=self._dtype, device=self._device)
                    self._blocks.append(block)
                    self._lines.extend(block.unbind(0))
            return number, self._lines[number]

    def seal(self) -> Callable[[], npt.NDArray[np.float64]]:
        """Start the copies to the host and empty the table; the returned function waits for the copies."""
        with self.lock:
            taken = next(self._next)
            copies = [self._to_host(block) for block in self._blocks[: -(-taken // _ROWS)]]
            self._blocks, self._lines, self._next = [], [], itertools.count()
            self.generation += 1

        def arrived() -> npt.NDArray[np.float64]:
            if not copies:
                return np.empty((0, WIDTH))
            return np.concatenate([copy.wait().numpy().astype(np.float64) for copy in copies])

        return arrived


START = 2.05
_FLOOR = 1.0002
_RATIO = COLUMN["ratio"]
_ABS, _REL, _BALANCE = COLUMN["cpu_abs"], COLUMN["cpu_rel"], COLUMN["cpu_balance"]
# msprobe's thresholds of the ratio, by dtype of the live result.
RATIOS = {"float16": 1.002, "bfloat16": 1.004, "float32": 1.0002}
_OTHER_RATIO = 1.0002
# msprobe's limits for the comparison with the host: relative above 1, absolute below, and the mean of the error.
HOST_LIMITS = {"float32": 2.0**-14, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HOST_BALANCE = 1e-4
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_WORST = 1e12


class Examined(NamedTuple):
    """An examined result: what is known without reading tensors, and the line of its statistics."""

    line: int
    step: int
    seq: int
    name: str
    api: str
    number: int
    chunk: int
    phase: str
    microbatch: int
    path: str
    kind: str
    terms: int
    dtype: str
    shape: tuple[int, ...]
    mode: str
    stage: str
    profile: str
    verdict: str = ""
    """A verdict that needs no statistics."""
    note: str = ""
    """What the report says beside the verdict."""


class Verdict(NamedTuple):
    """A word, its severity (1 is the limit), and the details for the row."""

    word: str
    severity: float
    details: dict[str, Any]


def judge(  # noqa: PLR0911 (the worst word first)
    seen: Examined, line: npt.NDArray[np.float64], threshold: float | None = None
) -> Verdict:
    """The verdict on one examined result; ``threshold`` replaces msprobe's for the ratio (preheat)."""
    if seen.verdict:
        return Verdict(seen.verdict, 2.0, {"note": seen.note})
    values = {name: float(line[index]) for name, index in COLUMN.items()}
    if seen.profile == "msprobe":
        return _as_msprobe(seen, values, threshold)
    found = _nonfinite(values)
    shown = _shown(seen, values)
    if found is not None:
        return Verdict(found, _WORST, shown)
    if threshold is not None and values["ratio"] > threshold:
        return Verdict("changed", _part(values["ratio"] - 1, threshold - 1), {**shown, "threshold": threshold})
    if values["ref_over"] > 1:
        note = {"note": seen.note} if seen.note else {}
        return Verdict("wrong", values["ref_over"], {**shown, **note})
    if seen.mode in ("add_noise", "bit_noise"):
        limit = fragile_above(seen.kind, seen.terms)
        kappa = shown.get("kappa", 0.0)
        shown["threshold"] = limit
        return Verdict("fragile" if kappa > limit else "ok", _part(kappa, limit), shown)
    if seen.mode == "change_value":
        return _swapped_rows(seen, values, shown)
    if values["different"] > 0:
        return Verdict("nondeterministic", 1 + values["max_ulp"], shown)
    return Verdict("ok", 0.0 if math.isnan(values["ref_over"]) else values["ref_over"], shown)


def _nonfinite(values: Mapping[str, float]) -> str | None:
    finite_inputs = math.isfinite(values["input_sum"])
    if values["nan_apart"] > 0 or values["ref_nan_apart"] > 0 or (values["nan_live"] > 0 and finite_inputs):
        return "nan"
    if values["inf_apart"] > 0 or values["ref_inf_apart"] > 0:
        return "inf"
    return None


def _swapped_rows(seen: Examined, values: Mapping[str, float], shown: dict[str, Any]) -> Verdict:
    """Swapped rows: differences are allowed up to the few ulps of a reduction in another order."""
    size = math.sqrt(values["live_squares"] / max(values["elements"], 1))
    unit = _EPS.get(seen.dtype, 2.0**-23) * size  # underflows to zero for tiny sizes
    apart = values["max_abs"] / unit if unit else 0.0
    limit = shown["threshold"] = 4.0 * math.sqrt(seen.terms)
    return Verdict("changed" if apart > limit else "ok", _part(apart, limit), shown)


def _shown(seen: Examined, values: Mapping[str, float]) -> dict[str, Any]:
    """The statistics that a row keeps; those not computed are left out."""
    shown = {
        "ulp": values["ref_ulp"] if not math.isnan(values["ref_ulp"]) else values["max_ulp"],
        "over": values["ref_over"],
        "kappa": values["ref_kappa"],
        "different": values["different"],
        "nan": values["nan_live"],
        "where": values["ref_where"] if values["ref_over"] > 1 else values["where"],
    }
    if min(values["dx_squares"], values["x_squares"], values["live_squares"]) > 0:
        # Roots first: the quotient of the squares underflows for a tiny nudge.
        moved = math.sqrt(values["diff_squares"]) / math.sqrt(values["live_squares"])
        kappa = moved * (math.sqrt(values["x_squares"]) / math.sqrt(values["dx_squares"]))
        if math.isfinite(kappa):  # not for a mask of -inf, or values whose squares overflow
            shown["kappa"] = kappa
    return {key: value for key, value in shown.items() if not math.isnan(value)}


def _as_msprobe(seen: Examined, values: Mapping[str, float], threshold: float | None) -> Verdict:
    if seen.mode == "to_cpu" and not math.isnan(values["cpu_balance"]):
        return host_verdict(seen, values)
    limit = threshold or (1.0 if seen.mode == "no_change" else RATIOS.get(seen.dtype, _OTHER_RATIO))
    ratio, flipped = values["ratio"], values["flipped"] > 0
    shown = {"max_rel": "symbol_flipping" if flipped else ratio - 1, "threshold": limit, "where": values["where"]}
    if values["nan_apart"] > 0 or values["inf_apart"] > 0:
        # msprobe itself takes NaN as equal to everything.
        return Verdict("nan" if values["nan_apart"] > 0 else "inf", _WORST, {**shown, "max_rel": None})
    if flipped:
        return Verdict("sign", _WORST / 2, shown)
    return Verdict("changed" if ratio > limit else "ok", _part(ratio - 1, limit - 1), shown)


def host_verdict(seen: Examined, values: Mapping[str, float]) -> Verdict:
    """Msprobe's verdict from the comparison with the host; the mean error counts by its magnitude."""
    limit = HOST_LIMITS.get(seen.dtype, HOST_LIMITS["float32"])
    parts = [values["cpu_abs"] / limit, values["cpu_rel"] / limit, abs(values["cpu_balance"]) / HOST_BALANCE]
    worst = max((part for part in parts if not math.isnan(part)), default=0.0)
    shown = {"max_rel": None, "threshold": limit, "cpu_abs": values["cpu_abs"], "cpu_rel": values["cpu_rel"]}
    return Verdict(
        "changed" if worst > 1 else "ok", worst, {k: v for k, v in shown.items() if v is None or not math.isnan(v)}
    )


def _part(value: float, limit: float) -> float:
    if limit > 0:
        return value / limit
    return _WORST if value > 0 else 0.0


class PreheatSchedule:
    """Chooses the calls that are also computed on the host, while preheat learns. Belongs to the training thread.

    Example::

        >>> schedule = PreheatSchedule(steps=15, most=20)
        >>> schedule.begin()
        >>> schedule.chooses("torch.matmul")
        False
    """

    def __init__(self, steps: int, most: int) -> None:
        self._steps, self._most = steps, most
        self._counts: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = {}
        self.round = -1

    def begin(self) -> None:
        """A step begins."""
        if self.round == 0:
            self._calls = dict(self._counts)
        self.round += 1
        self._counts.clear()

    @property
    def learning(self) -> bool:
        """Whether thresholds are still being learned."""
        return self.round < self._steps

    def chooses(self, api: str) -> bool:
        """Count a call of this step; returns whether it is also computed on the host."""
        self._counts[api] += 1
        calls = self._calls.get(api, 0)
        if not calls or not 1 <= self.round < self._steps:
            return False
        number, rounds = self._counts[api] - 1, max(self._steps - 1, 1)
        chosen = min(calls, rounds * self._most)
        # Where `most` allows fewer than all calls, the chosen ones are spread over the whole step.
        sample = number * chosen // calls
        if number >= calls or (number + 1) * chosen // calls == sample:
            return False
        return sample % rounds == self.round - 1


class PreheatThresholds:
    """Learned thresholds by API and dtype. Belongs to the writer thread."""

    def __init__(self) -> None:
        self.thresholds: dict[tuple[str, str], float] = {}
        self._done: set[tuple[str, str]] = set()
        self._good: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._bad: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._step = -1

    def threshold(self, seen: Examined) -> float:
        """The threshold for a result, as learned from the steps before it."""
        if seen.step != self._step:
            self._learn()
            self._step = seen.step
        return self.thresholds.get((seen.api, seen.dtype), START)

    def add(self, seen: Examined, line: npt.NDArray[np.float64]) -> None:
        """Learn from a result, if it was also computed on the host."""
        if not len(line) or math.isnan(line[_BALANCE]):
            return
        limit = HOST_LIMITS.get(seen.dtype, HOST_LIMITS["float32"])
        off = [line[_ABS] / limit, line[_REL] / limit, abs(line[_BALANCE]) / HOST_BALANCE]
        healthy = all(not part > 1 for part in off)
        (self._good if healthy else self._bad)[seen.api, seen.dtype].append(float(line[_RATIO]))

    def _learn(self) -> None:
        for key in {*self._good, *self._bad} - self._done:
            good, bad = self._good.get(key, []), self._bad.get(key, [])
            now = self.thresholds.get(key, START)
            if not bad:
                now = 1 + 2 * (now - 1) if max(good) > now else 1 + (now - 1) / 2
            elif not good or min(bad) > max(good):
                now = min(*bad, now)
                self._done.add(key)
            self.thresholds[key] = max(now, RATIOS.get(key[1], _FLOOR))
        self._good.clear()
        self._bad.clear()


class Judge:
    """Judges examined results in the order of execution. Belongs to the writer thread."""

    def __init__(self, *, preheat: bool) -> None:
        self.preheat = PreheatThresholds() if preheat else None
        self.counts: Counter[str] = Counter()
        """How often each verdict was given."""

    def verdicts(self, examined: Sequence[Examined], statistics: npt.NDArray[np.float64]) -> list[Verdict]:
        """One verdict per examined result."""
        return [self._verdict(seen, statistics[seen.line] if seen.line >= 0 else statistics[:0]) for seen in examined]

    def _verdict(self, seen: Examined, line: npt.NDArray[np.float64]) -> Verdict:
        verdict = judge(seen, line, self.preheat.threshold(seen) if self.preheat is not None else None)
        self.counts[verdict.word] += 1
        if self.preheat is not None:
            self.preheat.add(seen, line)
        return verdict


def row_of(seen: Examined, verdict: Verdict) -> Row:
    """The row of kind ``perturb`` of an examined result."""
    extra: dict[str, Any] = {
        "verdict": verdict.word,
        "severity": verdict.severity,
        "mode": seen.mode,
        "stage": seen.stage,
        "profile": seen.profile,
        "class": seen.kind,
        "call": seen.number,
        "layer": layer_of(seen.name.partition("/")[0]),
        **verdict.details,
    }
    return Row(
        seen.seq,
        seen.microbatch,
        seen.phase,
        seen.chunk,
        "perturb",
        seen.name,
        "output" if seen.stage == "forward" else "input",
        seen.path,
        seen.api,
        -1,
        seen.dtype,
        seen.shape,
        None,
        "",
        math.prod(seen.shape),
        -1,
        json.dumps({key: _json_number(value) for key, value in extra.items()}),
    )


def _json_number(value: Any) -> Any:
    """JSON has no infinities: a very large number stands for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(1e300, value)
    return value
