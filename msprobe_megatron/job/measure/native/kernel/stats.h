// Statistics of elements in a row: extremes, sum and sum of squares of the finite ones, counts of the others and of zeros.
//
// Sums are kept in double. A piece whose sum is not finite holds a NaN or an Inf and is read again, element by element.

#pragma once
#include "vectors.h"

namespace {

struct Stats {
    double low, high, sum, squares;
    int64_t nan, posinf, neginf, zero;
};

INLINE void clear(Stats& s) {
    s.low = INFINITY;
    s.high = -INFINITY;
    s.sum = s.squares = 0;
    s.nan = s.posinf = s.neginf = s.zero = 0;
}

INLINE void one_by_one(double v, Stats& s) {
    if (v != v) { s.nan++; return; }
    if (v == INFINITY) { s.posinf++; return; }
    if (v == -INFINITY) { s.neginf++; return; }
    s.low = v < s.low ? v : s.low;
    s.high = v > s.high ? v : s.high;
    s.sum += v;
    s.squares += v * v;
    s.zero += v == 0;
}

// Sixteen lanes in the same order at every level.
INLINE double total(const Doubles* lanes, int vectors) {
    double v[16];
    memcpy(v, lanes, (size_t)vectors * BYTES);
    for (int width = vectors * PAIRS / 2; width; width /= 2)
        for (int k = 0; k < width; k++) v[k] += v[k + width];
    return v[0];
}

INLINE void add(Stats& s, const Stats& part) {
    s.low = part.low < s.low ? part.low : s.low;
    s.high = part.high > s.high ? part.high : s.high;
    s.sum += part.sum;
    s.squares += part.squares;
    s.nan += part.nan;
    s.posinf += part.posinf;
    s.neginf += part.neginf;
    s.zero += part.zero;
}

template <class R> INLINE void slowly(const typename R::T* p, int64_t n, Stats& s) {
    for (int64_t i = 0; i < n; i++) one_by_one(R::one(p + i), s);
}

template <class R> INLINE void narrow_piece(const typename R::T* p, int64_t n, Stats& s) {
    int64_t whole = n & ~(int64_t)15;
    Stats part;
    clear(part);
    if (whole) {
        Floats low, high;
        R::load(p, low);
        high = low;
        Doubles sums[2 * GROUPS] = {}, squares[2 * GROUPS] = {};
        Ints zeros = {};
        for (int64_t i = 0; i < whole; i += 16) {
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) {
                Floats v;
                R::load(p + i + g * LANES, v);
                keep_low(v, low);
                keep_high(v, high);
                count_zeros(v, zeros);
                Doubles a, b;
                R::wide(p + i + g * LANES, v, a, b);
                add_to(a, sums[2 * g]);
                add_to(b, sums[2 * g + 1]);
                add_square(a, squares[2 * g]);
                add_square(b, squares[2 * g + 1]);
            }
        }
        part.sum = total(sums, 2 * GROUPS);
        part.squares = total(squares, 2 * GROUPS);
        for (int k = 0; k < LANES; k++) {
            part.low = low[k] < part.low ? low[k] : part.low;
            part.high = high[k] > part.high ? high[k] : part.high;
            part.zero += zeros[k];
        }
        if (!__builtin_isfinite(part.sum)) {
            clear(part);
            slowly<R>(p, whole, part);
        }
    }
    slowly<R>(p + whole, n - whole, part);
    add(s, part);
}

