// Digest and sketch: sums over the elements, each keyed by its index in the whole tensor, so that shards add up.
// run_directory/digest.py is the definition of both.

#pragma once
#include "vectors.h"

namespace {

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

}  // namespace
