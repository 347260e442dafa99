// One read of a tensor in host memory: statistics, digest and sketch. Compiled by build.py, called through ctypes.
//
// Plain C interface, no torch and no C++ runtime, so that it builds in a second and fits every torch. Compiled once
// for each instruction set level of the machines of a job; all levels give the same bits.

#include "digest.h"
#include "pair.h"
#include "stats.h"

namespace {

// Elements of short runs wait here until they make a piece: the statistics are those of a copy without gaps.
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

int64_t msprobe_abi(void) { return 4; }

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

// A row as the functions above write it, as a row whose floats and cells are of 32 bits: 5 floats and one left out, 4
// int64, the digest, the cells. cells: as in a plan.
void msprobe_narrow(const double* from, int64_t cells, float* to) {
    for (int k = 0; k < 5; k++) to[k] = (float)from[k];
    memcpy(to + 6, from + 5, (size_t)(cells < 0 ? 4 : 5) * 8);
    for (int64_t k = 0; k < cells; k++) to[16 + k] = (float)from[10 + k];
}
}