// Four pieces at once, `apart` elements from each other, each into statistics of its own. Memory that is read at four places at
// a time comes half as fast again, and asking for it ahead of time only delays it.
constexpr int PLACES = 4;
template <class R> INLINE void four_pieces(const typename R::T* p, int64_t apart, Stats* parts) {
    Floats low, high;
    R::load(p, low);
    high = low;
    Doubles sums[PLACES][2 * GROUPS] = {}, squares[PLACES][2 * GROUPS] = {};
    Ints zeros = {};
    // Strip by strip: closer together they would be in each other's way.
    constexpr int64_t STRIP = 512;
    for (int64_t strip = 0; strip < PIECE; strip += STRIP) {
        for (int at = 0; at < PLACES; at++) {
            const typename R::T* q = p + at * apart + strip;
            Doubles sum[2 * GROUPS], square[2 * GROUPS];
            memcpy(sum, sums[at], sizeof sum);
            memcpy(square, squares[at], sizeof square);
            for (int64_t i = 0; i < STRIP; i += 16) {
#pragma GCC unroll 4
                for (int g = 0; g < GROUPS; g++) {
                    Floats v;
                    R::load(q + i + g * LANES, v);
                    keep_low(v, low);
                    keep_high(v, high);
                    count_zeros(v, zeros);
                    Doubles a, b;
                    R::wide(q + i + g * LANES, v, a, b);
                    add_to(a, sum[2 * g]);
                    add_to(b, sum[2 * g + 1]);
                    add_square(a, square[2 * g]);
                    add_square(b, square[2 * g + 1]);
                }
            }
            memcpy(sums[at], sum, sizeof sum);
            memcpy(squares[at], square, sizeof square);
        }
    }
    double found[PLACES], all = 0;
    for (int at = 0; at < PLACES; at++) all += found[at] = total(sums[at], 2 * GROUPS);
    if (!__builtin_isfinite(all)) {
        for (int at = 0; at < PLACES; at++) narrow_piece<R>(p + at * apart, PIECE, parts[at]);
        return;
    }
    for (int at = 0; at < PLACES; at++) {
        parts[at].sum += found[at];
        parts[at].squares += total(squares[at], 2 * GROUPS);
    }
    // Whose extremes and zeros these are does not matter to the whole.
    for (int k = 0; k < LANES; k++) {
        parts->low = low[k] < parts->low ? low[k] : parts->low;
        parts->high = high[k] > parts->high ? high[k] : parts->high;
        parts->zero += zeros[k];
    }
}

// Through memory by force: a vector that is read by halves would be kept there all through the loop that made it.
INLINE void add_halves(Floats v, Doubles* to) {
    volatile Floats stored = v;
    HalfFloats left, right;
    memcpy(&left, (const void*)&stored, BYTES / 2);
    memcpy(&right, (const char*)&stored + BYTES / 2, BYTES / 2);
    to[0] += __builtin_convertvector(left, Doubles);
    to[1] += __builtin_convertvector(right, Doubles);
}

