"""From figures to a word: what an examined result says of its operator. Pure; runs where the numbers are on the host.

ok                nothing to see
nan, inf          the live result has one where the other has none, or where all inputs are finite
wrong             further from the exact result than a healthy operator of its class
nondeterministic  the same call on the same inputs gave something else
fragile           a change of the inputs in their last place comes out larger than the class allows
changed           msprobe's ratio is over its threshold; `sign` when signs flipped
odd               calls with another constant than the same call of the other layers
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_megatron.probes.perturb.classes import fragile_above
from msprobe_megatron.probes.perturb.figures import PLACE

# msprobe's thresholds of the ratio, by dtype of the live result.
RATIOS = {"float16": 1.002, "bfloat16": 1.004, "float32": 1.0002}
_OTHER_RATIO = 1.0002
# msprobe's limits against the result of the host: relative above 1, absolute below, and the mean of the error.
HOST_LIMITS = {"float32": 2.0**-14, "float16": 2.0**-11, "bfloat16": 2.0**-8}
HOST_BALANCE = 1e-4
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_WORST = 1e12


class Examined(NamedTuple):
    """What is known of an examined result without reading it, and the line of its figures."""

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
    made: str = ""
    """A verdict that needed no figures."""
    note: str = ""


class Verdict(NamedTuple):
    """A word, how bad it is (1 is the limit), and the figures worth showing."""

    word: str
    severity: float
    figures: dict[str, Any]


def judge(  # noqa: PLR0911 (the worst word first)
    seen: Examined, line: npt.NDArray[np.float64], threshold: float | None = None
) -> Verdict:
    """The verdict on one examined result; ``threshold`` replaces msprobe's for the ratio (preheat).

    Example::

        judge(examined, figures[examined.line]).word      # 'ok'
    """
    if seen.made:
        return Verdict(seen.made, 2.0, {"note": seen.note})
    values = {name: float(line[index]) for name, index in PLACE.items()}
    if seen.profile == "msprobe":
        return _as_msprobe(seen, values, threshold)
    found = _nonfinite(values)
    shown = _shown(seen, values)
    if found is not None:
        return Verdict(found, _WORST, shown)
    if threshold is not None and values["ratio"] > threshold:
        return Verdict("changed", _part(values["ratio"] - 1, threshold - 1), {**shown, "threshold": threshold})
    if values["ref_over"] > 1:
        return Verdict("wrong", values["ref_over"], shown)
    if seen.mode in ("add_noise", "bit_noise"):
        limit = fragile_above(seen.kind, seen.terms)
        kappa = shown.get("kappa", 0.0)
        shown["threshold"] = limit
        return Verdict("fragile" if kappa > limit else "ok", _part(kappa, limit), shown)
    if seen.mode == "change_value":
        return _moved(seen, values, shown)
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


def _moved(seen: Examined, values: Mapping[str, float], shown: dict[str, Any]) -> Verdict:
    """Rows that changed places gave other numbers: allowed are the few units of a reduction in another order."""
    size = math.sqrt(values["live_squares"] / max(values["elements"], 1))
    unit = _EPS.get(seen.dtype, 2.0**-23) * size  # zero, where the size is hardly more
    apart = values["max_abs"] / unit if unit else 0.0
    limit = shown["threshold"] = 4.0 * math.sqrt(seen.terms)
    return Verdict("changed" if apart > limit else "ok", _part(apart, limit), shown)


def _shown(seen: Examined, values: Mapping[str, float]) -> dict[str, Any]:
    """The figures that a row keeps; those not computed are left out."""
    shown = {
        "ulp": values["ref_ulp"] if not math.isnan(values["ref_ulp"]) else values["max_ulp"],
        "over": values["ref_over"],
        "kappa": values["ref_kappa"],
        "different": values["different"],
        "nan": values["nan_live"],
        "where": values["ref_where"] if values["ref_over"] > 1 else values["where"],
    }
    if min(values["dx_squares"], values["x_squares"], values["live_squares"]) > 0:
        # Roots first: the quotient of the squares of a tiny nudge is zero in floating point.
        moved = math.sqrt(values["diff_squares"]) / math.sqrt(values["live_squares"])
        kappa = moved * (math.sqrt(values["x_squares"]) / math.sqrt(values["dx_squares"]))
        if math.isfinite(kappa):  # a mask of -inf, or of values whose squares are, has no size to nudge by
            shown["kappa"] = kappa
    return {key: value for key, value in shown.items() if not math.isnan(value)}


def _as_msprobe(seen: Examined, values: Mapping[str, float], threshold: float | None) -> Verdict:
    if seen.mode == "to_cpu" and not math.isnan(values["cpu_balance"]):
        return host_verdict(seen, values)
    limit = threshold or (1.0 if seen.mode == "no_change" else RATIOS.get(seen.dtype, _OTHER_RATIO))
    ratio, flipped = values["ratio"], values["flipped"] > 0
    shown = {"max_rel": "symbol_flipping" if flipped else ratio - 1, "threshold": limit, "where": values["where"]}
    if values["nan_apart"] > 0 or values["inf_apart"] > 0:
        # Its ancestor took NaN for equal to everything.
        return Verdict("nan" if values["nan_apart"] > 0 else "inf", _WORST, {**shown, "max_rel": None})
    if flipped:
        return Verdict("sign", _WORST / 2, shown)
    return Verdict("changed" if ratio > limit else "ok", _part(ratio - 1, limit - 1), shown)


def host_verdict(seen: Examined, values: Mapping[str, float]) -> Verdict:
    """Msprobe's verdict against the result of the host; the mean of the error counts on both sides of zero.

    Example::

        host_verdict(examined, values).word
    """
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
