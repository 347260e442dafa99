"""The monitor's files of a run directory: many steps to a file, one file being replaced while the job runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from msprobe_megatron.analyse.checked import rows_problem

_RANK = re.compile(r"rank_(\d{1,9})$")
_FILE = re.compile(r"steps_(\d{1,18})_(\d{1,18})\.parquet$")


class MonitorPart(NamedTuple):
    """A file of one rank; its steps lie between ``first`` and ``last``."""

    rank: int
    first: int
    last: int
    path: Path


def find_monitor(root: Path, problems: list[str], kind: str = "monitor") -> list[MonitorPart]:
    """The files of all ranks in the order of rank and steps; what is damaged is told in ``problems``.

    ``kind`` is the folder; the files of perturb have the same form.

    Example::

        find_monitor(Path("probe_out"), [])[0].path
    """
    found = []
    for folder in sorted((root / kind).glob("rank_*")):
        rank = _RANK.search(folder.name)
        for path in sorted(folder.glob("steps_*.parquet")) if rank else ():
            steps = _FILE.search(path.name)
            if rank is None or steps is None:
                continue
            problem = rows_problem(path)
            if problem is None:
                found.append(MonitorPart(int(rank[1]), int(steps[1]), int(steps[2]), path))
            else:
                problems.append(f"{path.relative_to(root)} {problem}")
    return sorted(found)


def steps_of(part: MonitorPart) -> list[int]:
    """The steps that a file really has.

    Example::

        steps_of(find_monitor(root, [])[0])     # [0, 1, 2]
    """
    column = pq.read_table(part.path, columns=["step"]).column("step")
    return sorted(int(step) for step in column.unique().to_pylist())
