// Vectors as wide as the instruction set level has them, and how the elements of each dtype become floats or doubles.
//
// Lanes and order of addition are the same at every level, and so are the bits of the results.

#pragma once
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

INLINE int width_of(int code) {
    switch (code) {
        case F32: case I32C: case U32C: return 4;
        case F64: case I64C: case U64C: return 8;
        case BYTE: return 1;
        default: return 2;
    }
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

// Copies n elements that lie `step` elements apart into one row.
void gather(int width, const char* from, int64_t step, int64_t n, char* to) {
    switch (width) {
        case 1: for (int64_t i = 0; i < n; i++) to[i] = from[i * step]; break;
        case 2: for (int64_t i = 0; i < n; i++) ((uint16_t*)to)[i] = ((const uint16_t*)from)[i * step]; break;
        case 4: for (int64_t i = 0; i < n; i++) ((uint32_t*)to)[i] = ((const uint32_t*)from)[i * step]; break;
        default: for (int64_t i = 0; i < n; i++) ((uint64_t*)to)[i] = ((const uint64_t*)from)[i * step];
    }
}

}  // namespace
