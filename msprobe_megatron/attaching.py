"""`attach`: arms a model that exists already; what every integration and the launch path end up calling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from msprobe_megatron.arguments import Flags, from_command_line
from msprobe_megatron.config import ProbeConfig, load
from msprobe_megatron.session import Session
from msprobe_megatron.topology import coordinates, names

_ATTACHED: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any = None,
    config: ProbeConfig | Flags | str | Path | None = None,
    *,
    tag: str | None = None,
    step: int | Callable[[], int] | None = None,
    groups: Any = None,
    arguments: Any = None,
) -> Session:
    """Arm a model (one module or Megatron's list of chunks) and its outermost optimizer. Communicates with nobody.

    `tag` names a sub-directory of the output: each of several models in a process has its own. `step` is the number
    of the first step, or a function that tells the coming step; by default Megatron's own iteration, else a
    counter. `groups` tells the process groups where they are not Megatron's global ones: a table or an object with
    any of tp, pp, dp, cp, ep. Raises `ConfigError` if the probe file does not fit the job.

    Example::

        session = attach(model_chunks, optimizer, "probe.yaml")
    """
    if config is None:
        config = from_command_line()
    if isinstance(config, Flags):
        config = config.load_config()
    elif not isinstance(config, ProbeConfig):
        config = load(config)
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    # A script that attaches by itself and is started through `msprobe_megatron.run` is attached already.
    known = _ATTACHED.get(names.unwrap(chunks[0])) if chunks else None
    if known is not None and not known.closed and known.directory.path.resolve() == _output(config, tag).resolve():
        return known
    changes = _reproduced(chunks, optimizer, config, groups)
    session = Session(chunks, optimizer, config, tag=tag, step=step, groups=groups, arguments=arguments)
    for text in changes:
        session.voice.tell(f"reproduce: {text}")
    if chunks:
        _ATTACHED[names.unwrap(chunks[0])] = session
    return session


def _reproduced(chunks: Sequence[nn.Module], optimizer: Any, config: ProbeConfig, groups: Any) -> list[str]:
    """What was changed before anything is watched; nothing unless the probe file asks for it."""
    if config.reproduce is None:
        return []
    from msprobe_megatron.reproducing import reproduce

    where = coordinates.current() if groups is None else coordinates.from_groups(groups)
    return reproduce(chunks, optimizer, config.reproduce, where, config.source)


def _output(config: ProbeConfig, tag: str | None) -> Path:
    return Path(config.output) / tag if tag else Path(config.output)
