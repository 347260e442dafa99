"""``free_benchmark.csv`` as msprobe writes it: nine columns, one file a step and rank, only what was found."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msprobe_megatron.analysis.load.run import Run, RunError

COLUMNS = ("rank", "pert_mode", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")
FILE_NAME = "free_benchmark.csv"
_GROUPS = (("torch.nn.functional.", "Functional"), ("torch.Tensor.", "Tensor"), ("torch.", "Torch"))


def free_benchmark(run: Run, step: int | None = None) -> Iterator[tuple[Path, list[tuple[Any, ...]]]]:
    """Path (below the directory to write to) and rows of every file; steps and ranks without a finding have none."""
    files: dict[Path, list[tuple[Any, ...]]] = defaultdict(list)
    wrong = run.perturb_rows().filter("json_extract_string(extra, '$.verdict') <> 'ok'")
    columns = "step, rank, name, op, path, dtype, shape, extra"
    for number, rank, name, op, path, dtype, shape, text in wrong.project(columns).order("step, rank").fetchall():
        if step is not None and number != step:
            continue
        try:
            extra = json.loads(text)
            stage, mode = str(extra["stage"]), str(extra["mode"])
            api = msprobe_call(str(name), str(op), int(extra.get("call") or 0), stage)
            largest = _max_rel(extra)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RunError(
                f"{run.path}: {name}: is not a finding of perturb: {type(error).__name__}: {error}"
            ) from error
        row = (
            rank,
            mode,
            stage,
            number,
            api,
            largest,
            f"torch.{dtype}" if dtype else "",
            f"torch.Size({list(shape)})" if dtype else "",
            path if path else None,
        )
        files[Path(f"step{number}") / f"rank{rank}" / FILE_NAME].append(row)
    yield from files.items()


def msprobe_call(name: str, op: str, number: int, stage: str) -> str:
    """A call or module as msprobe names it.

    Example::

        >>> msprobe_call("decoder.layers.0/torch.matmul.0", "torch.matmul", 3, "forward")
        'Torch.matmul.3.forward'
    """
    if "/" not in name:
        return f"Module.{name}.{op}.{stage}.{number}"
    group = next((label for prefix, label in _GROUPS if op.startswith(prefix)), "Aten")
    parts = op.split(".")
    bare = parts[-1] if op.startswith("torch.") else parts[min(1, len(parts) - 1)]
    return f"{group}.{bare}.{number}.{stage}"


def _max_rel(extra: dict[str, Any]) -> Any:
    """Msprobe's figure; for findings of other checks, how far they are over their limit."""
    if "max_rel" in extra:
        return extra["max_rel"]
    return None if extra["verdict"] in ("nan", "inf", "odd") else extra.get("severity")
