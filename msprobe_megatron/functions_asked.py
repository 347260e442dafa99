"""Functions that the probe file names are seen as API calls, under their own names, while a step is recorded.

They become patches like any other: bound when a recorded step begins, in every module that imported them by name, and
put back when it is over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from msprobe_megatron.patching import Patch, Wrap


def declared_functions(targets: Iterable[str]) -> list[Patch]:
    """The patches for functions named ``module:function`` or ``module:Class.method``.

    Example::

        PatchSet(declared_functions(["mypackage.ops:fused_gelu"]), api_site)
    """
    why = "named in dump.functions"
    return [Patch(f"functions.{t}", (t,), _seen_as(t), phase="functions_asked", why=why, sweep=True) for t in targets]


def missing(patch: Patch) -> str | None:
    """Why the target of a patch cannot be found; None if it can. Imports the module if nobody has."""
    module_name, _, path = patch.targets[0].partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        return f"cannot be imported: {error}; accepted: module:function"
    for name in path.split("."):
        if not hasattr(owner, name):
            return f"{getattr(owner, '__name__', module_name)} has no {name}; accepted: module:function"
        owner = getattr(owner, name)
    return None if callable(owner) else f"is a {type(owner).__name__}, not a function; accepted: module:function"


def _seen_as(target: str) -> Wrap:
    name = target.replace(":", ".")

    def wrap(original: Callable[..., Any], site: Any) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return site.called(name, original, args, kwargs)

        return function

    return wrap
