"""The fused measuring kernel, in Triton: statistics, digest and sketch of a tensor in one read and one launch.

Imported only where Triton is installed, by `fused.launch`. A tensor is cut into chunks, one a program, by its size
alone. Each program writes its partial results; the program that finishes last (an integer counter says which) adds them
up in their fixed order and writes the row of the slot. No float atomics: the same tensor gives the same bits in every
run.

Accuracy: elements of up to 32 bits are accumulated in float32, compensated (Kahan) along a program's chunk, by pairs
elsewhere; partial results are added in float64 where ``WIDE``, else by pairs in float32. The error of ``sum`` is below
``40 * 2**-24`` of the sum of magnitudes, that of ``sumsq`` below ``40 * 2**-24`` of itself: 2.4e-6, for any number of
elements up to 2**40. Squares are scaled where a group of neighbours is larger than 2**47 or smaller than 2**-60, so
that none overflows or vanishes. Integers of 32 bits and more and float64 are accumulated in float64 where ``WIDE``.
Extremes and counts are exact; digests are those of `run_directory.digest`, bit for bit.
"""

import triton
import triton.language as tl

# Kinds of elements, by how their bits become a number. Eight-bit floats are decoded here, for architectures without
# instructions for them.
FLOAT32 = tl.constexpr(0)
FLOAT64 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
SIGNED = tl.constexpr(4)
UNSIGNED = tl.constexpr(5)
BOOL = tl.constexpr(6)
E4M3FN = tl.constexpr(7)
E5M2 = tl.constexpr(8)
E4M3FNUZ = tl.constexpr(9)
E5M2FNUZ = tl.constexpr(10)
E8M0FNU = tl.constexpr(11)

MOST_PROGRAMS = tl.constexpr(1024)
"""Programs, and so partial results, of one tensor at most."""
FLOAT_PARTS = tl.constexpr(8)
"""Floats in a partial result: low, high, sum, sum of large elements, sums of squares in three scales; one unused."""
COUNT_PARTS = tl.constexpr(8)
"""Integers in a partial result: NaN, +Inf, -Inf, zeros, digest; three unused."""

_LARGE = tl.constexpr(2.0**47)
_SMALL = tl.constexpr(2.0**-60)
_SHRINK = tl.constexpr(2.0**-84)
_GROW = tl.constexpr(2.0**90)


