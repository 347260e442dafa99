"""A script's arguments as flags with their values, whatever words a shell made of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][+-]?\d+)?|-\.\d+")
# What recipes have where their user shall put something.
_PLACEHOLDER = re.compile(r"(your|please)\b.*|.*<[^>]*>.*|/path/to\b.*", re.IGNORECASE)


@dataclass(frozen=True)
class Flag:
    """A flag without its dashes and the words up to the next one; no name: words before the first flag."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """As they stand on a command line."""
        return [*([f"--{self.name}"] if self.name else []), *self.values]

    @property
    def is_placeholder(self) -> bool:
        """Whether nobody has filled the value in, as in ``--load your model ckpt path``."""
        return bool(self.values) and _PLACEHOLDER.fullmatch(" ".join(self.values)) is not None


def flags_of(words: Sequence[str]) -> list[Flag]:
    """Take a command line apart; words that follow a flag and are none are its values, however many."""
    found: list[Flag] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            found.append(Flag(name, (value,) if equals else ()))
        elif word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
            # A short option: not Megatron's, left as it is.
            found.append(Flag("", (word,)))
        elif found:
            found[-1] = Flag(found[-1].name, (*found[-1].values, word))
        else:
            found.append(Flag("", (word,)))
    return found


def number_of(flags: Iterable[Flag], name: str) -> int | None:
    """The number a flag was given last; None where it was not, or is no whole number."""
    found = None
    for flag in flags:
        if flag.name == name and flag.values and flag.values[-1].isdecimal():
            found = int(flag.values[-1])
    return found
