"""Which host's checkout a recipe lies in, and which overlays are for that host."""

from __future__ import annotations

from pathlib import Path

from msprobe_megatron.hosts.launching.overlays import Overlay, all_overlays
from msprobe_megatron.hosts.rehearsal.tables import HOSTS

# Package of a checkout -> folder of its overlays.
_OVERLAYS = {"modellink": "modellink", "mindspeed_llm": "mindspeed_llm", "megatron": "megatron_lm"}
# MindSpeed-LLM before 2.2 lacks it, and takes ModelLink's flags.
_SINCE_2_2 = "mindspeed_llm/features_manager/arguments/deprecated_args.py"


def overlay_folder(recipe: Path) -> str | None:
    """Folder of the overlays for the checkout that a recipe is started in, or lies in; None where it is none."""
    for folder in (Path.cwd(), *recipe.resolve().parents):
        host = next((name for name in HOSTS if (folder / name).is_dir()), None)
        if host == "mindspeed_llm" and not (folder / _SINCE_2_2).is_file():
            return _OVERLAYS["modellink"]
        if host is not None:
            return _OVERLAYS[host]
    return None


def overlays_for(recipe: Path, root: Path) -> list[Overlay]:
    """The overlays below `root` that fit a recipe, of its own host where that is known."""
    folder = overlay_folder(recipe)
    fitting = [overlay for overlay in all_overlays(root) if overlay.matches(str(recipe))]
    return [overlay for overlay in fitting if folder is None or overlay.name.startswith(f"{folder}/")]