@triton.jit
def _eight_bit_float(bits, KIND: tl.constexpr):
    FRACTION: tl.constexpr = 3 if KIND == E4M3FN or KIND == E4M3FNUZ else 2
    BIAS: tl.constexpr = 7 if KIND == E4M3FN else 8 if KIND == E4M3FNUZ else 15 if KIND == E5M2 else 16
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS - FRACTION)
    b = bits.to(tl.uint32)
    exponent = (b & 0x7F) >> FRACTION
    fraction = b & ((1 << FRACTION) - 1)
    normal = ((exponent + (127 - BIAS)) << 23) | (fraction << (23 - FRACTION))
    small = (fraction.to(tl.float32) * LEAST).to(tl.uint32, bitcast=True)
    number = tl.where(exponent == 0, small, normal)
    if KIND == E4M3FN:
        number = tl.where((b & 0x7F) == 0x7F, 0x7FC00000, number)
    elif KIND == E5M2:
        number = tl.where(exponent == 31, 0x7F800000 | (fraction << 21), number)
    else:
        number = tl.where(b == 0x80, 0x7FC00000, number)
    return (number.to(tl.uint32) | ((b & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(bits):
    b = bits.to(tl.uint32)
    number = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, number).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _value(bits, KIND: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """The numbers that bits stand for, in the type of accumulation."""
    INTEGER: tl.constexpr = tl.int8 if WIDTH == 1 else tl.int16 if WIDTH == 2 else tl.int32 if WIDTH == 4 else tl.int64
    ACCUMULATED: tl.constexpr = tl.float64 if WIDE and WIDTH >= 4 and KIND != FLOAT32 else tl.float32
    if KIND == FLOAT32:
        v = bits.to(tl.float32, bitcast=True)
    elif KIND == BFLOAT16:
        v = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == FLOAT16:
        v = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == FLOAT64:
        v = bits.to(tl.float64, bitcast=True).to(ACCUMULATED)
    elif KIND == SIGNED:
        v = bits.to(INTEGER, bitcast=True).to(ACCUMULATED)
    elif KIND == UNSIGNED:
        v = bits.to(ACCUMULATED)
    elif KIND == BOOL:
        v = (bits != 0).to(tl.float32)
    elif KIND == E8M0FNU:
        v = _power_of_two(bits)
    else:
        v = _eight_bit_float(bits, KIND)
    return v


@triton.jit
def _key(number):
    """The key of an element by its number in the whole tensor; `run_directory.digest` has the same lines."""
    r = (number.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    r ^= r >> 32
    r *= 0xD6E8FEB86659FD93
    r ^= r >> 29
    return r | 1


@triton.jit
def _walk(i, plan):
    """Position in memory and number in the whole tensor of elements by their row-major order.

    ``plan``: dimensions, number of the first element, then for each dimension, the innermost first: size, stride, step
    of the number, address of a table of numbers or 0.
    """
    dims = tl.load(plan)
    number = tl.zeros_like(i) + tl.load(plan + 1)
    position = tl.zeros_like(i)
    rest = i
    for d in range(dims):
        line = plan + 2 + 4 * d
        size = tl.load(line)
        at = rest % size
        rest = rest // size
        position += at * tl.load(line + 1)
        table = tl.load(line + 3)
        if table == 0:
            number += at * tl.load(line + 2)
        else:
            number += tl.load(table.to(tl.pointer_type(tl.int64)) + at)
    return position, number


@triton.jit
def _compensated(total, lost, term):
    term -= lost
    found = total + term
    return found, (found - total) - term


@triton.jit
def _measure(
    data, n, times, chunk, chunks, tiles, row, partials, cells, counter, plan, first, step,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, NUMBERED: tl.constexpr, CELLS: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
    ROW_IN_MEMORY: tl.constexpr = False,
):  # fmt: skip
    """Measure one chunk, and finish the row of the tensor if this is the last of its chunks to be measured."""
    # Every number of up to 16 bits is exact in float32, and so are those of float32 itself.
    ACCUMULATED: tl.constexpr = tl.float64 if WIDE and WIDTH >= 4 and KIND != FLOAT32 else tl.float32
    BLOCK: tl.constexpr = ROWS * VECTOR
    start = chunk.to(tl.int64) * tiles * BLOCK
    length = tl.minimum(n - start, tiles.to(tl.int64) * BLOCK)
    BITS: tl.constexpr = tl.uint8 if WIDTH == 1 else tl.uint16 if WIDTH == 2 else tl.uint32 if WIDTH == 4 else tl.uint64
    elements = data.to(tl.pointer_type(BITS))
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
    lanes = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]

    low = tl.full([ROWS], float("inf"), ACCUMULATED)
    high = tl.full([ROWS], float("-inf"), ACCUMULATED)
    total, total_lost = tl.zeros([ROWS], ACCUMULATED), tl.zeros([ROWS], ACCUMULATED)
    large, large_lost = tl.zeros([ROWS], ACCUMULATED), tl.zeros([ROWS], ACCUMULATED)
    squares, squares_lost = tl.zeros([ROWS], ACCUMULATED), tl.zeros([ROWS], ACCUMULATED)
    large_squares, large_squares_lost = tl.zeros([ROWS], ACCUMULATED), tl.zeros([ROWS], ACCUMULATED)
    small_squares, small_squares_lost = tl.zeros([ROWS], ACCUMULATED), tl.zeros([ROWS], ACCUMULATED)
    nans, highs, lows, zeros = (
        tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    )  # fmt: skip
    digest = tl.zeros([ROWS], tl.uint64)

    parts = ((length + BLOCK - 1) // BLOCK).to(tl.int32)
    for tile in range(parts):
        done = tile * BLOCK
        inside = lanes < length - done
        if STRIDED:
            position, number = _walk(start + done + lanes, plan)
            bits = tl.load(elements + position, mask=inside, other=0)
        else:
            number = first + (start + done + lanes) * step
            # Without a mask where all elements are there, so that a vector is one load.
            if done + BLOCK <= length:
                bits = tl.load(elements + (start + done) + lanes)
            else:
                bits = tl.load(elements + (start + done) + lanes, mask=inside, other=0)
        # What is not there counts as NaN; those are subtracted again below.
        v = tl.where(inside, _value(bits, KIND, WIDTH, WIDE), float("nan")).to(ACCUMULATED)
        finite = tl.abs(v) < float("inf")
        low = tl.minimum(low, tl.min(tl.where(finite, v, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(finite, v, float("-inf")), 1))
        nans += tl.sum((v != v).to(tl.int32), 1)
        highs += tl.sum((v == float("inf")).to(tl.int32), 1)
        lows += tl.sum((v == float("-inf")).to(tl.int32), 1)
        zeros += tl.sum((v == 0).to(tl.int32), 1)
        clean = tl.where(finite, v, 0.0)
        if ACCUMULATED == tl.float64:
            total, total_lost = _compensated(total, total_lost, tl.sum(clean, 1))
            squares, squares_lost = _compensated(squares, squares_lost, tl.sum(clean * clean, 1))
        else:
            most = tl.max(tl.abs(clean), 1)
            is_large, is_small = most > _LARGE, most < _SMALL
            scaled = clean * tl.where(is_large, _SHRINK, tl.where(is_small, _GROW, 1.0))[:, None]
            some = tl.sum(scaled, 1)
            square = tl.sum(scaled * scaled, 1)
            sized = tl.where(is_small, some * (1.0 / _GROW), some)
            total, total_lost = _compensated(total, total_lost, tl.where(is_large, 0.0, sized))
            large, large_lost = _compensated(large, large_lost, tl.where(is_large, some, 0.0))
            squares, squares_lost = _compensated(squares, squares_lost, tl.where(is_large | is_small, 0.0, square))
            large_squares, large_squares_lost = _compensated(
                large_squares, large_squares_lost, tl.where(is_large, square, 0.0)
            )
            small_squares, small_squares_lost = _compensated(
                small_squares, small_squares_lost, tl.where(is_small, square, 0.0)
            )
        if NUMBERED:
            mixed = (bits.to(tl.uint64) + 1) * 0xA0761D6478BD642F
            mixed ^= mixed >> 32
            digest += tl.sum(tl.where(inside, mixed * _key(number), 0), 1)

    floats = partials.to(tl.pointer_type(ACCUMULATED)) + chunk * FLOAT_PARTS
    # Behind the floats of all chunks, whatever their type.
    counts = (partials + chunks * FLOAT_PARTS * 8).to(tl.pointer_type(tl.int64)) + chunk * COUNT_PARTS
    tl.store(floats, tl.min(low, 0))
    tl.store(floats + 1, tl.max(high, 0))
    tl.store(floats + 2, tl.sum(total, 0))
    tl.store(floats + 3, tl.sum(large, 0))
    tl.store(floats + 4, tl.sum(squares, 0))
    tl.store(floats + 5, tl.sum(large_squares, 0))
    tl.store(floats + 6, tl.sum(small_squares, 0))
    tl.store(counts, tl.sum(nans.to(tl.int64), 0) - (parts.to(tl.int64) * BLOCK - length))
    tl.store(counts + 1, tl.sum(highs.to(tl.int64), 0))
    tl.store(counts + 2, tl.sum(lows.to(tl.int64), 0))
    tl.store(counts + 3, tl.sum(zeros.to(tl.int64), 0))
    tl.store(counts + 4, tl.sum(digest, 0).to(tl.int64, bitcast=True))
    if CELLS > 0:
        _sketch(elements, start, length, chunk, cells, plan, first, step, KIND, WIDTH, WIDE, CELLS, STRIDED)
    # All threads must have written before the counter says so.
    tl.debug_barrier()
    finished = tl.atomic_add(counter.to(tl.pointer_type(tl.int32)), 1, sem="acq_rel", scope="gpu")
    if finished == chunks - 1:
        tl.debug_barrier()
        if ROW_IN_MEMORY:
            # Read only now: the loop above has no register to spare.
            row = tl.load(row.to(tl.pointer_type(tl.int64)))
        _finish(chunks, times, row, partials, cells, ACCUMULATED, WIDE, NUMBERED, CELLS)
        # For the next launch, which the stream orders behind this one.
        tl.store(counter.to(tl.pointer_type(tl.int32)), 0)


SKETCH_LANES = tl.constexpr(32)
SKETCH_CELLS = tl.constexpr(64)


@triton.jit
def _sketch(
    elements, start, length, chunk, cells, plan, first, step,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, CELLS: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Add each element with a sign to a cell, both chosen by its key; one lane of sums a cell, hence no atomics."""
    SUMMED: tl.constexpr = tl.float64 if WIDE else tl.float32
    lanes = tl.arange(0, SKETCH_LANES)
    for group in range((CELLS + SKETCH_CELLS - 1) // SKETCH_CELLS):
        mine = group * SKETCH_CELLS + tl.arange(0, SKETCH_CELLS)
        sums = tl.zeros([SKETCH_LANES, SKETCH_CELLS], SUMMED)
        for tile in range(((length + SKETCH_LANES - 1) // SKETCH_LANES).to(tl.int32)):
            done = tile * SKETCH_LANES
            inside = lanes < length - done
            i = start + done + lanes
            if STRIDED:
                position, number = _walk(i, plan)
            else:
                position, number = i, first + i * step
            v = _value(tl.load(elements + position, mask=inside, other=0), KIND, WIDTH, WIDE).to(SUMMED)
            key = _key(number)
            cell = (((key >> 32) * CELLS) >> 32).to(tl.int32)
            v = tl.where(inside & (tl.abs(v) < float("inf")), v, 0.0)
            v = tl.where((key & 2) == 0, -v, v)
            sums += tl.where(cell[:, None] == mine[None, :], v[:, None], 0.0)
        tl.store(cells.to(tl.pointer_type(SUMMED)) + chunk * CELLS + mine, tl.sum(sums, 0), mask=mine < CELLS)


@triton.jit
def _finish(
    chunks, times, row, partials, cells,
    ACCUMULATED: tl.constexpr, WIDE: tl.constexpr, NUMBERED: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Add up the partial results in their order and write the row: floats, counts, digest, cells."""
    SUMMED: tl.constexpr = tl.float64 if WIDE else tl.float32
    some = tl.arange(0, MOST_PROGRAMS)
    there = some < chunks
    floats = partials.to(tl.pointer_type(ACCUMULATED)) + some * FLOAT_PARTS
    counts = (partials + chunks * FLOAT_PARTS * 8).to(tl.pointer_type(tl.int64)) + some * COUNT_PARTS
    # Past the first-level cache, which may hold what was there before.
    low = tl.min(tl.load(floats, mask=there, other=float("inf"), cache_modifier=".cg"), 0)
    high = tl.max(tl.load(floats + 1, mask=there, other=float("-inf"), cache_modifier=".cg"), 0)
    total = tl.sum(tl.load(floats + 2, mask=there, other=0, cache_modifier=".cg").to(SUMMED), 0)
    large = tl.sum(tl.load(floats + 3, mask=there, other=0, cache_modifier=".cg").to(SUMMED), 0)
    squares = tl.sum(tl.load(floats + 4, mask=there, other=0, cache_modifier=".cg").to(SUMMED), 0)
    large_squares = tl.sum(tl.load(floats + 5, mask=there, other=0, cache_modifier=".cg").to(SUMMED), 0)
    small_squares = tl.sum(tl.load(floats + 6, mask=there, other=0, cache_modifier=".cg").to(SUMMED), 0)
    # Twice, because the square of the scale is no float32.
    total += large * (1.0 / _SHRINK)
    squares += large_squares * (1.0 / _SHRINK) * (1.0 / _SHRINK)
    squares += small_squares * (1.0 / _GROW) * (1.0 / _GROW)
    out = row.to(tl.pointer_type(SUMMED))
    tl.store(out, low.to(SUMMED))
    tl.store(out + 1, high.to(SUMMED))
    tl.store(out + 2, total * times.to(SUMMED))
    tl.store(out + 3, squares * times.to(SUMMED))
    tl.store(out + 4, tl.maximum(high, -low).to(SUMMED))
    FLOAT_WORDS: tl.constexpr = 5 if WIDE else 3
    words = row.to(tl.pointer_type(tl.int64)) + FLOAT_WORDS
    for k in tl.static_range(5 if NUMBERED else 4):
        # Where elements are numbered, ``times`` is 1.
        tl.store(words + k, tl.sum(tl.load(counts + k, mask=there, other=0, cache_modifier=".cg"), 0) * times)
    if CELLS > 0:
        SOME: tl.constexpr = 16
        target = (row + (FLOAT_WORDS + 5) * 8).to(tl.pointer_type(SUMMED))
        source = cells.to(tl.pointer_type(SUMMED))
        for group in range((CELLS + SKETCH_CELLS - 1) // SKETCH_CELLS):
            mine = group * SKETCH_CELLS + tl.arange(0, SKETCH_CELLS)
            sums = tl.zeros([SOME, SKETCH_CELLS], SUMMED)
            for first in range(0, chunks, SOME):
                lines = first + tl.arange(0, SOME)
                sums += tl.load(
                    source + lines[:, None] * CELLS + mine[None, :],
                    mask=(lines[:, None] < chunks) & (mine[None, :] < CELLS), other=0, cache_modifier=".cg",
                )  # fmt: skip
            tl.store(target + mine, tl.sum(sums, 0), mask=mine < CELLS)


_NEVER_SPECIALISED = ["data", "n", "times", "tiles", "row", "partials", "cells", "counter", "plan", "first", "step"]


@triton.jit(do_not_specialize=_NEVER_SPECIALISED)
def measure_tensor(
    data: tl.int64, n: tl.int64, times: tl.int64, tiles: tl.int64, row: tl.int64, partials: tl.int64, cells: tl.int64,
    counter: tl.int64, plan: tl.int64, first: tl.int64, step: tl.int64,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, NUMBERED: tl.constexpr, CELLS: tl.constexpr,
    STRIDED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One tensor; a program a chunk. Addresses are plain numbers: a view of another dtype would cost a call."""
    _measure(
        data.to(tl.int64), n.to(tl.int64), times.to(tl.int64), tl.program_id(0), tl.num_programs(0), tiles, row,
        partials, cells.to(tl.int64), counter,
        plan.to(tl.int64).to(tl.pointer_type(tl.int64)), first.to(tl.int64), step.to(tl.int64),
        KIND, WIDTH, WIDE, NUMBERED, CELLS, STRIDED, ALIGNED, ROWS, VECTOR,
    )  # fmt: skip


JOB_WORDS = tl.constexpr(8)
"""Words of a job of `measure_many`: address, elements, row, first chunk, chunks, tiles of a chunk; two unused."""


@triton.jit(do_not_specialize=["jobs", "owners", "partials", "counters"])
def measure_many(
    jobs: tl.int64, owners: tl.int64, partials: tl.int64, counters: tl.int64,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Statistics of many contiguous tensors of one dtype; ``owners`` says whose chunk each program measures."""
    program = tl.program_id(0)
    job = tl.load(owners.to(tl.pointer_type(tl.int32)) + program)
    address = jobs + job.to(tl.int64) * JOB_WORDS * 8
    line = address.to(tl.pointer_type(tl.int64))
    data, n = tl.load(line), tl.load(line + 1)
    first, chunks, tiles = tl.load(line + 3).to(tl.int32), tl.load(line + 4).to(tl.int32), tl.load(line + 5)
    once = tl.full((), 1, tl.int64)
    _measure(
        data, n, once, program - first, chunks, tiles, address + 16,
        partials + first.to(tl.int64) * (FLOAT_PARTS + COUNT_PARTS) * 8, partials, counters + job * 4, line, once, once,
        KIND, WIDTH, WIDE, False, 0, False, ALIGNED, ROWS, VECTOR, True,
    )  # fmt: skip