// Twice as fast: sums in float over runs of 512, sixteen additions to a lane, then in double. Extremes at which the square
// of a float is lost go through the pieces above. Several at once, too, run by run.
template <class R, int COUNT> INLINE void quick_piece(const typename R::T* p, int64_t apart, int64_t n, Stats& s) {
    constexpr int SETS = 2 * GROUPS;
    int64_t whole = n & ~(int64_t)31;
    if (!whole) {
        for (int at = 0; at < COUNT; at++) narrow_piece<R>(p + at * apart, n, s);
        return;
    }
    Stats part;
    clear(part);
    Floats low, high;
    R::load(p, low);
    high = low;
    Floats low_too = low, high_too = low;
    Doubles wide_sums[2 * SETS] = {}, wide_squares[2 * SETS] = {};
    Ints zeros = {}, zeros_too = {};
    for (int64_t run = 0; run < whole; run += 512) {
        int64_t length = whole - run < 512 ? whole - run : 512;
        for (int at = 0; at < COUNT; at++) {
            const typename R::T* q = p + at * apart + run;
            // No arrays here: the accumulators stay in registers. Two of each, or every addition would wait for the last.
            for (int g = 0; g < GROUPS; g++) {
                Floats sum = {}, square = {}, sum_too = {}, square_too = {};
                for (int64_t i = g * LANES; i < length; i += 32) {
                    Floats v, w;
                    R::load(q + i, v);
                    R::load(q + i + 16, w);
                    keep_low(v, low);
                    keep_low(w, low_too);
                    keep_high(v, high);
                    keep_high(w, high_too);
                    count_zeros(v, zeros);
                    count_zeros(w, zeros_too);
                    sum += v;
                    sum_too += w;
                    square += v * v;
                    square_too += w * w;
                }
                add_halves(sum, wide_sums + 2 * g);
                add_halves(sum_too, wide_sums + SETS + 2 * g);
                add_halves(square, wide_squares + 2 * g);
                add_halves(square_too, wide_squares + SETS + 2 * g);
            }
        }
    }
    keep_low(low_too, low);
    keep_high(high_too, high);
    zeros += zeros_too;
    // The two sets of sixteen lanes, one after the other, as at every level.
    for (int set = 0; set < 2; set++) {
        part.sum += total(wide_sums + set * SETS, SETS);
        part.squares += total(wide_squares + set * SETS, SETS);
    }
    for (int k = 0; k < LANES; k++) {
        part.low = low[k] < part.low ? low[k] : part.low;
        part.high = high[k] > part.high ? high[k] : part.high;
        part.zero += zeros[k];
    }
    double most = part.high > -part.low ? part.high : -part.low;
    if (!__builtin_isfinite(part.sum) || most > 36028797018963968.0 || (most < 2.842170943040401e-14 && most > 0)) {
        for (int at = 0; at < COUNT; at++) narrow_piece<R>(p + at * apart, n, s);
        return;
    }
    for (int at = 0; at < COUNT; at++) slowly<R>(p + at * apart + whole, n - whole, part);
    add(s, part);
}

// Many elements in a row.
template <class R> INLINE void quickly(const typename R::T* p, int64_t n, Stats& s) {
    int64_t quarter = n / PLACES / LONG_PIECE * LONG_PIECE, at = 0;
    for (; at < quarter; at += LONG_PIECE) quick_piece<R, PLACES>(p + at, quarter, LONG_PIECE, s);
    for (at = PLACES * quarter; at < n; at += LONG_PIECE)
        quick_piece<R, 1>(p + at, 0, n - at < LONG_PIECE ? n - at : LONG_PIECE, s);
}

template <class R> INLINE void wide_piece(const typename R::T* p, int64_t n, Stats& s) {
    constexpr int VECTORS = 8 / PAIRS;
    int64_t whole = n & ~(int64_t)7;
    Stats part;
    clear(part);
    if (whole) {
        Doubles low, high;
        R::load(p, low);
        high = low;
        Doubles sums[VECTORS] = {}, squares[VECTORS] = {};
        Longs zeros = {};
        for (int64_t i = 0; i < whole; i += 8) {
#pragma GCC unroll 4
            for (int g = 0; g < VECTORS; g++) {
                Doubles v;
                R::load(p + i + g * PAIRS, v);
                low = v < low ? v : low;
                high = v > high ? v : high;
                zeros -= (v == 0.0);
                sums[g] += v;
                squares[g] += v * v;
            }
        }
        part.sum = total(sums, VECTORS);
        part.squares = total(squares, VECTORS);
        for (int k = 0; k < PAIRS; k++) {
            part.low = low[k] < part.low ? low[k] : part.low;
            part.high = high[k] > part.high ? high[k] : part.high;
            part.zero += zeros[k];
        }
        if (!__builtin_isfinite(part.sum)) {
            clear(part);
            slowly<R>(p, whole, part);
        }
    }
    slowly<R>(p + whole, n - whole, part);
    add(s, part);
}

// Eight-bit formats have 256 values: count them, then look at each value once.
void byte_piece(const uint8_t* p, int64_t n, int64_t* counts) {
    for (int64_t i = 0; i < n; i++) counts[p[i]]++;
}

