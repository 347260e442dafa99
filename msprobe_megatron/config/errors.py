"""The one exception of the probe file, and how a value at fault is shown in it.

Everything under ``config`` and ``arguments`` speaks to the user through ``ConfigError``: one line that names
the file, the key, the value and what is accepted, so that a launcher with a thousand ranks prints something
readable.
"""

import re

_PLAIN_KEY = re.compile(r"[\w.\[\]/-]+")
_SHOWN_CHARACTERS = 60


class ConfigError(Exception):
    """What is wrong with a probe file or a flag; ``str(error)`` is the one line the user sees.

    Example::

        try:
            config = load("probe.yaml")
        except ConfigError as error:
            sys.exit(str(error))   # probe.yaml: dump.level: 'L9' is not known; accepted: L0, L1, mix, debug
    """

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.splitlines()))


def shown(value: object) -> str:
    """Return ``value`` as it appears in a message: its repr, cut in the middle when long.

    Example: ``shown("x" * 100)`` ends in ``…xxxx'`` and is about sixty characters long.
    """
    # YAML's words, not Python's, because that is what the user wrote.
    text = ("null" if value is None else str(value).lower()) if isinstance(value, bool | None) else repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:40]}…{text[-16:]}"


def shown_key(key: str) -> str:
    """Return a key path for a message; one with spaces or control characters is quoted.

    Example: ``shown_key("dump.level") == "dump.level"``.
    """
    return key if _PLAIN_KEY.fullmatch(key) and len(key) <= 200 else shown(key)
