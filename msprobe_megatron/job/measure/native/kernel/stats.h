// One read of a tensor in host memory: statistics, digest and sketch. Compiled by build.py, called through ctypes.
//
// Plain C interface, no torch and no C++ runtime, so that it builds in a second and fits every torch. Compiled once
// for each level of instructions that a machine of the job has; lanes and order of addition are the same at every
// level, and so are the bits of the results.
// Sums are kept in double. A piece whose sum is not finite holds a NaN or an Inf and is read again, one by one.

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int64_t PIECE = 2048;
constexpr int64_t LONG_PIECE = 16384;  // where the end of a piece costs as much as a thousand of its elements

// Vectors as wide as the level has; sixteen lanes are two to four of them where they are narrower.
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX2__)
#define BYTES 32
#else
#define BYTES 16
#endif
constexpr int LANES = BYTES / 4;   // of float
constexpr int GROUPS = 16 / LANES;  // of float vectors that make sixteen lanes

typedef float Floats __attribute__((vector_size(BYTES)));
typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef uint16_t Shorts __attribute__((vector_size(BYTES / 2)));
typedef float HalfFloats __attribute__((vector_size(BYTES / 2)));
typedef double Doubles __attribute__((vector_size(BYTES)));
typedef int64_t Longs __attribute__((vector_size(BYTES)));
constexpr int PAIRS = BYTES / 8;

// One instruction each; compilers make two or three of the plain expressions. Same results, NaN and -0 included.
#if defined(__AVX512F__)
INLINE void keep_low(Floats v, Floats& low) { low = (Floats)_mm512_min_ps((__m512)v, (__m512)low); }
INLINE void keep_high(Floats v, Floats& high) { high = (Floats)_mm512_max_ps((__m512)v, (__m512)high); }
INLINE void count_zeros(Floats v, Ints& zeros) {
    __mmask16 zero = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_EQ_OQ);
    zeros = (Ints)_mm512_mask_sub_epi32((__m512i)zeros, zero, (__m512i)zeros, _mm512_set1_epi32(-1));
}
#else
#if defined(__AVX2__)
INLINE void keep_low(Floats v, Floats& low) { low = (Floats)_mm256_min_ps((__m256)v, (__m256)low); }
INLINE void keep_high(Floats v, Floats& high) { high = (Floats)_mm256_max_ps((__m256)v, (__m256)high); }
#elif defined(__SSE2__)
INLINE void keep_low(Floats v, Floats& low) { low = (Floats)_mm_min_ps((__m128)v, (__m128)low); }
INLINE void keep_high(Floats v, Floats& high) { high = (Floats)_mm_max_ps((__m128)v, (__m128)high); }
#else
INLINE void keep_low(Floats v, Floats& low) { low = v < low ? v : low; }
INLINE void keep_high(Floats v, Floats& high) { high = v > high ? v : high; }
#endif
INLINE void count_zeros(Floats v, Ints& zeros) { zeros -= (v == 0.0f); }
#endif

