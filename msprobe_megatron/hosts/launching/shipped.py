"""Where the files that come with the kit lie: beside the package in a checkout, inside it when a wheel is installed."""

from __future__ import annotations

from pathlib import Path

from msprobe_megatron.config.document import ConfigError

_PACKAGE = Path(__file__).resolve().parents[2]


def shipped(name: str) -> Path:
    """The folder ``scripts`` or ``docs``."""
    places = (_PACKAGE / name, _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{places[0]}: is missing; accepted: an installation of the whole wheel, or a checkout")


def recipes() -> Path:
    """The folder of the overlays, HOST/MODEL.yaml."""
    return shipped("scripts") / "recipes"


def shims() -> Path:
    """The folder whose `torchrun` and `python` stand in for the real ones on PATH."""
    return shipped("scripts") / "shims"
