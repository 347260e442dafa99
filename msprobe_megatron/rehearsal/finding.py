"""Offers the stand-ins to this process, behind everything that is really installed.

They are files of the package, but on no path: only a process that calls `offer` can import them by their names, and
what the environment has itself is found first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType

STAND_INS = Path(__file__).parent / "stand_ins"
ASCEND, NVIDIA = STAND_INS / "ascend", STAND_INS / "nvidia"


class _Last(DistributionFinder):
    """The finder that is asked when no other has found a top-level name."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [str(folder) for folder in folders]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, self.folders, target) if path is None else None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  (the interface's own)
    ) -> Iterable[Distribution]:
        # Old Megatron asks for TransformerEngine's version.
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=context.name, path=self.folders))


def offer(*folders: Path) -> None:
    """Make the packages in these folders importable where nothing else of their name is.

    Example::

        offer(ASCEND)
        import torch_npu      # the real one where it is installed
    """
    sys.meta_path.append(_Last(folders))


def needed_by(folder: Path) -> list[Path]:
    """Which stand-ins the host in `folder` asks for: those of the NPU always, Apex and TransformerEngine with reason.

    Megatron before 0.8 imports both unconditionally, and MindSpeed expects Ascend's builds of them. A newer Megatron
    looks whether they are there, and would then build on parts that a stand-in does not have.
    """
    ascend = any((folder / name).is_dir() for name in ("modellink", "mindspeed_llm"))
    return [ASCEND, NVIDIA] if ascend or _before_0_8(folder) else [ASCEND]


def _before_0_8(folder: Path) -> bool:
    try:
        text = (folder / "megatron/core/package_info.py").read_text(encoding="utf-8")
    except OSError:
        return False
    numbers = dict(line.split(" = ") for line in text.splitlines() if line.startswith(("MAJOR = ", "MINOR = ")))
    return (int(numbers.get("MAJOR", 0)), int(numbers.get("MINOR", 8))) < (0, 8)
