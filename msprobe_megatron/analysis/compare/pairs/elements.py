"""Elements: the difference of two tensors, element by element, in pieces that fit into the cache.

The innermost loop of a comparison of saved tensors. Takes views of mapped files, of any dtype and strides, and returns
a few sums. Copies one piece at a time, and only to widen 16-bit numbers or to make strides contiguous. Needs no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Index = tuple[int, ...]

PIECE = 1 << 16
"""Elements per piece: two pieces and their difference fit into the second-level cache."""


@dataclass
class Apart:
    """Sums over the elements of two tensors x and y; `add` is called for each pair of pieces."""

    squares_x: float = 0.0
    squares_y: float = 0.0
    squares: float = 0.0
    """Of the differences."""
    largest: float = 0.0
    largest_at: Index | None = None
    differing: int = 0
    """Elements that are not equal."""
    unlike: int = 0
    """Elements that are NaN or infinite in one tensor and different in the other."""
    numel: int = 0

    @property
    def relative(self) -> float:
        """Norm of the difference over the larger norm."""
        if self.unlike:
            return math.inf
        size = max(self.squares_x, self.squares_y)
        return math.sqrt(self.squares / size) if size else 0.0

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; of two zeros 1."""
        size = math.sqrt(self.squares_x) * math.sqrt(self.squares_y)
        if not size:
            return 1.0 if self.squares == 0 else 0.0
        return max(-1.0, min(1.0, (self.squares_x + self.squares_y - self.squares) / (2 * size)))


@dataclass(frozen=True)
class View:
    """A part of a tensor: its words as they lie in the file, and their dtype as safetensors names it."""

    dtype: str
    words: Array

    def __getitem__(self, where: tuple[slice, ...]) -> View:
        return View(self.dtype, self.words[where] if where else self.words)


def add_views(apart: Apart, x: View, y: View, at: Index, ratio: float = 1.0) -> None:
    """Add two views of one shape, of which the first element is number `at` of the whole; y is multiplied by
    `ratio`.
    """
    bits = x.dtype == y.dtype and ratio == 1.0
    for piece in pieces(x.words.shape):
        left, right = x[piece], y[piece]
        if bits and left.dtype in _FLOATS and _same(left.words, right.words):
            _add_equal(apart, widened(left))
            continue
        start = tuple(first + (cut.start or 0) for first, cut in zip(at, piece, strict=True))
        _add_piece(apart, widened(left), widened(right), ratio, start, left.words.shape)


