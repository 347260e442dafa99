"""Rewrites the command line of torch's launcher so that the script runs through `msprobe_megatron.run`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass

RUN = "msprobe_megatron.run"
# Options of torchrun and torch.distributed.launch, with hyphens.
_SWITCHES = frozenset({"-m", "--module", "--no-python", "--run-path", "--use-env", "--standalone"})
_VALUED = frozenset(
    {
        *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--local-addr"),
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval"),
        *("--start-method", "--role", "--log-dir", "-r", "--redirects", "-t", "--tee", "--local-ranks-filter"),
    }
)


@dataclass(frozen=True)
class Launch:
    """A launcher's command line in three parts: its own options, the script (or module), the script's arguments."""

    options: tuple[str, ...]
    target: str
    arguments: tuple[str, ...]
    is_module: bool = False
    is_python: bool = True

    @property
    def script(self) -> str:
        """File name of the script, for matching."""
        return os.path.basename(self.target)

    def words(self, appended: Sequence[str] = ()) -> list[str]:
        """The command line that runs the same script under the kit."""
        if not self.is_python or self.target == RUN:
            return [*self.options, self.target, *self.arguments, *appended]
        # With -m among its options the launcher already takes a module; else it is told to.
        route = [RUN, "-m"] if self.is_module else ["-m", RUN]
        return [*self.options, *route, self.target, *self.arguments, *appended]


class LaunchError(Exception):
    """The launcher's own command line cannot be read."""


def read(words: Sequence[str]) -> Launch:
    """Take a command line apart; one with an option that is not in the tables above is left to the launcher's
    parser.
    """
    return _read_known(words) or _read_with_torch(words)


def _read_known(words: Sequence[str]) -> Launch | None:
    """The same without importing torch, which takes seconds."""
    given: set[str] = set()
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option, _, value = words[at].partition("=")
        option = option.replace("_", "-")
        if option in _SWITCHES:
            at += 1
        elif option in _VALUED:
            at += 1 if value else 2
        else:
            return None
        given.add(option)
    if at >= len(words):
        return None
    is_module = bool(given & {"-m", "--module"})
    return Launch(
        tuple(words[:at]), words[at], tuple(words[at + 1 :]), is_module, not given & {"--no-python", "--run-path"}
    )


def _read_with_torch(words: Sequence[str]) -> Launch:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    # Known to torch.distributed.launch only.
    parser.add_argument("--use-env", "--use_env", action="store_true")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            known = parser.parse_args(list(words))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        lines = complaint.getvalue().strip().splitlines()
        raise LaunchError(lines[-1] if lines else "the launcher's arguments cannot be read") from None
    rest = list(known.training_script_args)
    at = len(words) - len(rest) - 1
    if known.training_script != words[at]:
        raise LaunchError(f"the script was not found in: {' '.join(words)}")
    return Launch(tuple(words[:at]), words[at], tuple(words[at + 1 :]), known.module, not known.no_python)