void stats_piece(int code, const void* p, int64_t n, Stats& s, int64_t* bytes) {
    switch (code) {
        case F32: narrow_piece<Single>((const float*)p, n, s); break;
        case BF16: narrow_piece<Brain>((const uint16_t*)p, n, s); break;
        case FP16: narrow_piece<Half>((const uint16_t*)p, n, s); break;
        case F64: wide_piece<Wide<double>>((const double*)p, n, s); break;
        case I16C: wide_piece<Wide<int16_t>>((const int16_t*)p, n, s); break;
        case I32C: wide_piece<Wide<int32_t>>((const int32_t*)p, n, s); break;
        case I64C: wide_piece<Wide<int64_t>>((const int64_t*)p, n, s); break;
        case U16C: wide_piece<Wide<uint16_t>>((const uint16_t*)p, n, s); break;
        case U32C: wide_piece<Wide<uint32_t>>((const uint32_t*)p, n, s); break;
        case U64C: wide_piece<Wide<uint64_t>>((const uint64_t*)p, n, s); break;
        default: byte_piece((const uint8_t*)p, n, bytes);
    }
}

// The quarters of a large tensor are added up apart and then together, with what is left behind them: however it lies in
// memory, a tensor of n elements has the same sums.
struct Quarters {
    int64_t quarter;
    Stats parts[PLACES + 1];
    INLINE void begin(Quarters& all, int64_t n) {
        all.quarter = n >= PLACES * LONG_PIECE ? n / PLACES / PIECE * PIECE : 0;
        for (Stats& part : all.parts) clear(part);
    }
    INLINE Stats& of(Quarters& all, int64_t at) {
        int64_t part = all.quarter ? at / all.quarter : 0;
        return all.parts[part < PLACES ? part : PLACES];
    }
    INLINE void together(const Quarters& all, Stats& s) {
        for (const Stats& part : all.parts) add(s, part);
    }
};

template <class R> INLINE int64_t four_by_four(const typename R::T* p, Quarters& all) {
    for (int64_t at = 0; at < all.quarter; at += PIECE) four_pieces<R>(p + at, all.quarter, all.parts);
    return PLACES * all.quarter;
}

// Elements without gaps.
void stats_of(int code, const char* p, int64_t n, Stats& s, int64_t* bytes) {
    Quarters all;
    Quarters::begin(all, n);
    int64_t at = 0, width = width_of(code);
    if (all.quarter && code == F32) at = four_by_four<Single>((const float*)p, all);
    if (all.quarter && code == BF16) at = four_by_four<Brain>((const uint16_t*)p, all);
    if (all.quarter && code == FP16) at = four_by_four<Half>((const uint16_t*)p, all);
    for (; at < n; at += PIECE)
        stats_piece(code, p + at * width, n - at < PIECE ? n - at : PIECE, Quarters::of(all, at), bytes);
    Quarters::together(all, s);
}

// The same, for the long runs of memory of gradients and optimizer states.
void quick_stats_of(int code, const char* p, int64_t n, Stats& s, int64_t* bytes) {
    switch (code) {
        case F32: quickly<Single>((const float*)p, n, s); break;
        case BF16: quickly<Brain>((const uint16_t*)p, n, s); break;
        case FP16: quickly<Half>((const uint16_t*)p, n, s); break;
        default: stats_of(code, p, n, s, bytes);
    }
}

// One step at a time and not count * value: 8-bit integers stay exact, and so does everything below 2**53.
void bytes_to_stats(const int64_t* counts, const double* values, Stats& s) {
    for (int k = 0; k < 256; k++) {
        int64_t n = counts[k];
        double v = values[k];
        if (!n) continue;
        if (v != v) s.nan += n;
        else if (v == INFINITY) s.posinf += n;
        else if (v == -INFINITY) s.neginf += n;
        else {
            s.low = v < s.low ? v : s.low;
            s.high = v > s.high ? v : s.high;
            s.sum += v * (double)n;
            s.squares += v * v * (double)n;
            if (v == 0) s.zero += n;
        }
    }
}

}  // namespace
