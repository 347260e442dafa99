"""Name patterns: a substring, or a regular expression between slashes; the same for every feature."""

import pytest

from msprobe_megatron.config import ConfigError
from msprobe_megatron.config.document import Context, Node
from msprobe_megatron.config.name_patterns import is_expression, name_matcher, parse_name_pattern

NAME = "decoder.layers.12.mlp.linear_fc1"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("mlp", True),
        ("layers.12.", True),
        ("layers.1.", False),
        ("MLP", False),
        ("mlp*", False),
        (r"/layers\.[0-3]\./", False),
        (r"/layers\.1[0-3]\./", True),
        ("/^mlp/", False),
        ("/fc1$/", True),
    ],
)
def test_matches(pattern, matches):
    assert name_matcher(pattern)(NAME) is matches


def test_only_two_slashes_with_something_between_are_an_expression():
    assert is_expression("/a/")
    assert not any(map(is_expression, ("a/b", "/a", "a/", "/", "//")))
    assert name_matcher("mlp/matmul")("decoder.mlp/matmul.0")


@pytest.mark.parametrize("pattern", ["/a", "a/", "/", "//", "/(/", ""])
def test_refused(pattern):
    with pytest.raises(ConfigError, match="^probe.yaml: list: .*; accepted: part of a name"):
        parse_name_pattern(Node(pattern, "list", Context("probe.yaml")))
