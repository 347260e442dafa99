"""Takes out of a script's arguments what makes Megatron, ModelLink or MindSpeed-LLM write a checkpoint.

A job that was shortened or shrunk would else save at its end, over the recipe's own checkpoints. Whoever only has a
recipe's text (``--emit``) puts `FLAG` behind the recipe's arguments, and `msprobe_megatron.run` calls this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msprobe_megatron.config.document import ConfigError

FLAG = "--msprobe-no-save"
_WRITES = "it writes into --save"
_AT_EXIT = "it saves when the job is stopped, with --save or without"
_CONVERTS = "it converts the checkpoint and trains nothing"
# Flag -> why it goes with --save: without one it fails, or (the conversions) writes all the same. Megatron before 0.9,
# ModelLink and MindSpeed-LLM save at an exit without looking for --save. All else (--save-interval, --async-save,
# --non-persistent-*, --exit-interval) does nothing without --save in any release from 0.6 on.
GONE = {
    "save": "this job saves no checkpoint",
    **dict.fromkeys(("save-params-interval", "save-activations-interval", "save-tokens-per-expert-interval"), _WRITES),
    **dict.fromkeys(("save-wgrads-interval", "save-dgrads-interval", "log-progress"), _WRITES),
    **dict.fromkeys(("enable-ft-package", "calc-ft-timeouts", "ft-num-warmup-iters"), _WRITES),
    **dict.fromkeys(("exit-signal-handler", "exit-duration-in-mins"), _AT_EXIT),
    **dict.fromkeys(("ckpt-convert-format", "ckpt-convert-save"), _CONVERTS),
    "ckpt-convert-update-legacy-dist-opt-format": _CONVERTS,
    "enable-mg2hf-convert": "it converts what was saved",
}
# MindSpeed-LLM: weights of Hugging Face in --load ask for both conversions, unless one of them is named.
_CONVERSION = "mindspeed_llm/features_manager/convert_checkpoint/convert_checkpoint.py"
_FOREIGN = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Taken:
    """A flag that was taken out, with its value as it stood there, and why."""

    name: str
    value: str
    reason: str


def refuse_hidden(words: Sequence[str]) -> None:
    """Raise `ConfigError` for a job whose flags are not on its command line, and for one that exists to save."""
    names = {word.partition("=")[0] for word in words}
    if "--yaml-cfg" in names:
        raise ConfigError(
            "--yaml-cfg: Megatron reads every argument from that file, --save and --train-iters too, and none from the"
            " command line; accepted: --config FILE without --overlay or --rehearse, or flags instead of --yaml-cfg"
        )


def without_save(words: Sequence[str], folder: Path) -> tuple[list[str], list[Taken]]:
    """The words of a script's arguments less those that save, and what was taken out; `folder` is the script's.

    What follows `FLAG` is kept: an overlay may name a directory of its own.
    """
    end = words.index(FLAG) if FLAG in words else len(words)
    refuse_hidden(words)
    if any(word == "--moe-use-upcycling" for word in words[:end]):
        raise ConfigError(
            "--moe-use-upcycling: the job would write the checkpoint it makes into --save; accepted: --keep-save, or a"
            " recipe without it"
        )
    groups: list[list[str]] = []
    for word in words[:end]:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    given = {group[0].partition("=")[0] for group in groups}
    reasons = dict(GONE)
    if "--wandb-save-dir" not in given:
        reasons["wandb-project"] = _WRITES
    kept: list[str] = []
    taken: list[Taken] = []
    for first, *rest in groups:
        name, _, value = first.removeprefix("--").partition("=")
        if first.startswith("--") and name in reasons:
            taken.append(Taken(name, " ".join([*([value] if value else []), *rest]), reasons[name]))
        else:
            kept += [first, *rest]
    if "--enable-hf2mg-convert" not in given and _converts_by_itself(kept, folder):
        kept.append("--enable-hf2mg-convert")
    return [*kept, *words[end + 1 :]], taken


def _converts_by_itself(words: Sequence[str], folder: Path) -> bool:
    """Whether MindSpeed-LLM would ask for a --save of its own accord."""
    source = folder / _CONVERSION
    if not source.is_file() or "enable-mg2hf-convert" not in source.read_text(encoding="utf-8", errors="replace"):
        return False
    pairs = zip(words, [*words[1:], ""], strict=True)
    loads = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == "--load"]
    return bool(loads) and any(found for pattern in _FOREIGN for found in Path(loads[-1]).glob(pattern))
