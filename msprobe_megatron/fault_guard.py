"""What stands between a fault of the kit and the training code: the guard around the session's own methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


class ProbeFault(Exception):
    """A fault of the kit under `strict: true`; without it training never sees one."""


def guarded(method: _Method) -> _Method:
    """A fault inside `method` disarms the session instead of reaching the training code."""

    @functools.wraps(method)
    def guard(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except ProbeFault:
            raise
        except Exception as error:
            self.fault(error, method.__name__)
            return None

    return guard  # type: ignore[return-value]
