"""Run a training script under the kit without editing it.

    torchrun ... -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config probe.yaml

Without `--msprobe-config` the script runs as if it had been started directly.
"""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = """usage: python -m msprobe_megatron.run SCRIPT.py [arguments of the script] --msprobe-config FILE
       python -m msprobe_megatron.run -m MODULE [arguments of the module] --msprobe-config FILE

example: torchrun --nproc_per_node 8 -m msprobe_megatron.run pretrain_gpt.py ... --msprobe-config probe.yaml
"""


def split(argv: list[str]) -> tuple[bool, str, list[str]] | None:
    """(is a module, script or module, its arguments); None if no script is given.

    `torch.distributed.launch` puts `--local-rank=N` before the script: options before it belong to the script.

    Example::

        >>> split(["--local-rank=0", "pretrain_gpt.py", "--lr", "1"])
        (False, 'pretrain_gpt.py', ['--local-rank=0', '--lr', '1'])
    """
    for index, word in enumerate(argv):
        if word == "-m" and index + 1 < len(argv):
            return True, argv[index + 1], [*argv[:index], *argv[index + 2 :]]
        if not word.startswith("-"):
            return False, word, [*argv[:index], *argv[index + 1 :]]
    return None


def requested(argv: list[str]) -> bool:
    """Whether the kit is needed: for any `--msprobe-*` flag, $MSPROBE_CONFIG, and `--help`, which lists the flags.

    Example::

        >>> requested(["--lr", "0.1", "--msprobe-config=probe.yaml"])
        True
    """
    if os.environ.get("MSPROBE_CONFIG"):
        return True
    return any(word.startswith("--msprobe-") or word in ("-h", "--help") for word in argv)


def _without_save(words: list[str], folder: str) -> list[str]:
    """What a copy of a recipe asks for that `--emit` has shortened: its words stand only here."""
    from pathlib import Path

    from msprobe_megatron.config.document import ConfigError
    from msprobe_megatron.config.save_flags import without_save

    try:
        return without_save(words, Path(folder))[0]
    except ConfigError as error:
        print(f"msprobe: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``python -m msprobe_megatron.run``."""
    found = split(sys.argv[1:] if argv is None else argv)
    if found is None:
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)
    is_module, target, rest = found
    if not is_module and not os.path.isfile(target):
        print(f"msprobe: no such script: {target}\n{_USAGE}", file=sys.stderr)
        raise SystemExit(2)
    if "--msprobe-no-save" in rest:
        rest = _without_save(rest, "." if is_module else os.path.dirname(os.path.abspath(target)))
    sys.argv = [target, *rest]
    if requested(rest):
        from msprobe_megatron.job.session.arming import arm

        arm()
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
