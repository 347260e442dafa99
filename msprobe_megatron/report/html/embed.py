"""Putting data into a page so that it stays data: whatever a module is called, it cannot end a script element."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from typing import Any

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded_json(value: Any) -> str:
    r"""JSON that may stand inside a script element; NaN and infinities become null.

    Example::

        >>> embedded_json({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    # Lone surrogates of undecodable file names cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def policy(scripts: str, styles: str) -> str:
    """Content security policy of a page: it loads nothing, and runs this script and no other.

    Example::

        policy("let x = 1;", "body {}")
    """
    return f"default-src 'none'; img-src data:; script-src {_hash(scripts)}; style-src {_hash(styles)}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
