"""The HTML page: the data of `analysis.page` as one JSON block, with the styles and scripts that show it.

Formats only; nothing is computed here. The page needs no network and no server; its scripts are the files of `assets/`,
one per part of the page, joined in the order below. The data stay data: no name of a module can end a script element.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from importlib.resources import files
from string import Template
from typing import Any

_SCRIPTS = ("base", "charts", "heat", "overview", "where", "when", "who", "findings", "versus", "log", "start")
_STYLES = ("theme", "layout", "parts")


def page(data: dict[str, Any]) -> str:
    """The HTML text of the data that `page_data` made."""
    script = '"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    style = "\n".join(_asset(f"{name}.css") for name in _STYLES)
    return Template(_asset("page.html")).substitute(
        policy=policy(script, style), style=style, script=script, data=embedded_json(data)
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


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
    """Content security policy of a page: it loads nothing, and runs this script and no other."""
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
