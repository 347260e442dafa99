"""Says what an overlay changes in a recipe's job, a line for each flag and variable, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msprobe_megatron.config.save_flags import Taken
from msprobe_megatron.hosts.launching.flags import flags_of
from msprobe_megatron.hosts.launching.overlays import Overlay, start_of, value_of

KEEP = "--keep-save or MSPROBE_KEEP_SAVE=1"
# Directories of the real job that a cut one still writes to.
_LEFT = {"tensorboard-dir": "its curves", "wandb-save-dir": "its W&B run"}


def changes(
    overlay: Overlay,
    recipe: Sequence[str],
    added: Sequence[str],
    taken: Sequence[Taken],
    environment: Mapping[str, str],
) -> list[str]:
    """One sentence per flag that is added to a recipe or taken out of it; `environment` is the job's."""
    found = []
    for flag in flags_of(added):
        old, new = value_of(flag.name, recipe), " ".join(flag.values) or True
        if old != new:
            found.append(f"--{flag.name} {_shown(old)} -> {_shown(new)}")
    for gone in taken:
        keep = f"; to leave it: {KEEP}" if gone.name == "save" else ""
        found.append(f"--{gone.name} {gone.value or 'given'} -> not given ({gone.reason}{keep})")
    for name, value in overlay.environment.items():
        if environment.get(name) != value:
            found.append(f"{name} {environment.get(name) or 'not set'} -> {value} (environment)")
    return [f"overlay {overlay.name} changes: {change}" for change in found or ["nothing"]]


def remarks(overlay: Overlay, recipe: Sequence[str], added: Sequence[str], keeps: bool) -> list[str]:
    """What a job that the overlay cuts still does with the real job's directories, a sentence each."""
    found = []
    saves = value_of("save", recipe)
    if keeps and isinstance(saves, str):
        found.append(f"--save {saves}, as was asked for: what this job saves becomes the newest checkpoint there")
    for name, what in _LEFT.items():
        value = value_of(name, recipe)
        if isinstance(value, str):
            found.append(f"--{name} {value}: {what} go there, beside the real job's")
    found = [f"overlay {overlay.name} leaves: {sentence}" for sentence in found]
    start, last, load = start_of(recipe), value_of("train-iters", added), value_of("load", recipe)
    if start and isinstance(last, str) and last.isdecimal():
        whole = value_of("train-iters", recipe)
        found.append(
            f"overlay {overlay.name}: --load {load} is at iteration {start}: the job goes on from there to {last}"
        )
        if isinstance(whole, str) and whole.isdecimal() and int(whole) < int(last):
            found[-1] += f", beyond the recipe's own {whole}"
    elif start and isinstance(value_of("train-samples", added), str):
        found.append(
            f"overlay {overlay.name}: --load {load} is at iteration {start}, with --rampup-batch-size at a sample that"
            " is not known: the job may train nothing; accepted: --finetune, or an overlay with train-samples"
            if value_of("rampup-batch-size", recipe)
            else f"overlay {overlay.name}: --load {load} is at iteration {start}: the job goes on from there"
        )
    return found


def _shown(value: str | bool) -> str:
    if isinstance(value, bool):
        return "given" if value else "not given"
    return value