def pieces(shape: Index) -> Iterator[tuple[slice, ...]]:
    """Slices that cut a shape into pieces of at most `PIECE` elements, in row-major order.

    Example::

        >>> list(pieces((2, 3)))
        [(slice(0, 2, None), slice(0, 3, None))]
    """
    if 0 in shape:
        return
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= PIECE:
        axis -= 1
        inner *= shape[axis]
    whole = tuple(slice(0, size) for size in shape[axis:])
    if axis == 0:
        yield whole
        return
    rows = max(1, PIECE // inner)
    outer = [range(size) for size in shape[: axis - 1]]
    for place in itertools.product(*outer):
        for first in range(0, shape[axis - 1], rows):
            cut = slice(first, min(first + rows, shape[axis - 1]))
            yield (*(slice(i, i + 1) for i in place), cut, *whole)


_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_FP16_UP = np.float32(2.0**112)
_FP16_TOP = 65536.0


def widened(view: View) -> Array:
    """Values of a view as float32, or float64 where float32 cannot hold them; in one dimension and in one piece."""
    words = view.words.reshape(-1)  # copies only what is not in one piece
    return _WIDEN.get(view.dtype, _double)(words)


def _double(words: Array) -> Array:
    return words.astype("<f8")


def _plain(words: Array) -> Array:
    return np.ascontiguousarray(words).view("<f4")


def _from_bf16(words: Array) -> Array:
    wide = words.astype("<u4")
    np.left_shift(wide, 16, out=wide)
    return wide.view("<f4")


def _from_half(words: Array) -> Array:
    """float16 by shifting: NumPy's own conversion is five times slower."""
    wide = words.view("<i2").astype("<i4")
    np.left_shift(wide, 13, out=wide)
    np.bitwise_and(wide, np.int32(-0x70000001), out=wide)  # the sign was spread over three bits
    values = wide.view("<f4")
    values *= _FP16_UP
    if len(values) and max(values.max(), -values.min()) >= _FP16_TOP:  # infinities and NaN would be numbers
        return words.astype("<f4")
    return values


def _e4m3() -> Array:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    values = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    values[(code & 127) == 127] = np.nan
    return np.where(code & 128, -values, values).astype("<f4")


_E4M3 = _e4m3()


def _from_e4m3(words: Array) -> Array:
    values: Array = _E4M3[words.view("<u1")]
    return values


def _from_e5m2(words: Array) -> Array:
    return _from_half((words.view("<u1").astype("<u2") << 8).view("<f2"))


# A complex number is two real ones.
_WIDEN = {
    "F32": _plain,
    "C64": _plain,
    "BF16": _from_bf16,
    "F16": _from_half,
    "F8_E4M3": _from_e4m3,
    "F8_E5M2": _from_e5m2,
}


def _same(x: Array, y: Array) -> bool:
    """True if two pieces hold the same bits; compared in full only if their first and last elements are equal."""
    x, y = x.reshape(-1), y.reshape(-1)
    if x[:1].tobytes() != y[:1].tobytes() or x[-1:].tobytes() != y[-1:].tobytes():
        return False
    unsigned = f"<u{x.itemsize}"
    return bool((x.view(unsigned) == y.view(unsigned)).all())


def _add_equal(apart: Apart, x: Array) -> None:
    apart.numel += len(x)
    squares = float(np.dot(x, x))
    if not math.isfinite(squares):
        wide = x[np.isfinite(x)].astype(np.float64)
        squares = float(np.dot(wide, wide))
    apart.squares_x += squares
    apart.squares_y += squares


def _add_piece(apart: Apart, x: Array, y: Array, ratio: float, start: Index, shape: Index) -> None:
    if x.dtype != y.dtype or (ratio != 1.0 and math.frexp(ratio)[0] != 0.5):
        x, y = x.astype(np.float64), y.astype(np.float64)
    if ratio != 1.0:
        y = y * x.dtype.type(ratio)
    with np.errstate(all="ignore"):
        difference = x - y
        sums = [float(np.dot(v, v)) for v in (difference, x, y)]
    if not all(map(math.isfinite, sums)):
        x, y, difference, unlike = _finite(x, y)
        apart.unlike += unlike
        sums = [float(np.dot(v, v)) for v in (difference, x, y)]
    apart.numel += len(x)
    apart.squares += sums[0]
    apart.squares_x += sums[1]
    apart.squares_y += sums[2]
    apart.differing += int(np.count_nonzero(difference != 0))
    np.abs(difference, out=difference)
    largest = float(difference.max(initial=0.0))
    if largest > apart.largest:
        apart.largest = largest
        apart.largest_at = _place(int(difference.argmax()), start, shape, len(difference))


def _place(number: int, start: Index, shape: Index, numel: int) -> Index:
    """Number of an element in the whole tensor from its number in a piece."""
    size = math.prod(shape)
    number //= max(1, numel // max(size, 1))  # a complex number is two
    inside = np.unravel_index(number, shape) if shape else ()
    return tuple(int(a) + int(b) for a, b in zip(start, inside, strict=True))


def _finite(x: Array, y: Array) -> tuple[Array, Array, Array, int]:
    """Wide copies in which what is not finite in both alike is zero, their difference, and how many are unlike."""
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    bad = ~(np.isfinite(wide_x) & np.isfinite(wide_y))
    alike = (wide_x == wide_y) | (np.isnan(wide_x) & np.isnan(wide_y))
    wide_x[bad], wide_y[bad] = 0.0, 0.0
    return wide_x, wide_y, wide_x - wide_y, int(np.count_nonzero(bad & ~alike))


def first_beyond(x: View, y: View, at: Index, limit: float, ratio: float = 1.0) -> Index | None:
    """First element, in row-major order of the views, whose difference is more than `limit`; None if there is none."""
    for piece in pieces(x.words.shape):
        left, right = widened(x[piece]).astype(np.float64), widened(y[piece]).astype(np.float64) * ratio
        with np.errstate(all="ignore"):
            unlike = ~((left == right) | (np.isnan(left) & np.isnan(right)))
            found = np.flatnonzero(unlike & ~(np.abs(left - right) <= limit))
        if len(found):
            start = tuple(first + (cut.start or 0) for first, cut in zip(at, piece, strict=True))
            return _place(int(found[0]), start, x[piece].words.shape, len(left))
    return None
