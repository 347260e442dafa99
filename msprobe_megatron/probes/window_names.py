"""Whether the two names of ``dump.scope`` can be a window, as far as that is known before training."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_megatron.config import ConfigError
from msprobe_megatron.topology.layers import layer_of


def check_window(level: str, first: str, last: str, names: Sequence[str], source: str, alone: bool) -> None:
    """Raise ``ConfigError`` for names that no module here has, or that stand in the wrong order.

    `names` are those of the modules of this rank in the order of definition; `alone` says that no other stage can have
    more. Of an API call only the module is known.

    Example::

        check_window("L0", "decoder.layers.2", "decoder.layers.0", names, "probe.yaml", alone=True)     # raises
    """
    modules = []
    for name in (first, last):
        module, slash, _ = name.partition("/")
        if level == "L0" and slash:
            raise ConfigError(f"{source}: dump.scope: {name!r} is an API call; level is L0; accepted: L1, mix")
        if level == "L1" and not slash:
            raise ConfigError(
                f"{source}: dump.scope: {name!r} is a module; level is L1; accepted: a call such as"
                " decoder.layers.0.mlp/torch.nn.functional.silu.0, or level mix"
            )
        if alone and module not in names and module != "outside":
            raise ConfigError(
                f"{source}: dump.scope: {module!r} is no module; accepted: a canonical name such as"
                f" {', '.join(names[:6])}"
            )
        modules.append(module)
    before, after = modules
    backwards = (
        names.index(after) < names.index(before)
        if before in names and after in names
        else (layer_of(after) or 0) < (layer_of(before) or 0) and layer_of(after) is not None
    )
    # What holds the first name ends after it, though it is defined before it.
    if backwards and after != "model" and not before.startswith(f"{after}."):
        raise ConfigError(f"{source}: dump.scope: {last!r} comes before {first!r}; accepted: [first, last] in order")
