"""Name patterns: part of a canonical name, or a regular expression between slashes.

Validated when the probe file is read, so that a pattern which does not compile or could never match is refused before
the job starts; applied by the features and by the analysis through ``name_matcher``.
"""

import re
import warnings
from collections.abc import Callable

from msprobe_megatron.config.document import Node
from msprobe_megatron.config.keys import ValueType, list_of

ACCEPTED = "part of a name, or a regular expression between slashes such as /layers\\.[0-3]\\./"


def name_matcher(pattern: str) -> Callable[[str], bool]:
    r"""A predicate on names: ``/regex/`` is searched for, anything else is a substring.

    Example::

        >>> matches = name_matcher(r"/layers\.[0-3]\./")
        >>> matches("decoder.layers.2.mlp"), matches("decoder.layers.12.mlp")
        (True, False)
        >>> name_matcher("mlp")("decoder.layers.12.mlp")
        True
    """
    if is_expression(pattern):
        search = re.compile(pattern[1:-1]).search
        return lambda name: search(name) is not None
    return lambda name: pattern in name


def is_expression(pattern: str) -> bool:
    """Whether a pattern is a regular expression between slashes."""
    return len(pattern) > len("//") and pattern.startswith("/") and pattern.endswith("/")


def parse_name_pattern(node: Node) -> str:
    """Read one pattern."""
    text = node.text(ACCEPTED)
    # No name begins or ends with a slash, so an expression that is not closed would silently match nothing.
    if text.startswith("/") != text.endswith("/") or not text.strip("/"):
        raise node.error("is not closed between two slashes", ACCEPTED)
    if is_expression(text):
        try:
            with warnings.catch_warnings():
                # Python warns of character sets whose meaning may change one day; that is no fault of the file.
                warnings.simplefilter("ignore")
                re.compile(text[1:-1])
        except (re.error, OverflowError, RecursionError) as error:
            raise node.error(f"does not compile ({error})", ACCEPTED) from None
    return text


NAME_PATTERN = ValueType(parse_name_pattern, {"type": "string", "minLength": 1})
NAME_PATTERNS = list_of(NAME_PATTERN, f"a list; each item {ACCEPTED}")
