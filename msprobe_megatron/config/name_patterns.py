"""Items of a ``list``: part of a canonical name, or a regular expression between slashes.

The probes apply them; here an item that could never match, or does not compile, is refused at start.
"""

import re
import warnings

from msprobe_megatron.config.node import Node

ACCEPTED = "part of a name, or a regular expression between slashes such as /layers\\.[0-3]\\./"


def parse_name_list(node: Node) -> tuple[str, ...]:
    """Read a list of name patterns; every regular expression must compile.

    Example: ``[mlp, /layers.[0-3]/]``.
    """
    return tuple(parse_name_pattern(item) for item in node.items(f"a list; each item {ACCEPTED}"))


def parse_name_pattern(node: Node) -> str:
    """Read one name pattern.

    Example: ``/layers.[0-3]/``.
    """
    text = node.text(ACCEPTED)
    # No name holds a slash, so an expression that is not closed would match nothing, silently.
    if text.startswith("/") != text.endswith("/") or not text.strip("/"):
        raise node.error("is not closed between two slashes", ACCEPTED)
    if text.startswith("/"):
        try:
            with warnings.catch_warnings():
                # Python warns of sets it may read otherwise one day; that is no fault of the file.
                warnings.simplefilter("ignore")
                re.compile(text[1:-1])
        except (re.error, OverflowError, RecursionError) as error:
            raise node.error(f"does not compile ({error})", ACCEPTED) from None
    return text
