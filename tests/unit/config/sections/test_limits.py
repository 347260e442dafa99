"""Sizes in bytes, exactly."""

import pytest

from msprobe_megatron.config import ConfigError, format_size
from msprobe_megatron.config.document import Context, Node
from msprobe_megatron.config.sections.limits import parse_size


def size(value):
    return parse_size(Node(value, "limits.disk", Context("probe.yaml")))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("1024B", 1024),
        ("2GiB", 2 * 1024**3),
        ("2 GiB", 2 * 1024**3),
        ("500MB", 500_000_000),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1.5MiB", 1024 * 1024 * 3 // 2),
        ("0.1TB", 10**11),
        ("3TiB", 3 * 1024**4),
        (" 7MB ", 7_000_000),
    ],
)
def test_accepted(value, expected):
    assert size(value) == expected


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0, "0 is out of range"),
        (-5, "-5 is out of range"),
        (2**63, "out of range"),
        ("0GiB", "'0GiB' is out of range"),
        ("0.1B", "'0.1B' is out of range"),
        ("999999999TiB", "out of range"),
        ("-1GiB", "is not a size"),
        ("GiB", "is not a size"),
        ("1e3MB", "is not a size"),
        ("2 2GiB", "is not a size"),
        ("9" * 40, "is not a size"),
        ("٣GiB", "is not a size"),
        ("", "is not a size"),
        ("2gib", "no known unit (gib)"),
        ("2G", "no known unit (G)"),
        (True, "true is not a size"),
        (1.5, "1.5 is not a size"),
        (None, "null is not a size"),
        ([1], "[1] is not a size"),
    ],
)
def test_refused(value, problem):
    with pytest.raises(ConfigError) as caught:
        size(value)
    message = str(caught.value)
    assert message.startswith("probe.yaml: limits.disk: ")
    assert problem in message
    assert "accepted: a size above 0 such as 2GiB, 500MB or 1024 (bytes)" in message


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (2**31, "2GiB"),
        (500_000_000, "476.8MiB"),
        (1, "1B"),
        (1023, "1023B"),
        (1536, "1.5KiB"),
        (5 * 2**40, "5TiB"),
    ],
)
def test_written_back(number, text):
    assert format_size(number) == text
