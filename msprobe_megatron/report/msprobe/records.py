"""One tensor in msprobe's words: type, dtype, shape, Max, Min, Mean, Norm, requires_grad.

Statistics are derived from our sums. Where the tensor holds NaN or Inf the words are msprobe's too: it has no counts,
so a NaN makes all four NaN, and an Inf shows in Max or Min.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# msprobe gives no Mean and Norm for these.
_NO_MEAN = ("int", "uint", "bool", "float64")


def tensor_record(row: Mapping[str, Any], requires_grad: bool) -> dict[str, Any]:
    """Msprobe's record of a row."""
    record: dict[str, Any] = {
        "type": "torch.Tensor",
        "dtype": f"torch.{row['dtype']}",
        "shape": list(row["shape"]),
        **_statistics(row),
        "requires_grad": requires_grad,
    }
    if row.get("digest") is not None:
        record["md5"] = f"{row['digest']:016x}"
    return record


def _statistics(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["n_nan"]:
        return dict.fromkeys(("Max", "Min", "Mean", "Norm"), math.nan)
    high = math.inf if row["n_posinf"] else row["max"]
    low = -math.inf if row["n_neginf"] else row["min"]
    if str(row["dtype"]).startswith(_NO_MEAN) or row["sum"] is None:
        whole = int if str(row["dtype"]).startswith(("int", "uint")) else float
        return {
            "Max": _as(bool if row["dtype"] == "bool" else whole, high),
            "Min": _as(bool if row["dtype"] == "bool" else whole, low),
            "Mean": None,
            "Norm": None,
        }
    infinite = (row["n_posinf"] or 0) + (row["n_neginf"] or 0)
    if infinite:
        both = row["n_posinf"] and row["n_neginf"]
        mean = math.nan if both else (math.inf if row["n_posinf"] else -math.inf)
        return {"Max": high, "Min": low, "Mean": mean, "Norm": math.inf}
    return {"Max": high, "Min": low, "Mean": row["sum"] / max(1, row["numel"]), "Norm": math.sqrt(row["sumsq"])}


def _as(kind: type, value: Any) -> Any:
    return None if value is None else value if isinstance(value, float) and not math.isfinite(value) else kind(value)
