"""Pairs of tensors made by hand, for the parts of a comparison that need no run directory."""

from __future__ import annotations

from typing import Any

import numpy as np

from msprobe_megatron.analysis.compare.match import STATISTICS, Pairs

_TEXT = {
    "phase": "forward",
    "kind": "activation",
    "name": "decoder.layers.0",
    "io": "output",
    "path": "",
    "op": "Module",
}
_NUMBERS = {"step": 0, "block": 0, "unit": 2, "microbatch": 0.0}
_FIGURES = {"min": -1.0, "max": 1.0, "sum": 0.0, "sumsq": 100.0, "absmax": 1.0, "numel": 1024}


def figures_of(values: np.ndarray) -> dict[str, float]:
    """Statistics of an array, by NumPy in float64."""
    x = np.asarray(values, np.float64)
    finite = x[np.isfinite(x)]
    return {
        **{"numel": x.size, "min": finite.min(), "max": finite.max(), "sum": finite.sum()},
        **{"sumsq": float((finite**2).sum()), "absmax": np.abs(finite).max(), "n_zero": int((x == 0).sum())},
        **{
            "n_nan": int(np.isnan(x).sum()),
            "n_posinf": int((x == np.inf).sum()),
            "n_neginf": int((x == -np.inf).sum()),
        },
    }


def pair(left: dict[str, Any] | None = None, right: dict[str, Any] | None = None, **common: Any) -> dict[str, Any]:
    """One matched tensor; figures that are not given are those of a plain one."""
    entry: dict[str, Any] = {
        **_TEXT,
        **_NUMBERS,
        "tokens": "samples",
        "distance": np.nan,
        "left_has": True,
        "right_has": True,
    }
    for side, given in (("l", left), ("r", right)):
        for name in STATISTICS:
            entry[f"{name}_{side}"] = float((given or {}).get(name, _FIGURES.get(name, 0)))
        for name in ("d_sum", "d_norm", "d_extreme", "d_counts", "bad"):
            entry[f"{name}_{side}"] = float((given or {}).get(name, 0.0))
        entry |= {f"dtype_{side}": "float32", f"global_shape_{side}": [16, 2, 32], f"reason_{side}": ""}
        entry |= {f"dims_{side}": "s b h", f"quantum_{side}": 0.0, f"by_sum_{side}": 0}
        entry |= {f"digest_{side}": None, f"seq_{side}": 0, f"copies_{side}": 1, f"rank_{side}": 0}
    return entry | common


def pairs_of(*entries: dict[str, Any]) -> Pairs:
    """Columns of these entries."""
    columns = {}
    for name in entries[0]:
        values = [entry[name] for entry in entries]
        if isinstance(values[0], str | list) or values[0] is None:
            column = np.empty(len(values), object)
            column[:] = values
        else:
            column = np.array(values)
        columns[name] = column
    return Pairs(columns)