// Wider elements, in one instruction each. The square of a float has no more digits than a double: fused or not, its sum
// has the same bits.
#if defined(__AVX512F__)
INLINE void widen(Floats v, Doubles& a, Doubles& b) {
    a = (Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    b = (Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
}
INLINE void widen(Shorts h, Words& u) { u = (Words)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE void add_square(Doubles a, Doubles& s) { s = (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)a, (__m512d)s); }
// One times it: the units that multiply have time, those that add are what everything else here waits for.
INLINE void add_to(Doubles a, Doubles& s) { s = (Doubles)_mm512_fmadd_pd((__m512d)a, _mm512_set1_pd(1.0), (__m512d)s); }
#elif defined(__AVX2__)
INLINE void widen(Floats v, Doubles& a, Doubles& b) {
    a = (Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
    b = (Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
}
INLINE void widen(Shorts h, Words& u) { u = (Words)_mm256_cvtepu16_epi32((__m128i)h); }
INLINE void add_square(Doubles a, Doubles& s) { s = (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)a, (__m256d)s); }
INLINE void add_to(Doubles a, Doubles& s) { s += a; }
#else
INLINE void widen(Floats v, Doubles& a, Doubles& b) {
    HalfFloats left, right;
    memcpy(&left, &v, BYTES / 2);
    memcpy(&right, (const char*)&v + BYTES / 2, BYTES / 2);
    a = __builtin_convertvector(left, Doubles);
    b = __builtin_convertvector(right, Doubles);
}
INLINE void widen(Shorts h, Words& u) { u = __builtin_convertvector(h, Words); }
INLINE void add_square(Doubles a, Doubles& s) { s += a * a; }
INLINE void add_to(Doubles a, Doubles& s) { s += a; }
#endif

enum Code { F32, F64, BF16, FP16, I16C, I32C, I64C, U16C, U32C, U64C, BYTE };

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

// Elements that are read as float, a vector at a time; `wide` gives them as doubles.
struct Single {
    typedef float T;
    INLINE void load(const T* p, Floats& v) { memcpy(&v, p, BYTES); }
#if defined(__AVX512F__)
    // Read once more, which costs less than to take a vector apart.
    INLINE void wide(const T* p, Floats v, Doubles& a, Doubles& b) {
        a = (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p));
        b = (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(p + LANES / 2));
    }
#else
    INLINE void wide(const T* p, Floats v, Doubles& a, Doubles& b) { widen(v, a, b); }
#endif
    INLINE double one(const T* p) { return *p; }
};
struct Brain {
    typedef uint16_t T;
    INLINE void load(const T* p, Floats& v) {
        Shorts h;
        memcpy(&h, p, BYTES / 2);
        Words u;
        widen(h, u);
        v = (Floats)(u << 16);
    }
    INLINE void wide(const T* p, Floats v, Doubles& a, Doubles& b) { widen(v, a, b); }
    INLINE double one(const T* p) {
        uint32_t u = (uint32_t)*p << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
};
struct Half {
    typedef uint16_t T;
    // Without conversion instructions and without a subnormal operand: some jobs flush those to zero.
    INLINE void load(const T* p, Floats& v) {
        Shorts h;
        memcpy(&h, p, BYTES / 2);
        Words u;
        widen(h, u);
        Words bits = (u & 0x7fff) << 13, exponent = bits & 0x0f800000;
        Floats small = (Floats)(bits + 0x38800000) - 6.103515625e-05f;
        Words is_small = (Words)(exponent == 0), is_infinite = (Words)(exponent == 0x0f800000);
        Words large = bits + 0x38000000 + (is_infinite & 0x38000000);
        v = (Floats)((is_small & (Words)small) | (~is_small & large) | ((u & 0x8000) << 16));
    }
    INLINE void wide(const T* p, Floats v, Doubles& a, Doubles& b) { widen(v, a, b); }
    INLINE double one(const T* p) {
        uint32_t h = *p, exponent = (h >> 10) & 31, fraction = h & 1023;
        double v = exponent == 31 ? (fraction ? NAN : INFINITY)
                 : exponent ? ldexp(1024.0 + fraction, (int)exponent - 25) : ldexp((double)fraction, -24);
        return h & 0x8000 ? -v : v;
    }
};
// Elements that are read as double, a vector at a time.
template <class E> struct Wide {
    typedef E T;
    INLINE void load(const T* p, Doubles& v) {
        typedef E Some __attribute__((vector_size(PAIRS * sizeof(E))));
        Some some;
        memcpy(&some, p, sizeof some);
        v = __builtin_convertvector(some, Doubles);
    }
    INLINE double one(const T* p) { return (double)*p; }
};

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

// Four pieces at once, `apart` elements from each other, each into figures of its own. Memory that is read at four places at
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

INLINE int width_of(int code) {
    switch (code) {
        case F32: case I32C: case U32C: return 4;
        case F64: case I64C: case U64C: return 8;
        case BYTE: return 1;
        default: return 2;
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

// The key of an element: odd, and as good as random in its place. digest.py has the same lines in torch.
INLINE uint64_t key_of(uint64_t index) {
    uint64_t r = (index + 1) * 0x9e3779b97f4a7c15ull;
    r ^= r >> 32;
    r *= 0xd6e8feb86659fd93ull;
    r ^= r >> 29;
    return r | 1;
}

template <class U> INLINE uint64_t digest_piece(const U* p, int64_t n, uint64_t index) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t b = ((uint64_t)p[i] + 1) * 0xa0761d6478bd642full;
        b ^= b >> 32;
        sum += b * key_of(index + (uint64_t)i);
    }
    return sum;
}


uint64_t digest_of(int width, const void* p, int64_t n, uint64_t index) {
    switch (width) {
        case 1: return digest_piece((const uint8_t*)p, n, index);
        case 2: return digest_piece((const uint16_t*)p, n, index);
        case 4: return digest_piece((const uint32_t*)p, n, index);
        default: return digest_piece((const uint64_t*)p, n, index);
    }
}

template <class R> INLINE void doubles(const void* p, int64_t n, double* out) {
    const typename R::T* q = (const typename R::T*)p;
    for (int64_t i = 0; i < n; i++) out[i] = R::one(q + i);
}

void to_doubles(int code, const void* p, int64_t n, const double* values, double* out) {
    switch (code) {
        case F32: doubles<Single>(p, n, out); break;
        case BF16: doubles<Brain>(p, n, out); break;
        case FP16: doubles<Half>(p, n, out); break;
        case F64: doubles<Wide<double>>(p, n, out); break;
        case I16C: doubles<Wide<int16_t>>(p, n, out); break;
        case I32C: doubles<Wide<int32_t>>(p, n, out); break;
        case I64C: doubles<Wide<int64_t>>(p, n, out); break;
        case U16C: doubles<Wide<uint16_t>>(p, n, out); break;
        case U32C: doubles<Wide<uint32_t>>(p, n, out); break;
        case U64C: doubles<Wide<uint64_t>>(p, n, out); break;
        default: for (int64_t i = 0; i < n; i++) out[i] = values[((const uint8_t*)p)[i]];
    }
}

// Each element is added with a sign to one of k cells, both chosen by its key; what is not finite is left out.
void sketch_piece(const double* v, int64_t n, uint64_t index, int64_t k, double* cells) {
    uint64_t keys[PIECE];
    for (int64_t i = 0; i < n; i++) keys[i] = key_of(index + (uint64_t)i);
    for (int64_t i = 0; i < n; i++) {
        if (!__builtin_isfinite(v[i])) continue;
        int64_t cell = (int64_t)(((keys[i] >> 32) * (uint64_t)k) >> 32);
        cells[cell] += keys[i] & 2 ? v[i] : -v[i];
    }
}

void gather(int width, const char* from, int64_t step, int64_t n, char* to) {
    switch (width) {
        case 1: for (int64_t i = 0; i < n; i++) to[i] = from[i * step]; break;
        case 2: for (int64_t i = 0; i < n; i++) ((uint16_t*)to)[i] = ((const uint16_t*)from)[i * step]; break;
        case 4: for (int64_t i = 0; i < n; i++) ((uint32_t*)to)[i] = ((const uint32_t*)from)[i * step]; break;
        default: for (int64_t i = 0; i < n; i++) ((uint64_t*)to)[i] = ((const uint64_t*)from)[i * step];
    }
}

// Elements of short runs wait here until they make a piece: the figures are those of a copy without gaps.
struct Waiting {
    int64_t held, seen;
    char buffer[PIECE * 8];
};

void stats_run(int code, int width, const char* p, int64_t stride, int64_t n, Waiting& wait, Quarters& all,
               int64_t* bytes) {
    while (n) {
        int64_t some = n < PIECE - wait.held ? n : PIECE - wait.held;
        if (stride == 1 && some == PIECE) {
            stats_piece(code, p, PIECE, Quarters::of(all, wait.seen), bytes);
            wait.seen += PIECE;
        } else {
            char* to = wait.buffer + wait.held * width;
            if (stride == 1) memcpy(to, p, (size_t)(some * width));
            else gather(width, p, stride, some, to);
            wait.held += some;
            if (wait.held == PIECE) {
                stats_piece(code, wait.buffer, PIECE, Quarters::of(all, wait.seen), bytes);
                wait.seen += PIECE;
                wait.held = 0;
            }
        }
        p += some * stride * width;
        n -= some;
    }
}

INLINE void put(const Stats& s, double* floats, int64_t* counts) {
    floats[0] = s.low;
    floats[1] = s.high;
    floats[2] = s.sum;
    floats[3] = s.squares;
    floats[4] = s.high > -s.low ? s.high : -s.low;
    counts[0] = s.nan;
    counts[1] = s.posinf;
    counts[2] = s.neginf;
    counts[3] = s.zero;
}

}  // namespace

extern "C" {

int64_t msprobe_abi(void) { return 3; }

// Statistics of n elements in a row. out: 5 doubles, 4 int64. values: what the 256 bytes stand for, or null.
void msprobe_stats(const char* data, int64_t n, int64_t code, const double* values, double* out) {
    Stats s;
    clear(s);
    int64_t bytes[256];
    if (code == BYTE) memset(bytes, 0, sizeof bytes);
    stats_of((int)code, data, n, s, bytes);
    if (code == BYTE) bytes_to_stats(bytes, values, s);
    put(s, out, (int64_t*)(out + 5));
}

// Statistics of many runs of elements. table: for each run its address, elements, code, values as above, and where its
// 5 doubles and 4 int64 go.
void msprobe_many(const int64_t* table, int64_t runs) {
    int64_t bytes[256];
    for (const int64_t* line = table; line < table + 5 * runs; line += 5) {
        const char* data = (const char*)(intptr_t)line[0];
        int64_t n = line[1];
        int code = (int)line[2];
        double* out = (double*)(intptr_t)line[4];
        Stats s;
        clear(s);
        if (code == BYTE) memset(bytes, 0, sizeof bytes);
        quick_stats_of(code, data, n, s, bytes);
        if (code == BYTE) bytes_to_stats(bytes, (const double*)(intptr_t)line[3], s);
        put(s, out, (int64_t*)(out + 5));
    }
}

// Statistics, digest and sketch of a strided tensor, each element under its index in the whole tensor.
//
// plan: code, values, outer dimensions, inner size, inner stride, segments, address of the segments, cells, then for
// each outer dimension size, stride, address of its offsets. A segment of the innermost dimension is (first element,
// elements, index of the first). Strides count elements. out: 5 doubles, 4 int64, the digest, then the cells;
// cells below 0 mean statistics only, and nothing after them is written.
void msprobe_measure(const char* data, const int64_t* plan, double* out) {
    int code = (int)plan[0], width = width_of(code);
    const double* values = (const double*)(intptr_t)plan[1];
    int64_t outer = plan[2], stride = plan[4], segments = plan[5], cells = plan[7];
    const int64_t* segment = (const int64_t*)(intptr_t)plan[6];
    const int64_t* dims = plan + 8;
    Stats s;
    clear(s);
    int64_t bytes[256];
    memset(bytes, 0, sizeof bytes);
    uint64_t digest = 0;
    double* sketch = out + 10;
    for (int64_t k = 0; k < cells; k++) sketch[k] = 0;
    int64_t rows = 1, at[64] = {};
    for (int64_t d = 0; d < outer; d++) rows *= dims[3 * d];
    char buffer[PIECE * 8];
    double wide[PIECE];
    Waiting wait;
    wait.held = wait.seen = 0;
    int64_t inner = 0;
    for (int64_t g = 0; g < segments; g++) inner += segment[3 * g + 1];
    Quarters all;
    Quarters::begin(all, rows * inner);
    for (int64_t row = 0; row < rows; row++) {
        int64_t offset = 0;
        uint64_t base = 0;
        for (int64_t d = 0; d < outer; d++) {
            offset += at[d] * dims[3 * d + 1];
            base += (uint64_t)((const int64_t*)(intptr_t)dims[3 * d + 2])[at[d]];
        }
        for (int64_t g = 0; g < segments; g++) {
            int64_t first = segment[3 * g], n = segment[3 * g + 1];
            uint64_t index = base + (uint64_t)segment[3 * g + 2];
            for (int64_t i = 0; i < n; i += PIECE) {
                int64_t some = n - i < PIECE ? n - i : PIECE;
                const char* p = data + (offset + (first + i) * stride) * width;
                if (stride != 1 && cells >= 0) {
                    gather(width, p, stride, some, buffer);
                    p = buffer;
                }
                stats_run(code, width, p, p == buffer ? 1 : stride, some, wait, all, bytes);
                if (cells >= 0) digest += digest_of(width, p, some, index + (uint64_t)i);
                if (cells > 0) {
                    to_doubles(code, p, some, values, wide);
                    sketch_piece(wide, some, index + (uint64_t)i, cells, sketch);
                }
            }
        }
        for (int64_t d = outer - 1; d >= 0; d--) {
            if (++at[d] < dims[3 * d]) break;
            at[d] = 0;
        }
    }
    if (wait.held) stats_piece(code, wait.buffer, wait.held, Quarters::of(all, wait.seen), bytes);
    Quarters::together(all, s);
    if (code == BYTE) bytes_to_stats(bytes, values, s);
    put(s, out, (int64_t*)(out + 5));
    if (cells >= 0) ((uint64_t*)out)[9] = digest;
}

// Statistics of a tensor with gaps, of at most 64 dimensions, read in the order of its memory. out: as of msprobe_stats.
// measure/compiled.py makes the plan of the same order.
void msprobe_strided(const char* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t code,
                     const double* values, double* out) {
    int width = width_of((int)code);
    int64_t size[65], stride[65], at[64] = {}, left = 0, rows = 1;
    for (int64_t d = 0; d < dims; d++) {
        if (sizes[d] == 1) continue;
        int64_t k = left++;
        for (; k && stride[k - 1] < strides[d]; k--) size[k] = size[k - 1], stride[k] = stride[k - 1];
        size[k] = sizes[d];
        stride[k] = strides[d];
    }
    int64_t inner = left;
    for (; inner > 1 && stride[inner - 2] == size[inner - 1] * stride[inner - 1]; inner--) {
        size[inner - 2] *= size[inner - 1];
        stride[inner - 2] = stride[inner - 1];
    }
    int64_t n = inner ? size[inner - 1] : 1, step = inner ? stride[inner - 1] : 1, outer = inner ? inner - 1 : 0;
    for (int64_t d = 0; d < outer; d++) rows *= size[d];
    Stats s;
    clear(s);
    int64_t bytes[256], offset = 0;
    if (code == BYTE) memset(bytes, 0, sizeof bytes);
    Waiting wait;
    wait.held = wait.seen = 0;
    Quarters all;
    Quarters::begin(all, rows * n);
    for (int64_t row = 0; row < rows; row++) {
        stats_run((int)code, width, data + offset * width, step, n, wait, all, bytes);
        for (int64_t d = outer - 1; d >= 0; d--) {
            offset += stride[d];
            if (++at[d] < size[d]) break;
            offset -= size[d] * stride[d];
            at[d] = 0;
        }
    }
    if (wait.held) stats_piece((int)code, wait.buffer, wait.held, Quarters::of(all, wait.seen), bytes);
    Quarters::together(all, s);
    if (code == BYTE) bytes_to_stats(bytes, values, s);
    put(s, out, (int64_t*)(out + 5));
}

// Two tensors of one dtype, element by element; a is the live result. digits: bits of the fraction; least: exponent of
// the smallest normal number; floor: below it magnitudes are equal in `ratio` (0: no ratio).
// out: elements, NaN in a, NaN in one only, Inf in a, Inf in one only or apart, different, largest difference, where,
// sum of squares of the difference, of a, largest difference in units of the last place, ratio, signs flipped.
void msprobe_pair(const char* a, const char* b, int64_t n, int64_t code, int64_t digits, int64_t least, double floor,
                  double* out) {
    int width = width_of((int)code);
    double left[PIECE], right[PIECE];
    double nan_a = 0, nan_one = 0, inf_a = 0, inf_one = 0, differ = 0, most = 0, where = -1;
    double apart = 0, squares = 0, ulps = 0, high = 1, low = 1, flipped = 0;
    for (int64_t at = 0; at < n; at += PIECE) {
        int64_t some = n - at < PIECE ? n - at : PIECE;
        const char *p = a + at * width, *q = b + at * width;
        bool same = memcmp(p, q, (size_t)(some * width)) == 0;
        to_doubles((int)code, p, some, 0, left);
        double sums[8] = {};
        int64_t whole = some & ~(int64_t)7;
        for (int64_t i = 0; i < whole; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += left[i + k] * left[i + k];
        double part = 0;
        for (int64_t i = whole; i < some; i++) part += left[i] * left[i];
        for (int k = 0; k < 8; k++) part += sums[k];
        bool finite = __builtin_isfinite(part);
        if (same && finite) {
            squares += part;
            continue;
        }
        to_doubles((int)code, q, some, 0, right);
        for (int64_t i = 0; i < some; i++) {
            double x = left[i], y = right[i];
            bool x_nan = x != x, y_nan = y != y, x_inf = x - x != 0 && !x_nan, y_inf = y - y != 0 && !y_nan;
            nan_a += x_nan;
            inf_a += x_inf;
            if (x_nan || y_nan) { nan_one += x_nan != y_nan; continue; }
            if (x_inf || y_inf) { inf_one += x != y; continue; }
            squares += x * x;
            if (x == y) continue;
            double d = fabs(x - y), size = fabs(x) > fabs(y) ? fabs(x) : fabs(y);
            differ += 1;
            apart += d * d;
            most = d > most ? d : most;
            uint64_t bits;
            memcpy(&bits, &size, 8);
            int64_t exponent = (int64_t)(bits >> 52) - 1023;
            exponent = exponent < least ? least : exponent;
            bits = (uint64_t)(exponent - digits + 1023) << 52;
            double unit;
            memcpy(&unit, &bits, 8);
            double u = exponent - digits + 1023 > 0 ? d / unit : d * 0x1p1022 * 0x1p52;
            if (u > ulps) { ulps = u; where = (double)(at + i); }
            if (floor > 0) {
                double r = (fabs(x) > floor ? fabs(x) : floor) / (fabs(y) > floor ? fabs(y) : floor);
                high = r > high ? r : high;
                low = r < low ? r : low;
                if (x * y < -floor * floor) flipped = 1;
            }
        }
    }
    double ratio = low > 0 && 1 / low > high ? 1 / low : high;
    double figures[13] = {(double)n, nan_a, nan_one, inf_a, inf_one, differ, most, where, apart, squares, ulps, ratio,
                          flipped};
    memcpy(out, figures, sizeof figures);
}

// Rows of a live result against the exact one (double) and the exact answer to nudged inputs; see measure/exact.py.
// scale: unit of the last place at 1, smallest normal, largest, units allowed, answers allowed, part allowed for sums.
// scrambled may be null. out: elements, NaN in one only, Inf in a only, largest error over what is allowed, largest in
// units of the last place, size of the answer over that of the result, where.
void msprobe_rows(const char* live, int64_t code, const double* exact, const double* nudged, const double* scrambled,
                  int64_t rows, int64_t width, const double* scale, double* out) {
    double eps = scale[0], tiny = scale[1], largest = scale[2], ulps = scale[3], working = scale[4], summed = scale[5];
    int bytes = width_of((int)code);
    double nan_one = 0, inf_one = 0, over = 0, most = 0, where = 0, moved_all = 0, size_all = 0, whole = 0;
    double part[PIECE];
    if (scrambled) {
        double squares = 0;
        for (int64_t i = 0; i < rows * width; i++)
            if (fabs(exact[i]) <= largest) squares += exact[i] * exact[i];
        whole = sqrt(squares / (double)(rows * width));
    }
    for (int64_t r = 0; r < rows; r++) {
        const double *y = exact + r * width, *z = nudged + r * width;
        double squares = 0, answers = 0, other = 0;
        for (int64_t i = 0; i < width; i++) {
            double d = z[i] - y[i];
            if (fabs(y[i]) <= largest) squares += y[i] * y[i];
            if (__builtin_isfinite(d)) answers += d * d;
            if (scrambled && __builtin_isfinite(scrambled[r * width + i]))
                other += scrambled[r * width + i] * scrambled[r * width + i];
        }
        size_all += squares;
        moved_all += answers;
        double row = scrambled ? whole : sqrt(squares / (double)width), answer = sqrt(answers / (double)width);
        if (scrambled && sqrt(other / (double)width) > row) row = sqrt(other / (double)width);
        for (int64_t at = 0; at < width; at += PIECE) {
            int64_t some = width - at < PIECE ? width - at : PIECE;
            to_doubles((int)code, live + (r * width + at) * bytes, some, 0, part);
            for (int64_t i = 0; i < some; i++) {
                double x = part[i], e = y[at + i];
                // What does not fit the dtype of the live result is Inf in every honest one.
                bool x_nan = x != x, e_nan = e != e, x_inf = !x_nan && x - x != 0, e_inf = !e_nan && fabs(e) > largest;
                nan_one += x_nan != e_nan;
                inf_one += x_inf && !e_nan && fabs(e) < largest / 2;
                if (x_nan || e_nan || x_inf || e_inf) continue;
                double size = fabs(e) > row ? fabs(e) : row, unit = eps * size + tiny * eps, error = fabs(x - e);
                double part_over = error / (ulps * unit + working * answer + summed * size + 1e-300);
                if (part_over > over) { over = part_over; where = (double)(r * width + at + i); }
                most = error / unit > most ? error / unit : most;
            }
        }
    }
    double figures[7] = {(double)(rows * width), nan_one, inf_one, over, most, sqrt(moved_all / (size_all + 1e-300)),
                         where};
    memcpy(out, figures, sizeof figures);
}
}
