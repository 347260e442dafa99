"""Nothing that steers a terminal or turns the direction of writing gets through; everything else does."""

import unicodedata

import pytest

from msprobe_megatron.report.terminal.tables import harmless


def test_controls_are_shown_as_dots_and_the_end_of_a_line_stays():
    steering = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")]
    steering.remove("\n")
    assert harmless("".join(steering)) == "·" * len(steering) == "·" * 66
    assert harmless("two\nlines") == "two\nlines"


@pytest.mark.parametrize("bidi", ["LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"])
def test_the_direction_of_writing_cannot_be_turned(bidi):
    turning = [chr(code) for code in range(0x3000) if unicodedata.bidirectional(chr(code)) == bidi]
    assert turning and all(harmless(f"a{c}b") == "a·b" for c in turning)
    assert harmless("\u200e\u200f") == "··", "marks of a direction"


def test_what_does_not_steer_stays():
    text = "decoder.layers.0 → µs ≤ 1 · ² é 漢字 🙂 [/bold]"
    assert harmless(text) == text
