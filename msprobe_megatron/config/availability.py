"""What may be written in a probe file but is not in this release yet.

Validation knows the whole grammar; this table says which of it is still refused, by name, instead of being
accepted and never happening. Adding a feature deletes its lines here.
"""

from typing import Any

from msprobe_megatron.config.errors import shown
from msprobe_megatron.config.node import Context
from msprobe_megatron.config.schema import ProbeConfig

# Key path, or key path=value -> why, and what is accepted. A path alone is refused whenever it asks for
# something: a section that is there, a list that is not empty, a number above 0, anything but false.
NOT_YET: dict[str, str] = {}


def refuse_unavailable(config: ProbeConfig, context: Context) -> None:
    """Raise ``ConfigError`` for the first thing asked that this release does not do; name the others.

    Example: with ``dump.level=debug`` in the table, ``dump: {level: debug}`` is refused with ``dump.level: 'debug' is
    not available in this release: …``.
    """
    refused = [(entry, path, value) for entry in NOT_YET for path, value in _asked(config, entry)]
    if not refused:
        return
    entry, path, value = refused[0]
    rest = ", ".join(dict.fromkeys(context.original(other) for _, other, _ in refused[1:]))
    also = f" (also: {rest})" if rest else ""
    what = f"{shown(list(value) if isinstance(value, tuple) else value)} is " if "." in path else ""
    raise context.error(path, f"{what}not available in this release{also}: {NOT_YET[entry]}")


def _asked(config: ProbeConfig, entry: str) -> list[tuple[str, Any]]:
    path, _, wanted = entry.partition("=")
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return [(path, value)] if (value == wanted if wanted else value) else []
