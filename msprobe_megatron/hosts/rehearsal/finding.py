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
NPU = ("torch_npu", "torchair", "acl")
APEX = ("apex", "amp_C")
TRANSFORMER_ENGINE = ("transformer_engine",)


class _Last(DistributionFinder):
    """The finder that is asked when no other has found a top-level name."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None or fullname not in self.names:
            return None
        return PathFinder.find_spec(fullname, [str(STAND_INS)], target)

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  (the interface's own)
    ) -> Iterable[Distribution]:
        # Old Megatron asks for TransformerEngine's version.
        asked = DistributionFinder.Context(name=context.name, path=[str(STAND_INS)])
        found = MetadataPathFinder.find_distributions(asked)
        return [each for each in found if each.metadata["Name"].replace("-", "_") in self.names]


def offer(names: Sequence[str]) -> None:
    """Make the stand-ins of these names importable where nothing else of the name is."""
    sys.meta_path.append(_Last(names))


def needed_by(folder: Path) -> tuple[str, ...]:
    """Which stand-ins the host in `folder` asks for: those of the NPU always, the others with reason.

    Megatron before 0.8 imports Apex and TransformerEngine unconditionally, and MindSpeed brings what it needs of the
    latter. A newer Megatron looks whether they are there, and would then build on parts that a stand-in does not have.
    """
    old = _before_0_8(folder)
    ascend = any((folder / name).is_dir() for name in ("modellink", "mindspeed_llm"))
    return (*NPU, *(APEX if old or ascend else ()), *(TRANSFORMER_ENGINE if old else ()))


def _before_0_8(folder: Path) -> bool:
    try:
        text = (folder / "megatron/core/package_info.py").read_text(encoding="utf-8")
    except OSError:
        return False
    numbers = dict(line.split(" = ") for line in text.splitlines() if line.startswith(("MAJOR = ", "MINOR = ")))
    return (int(numbers.get("MAJOR", 0)), int(numbers.get("MINOR", 8))) < (0, 8)
