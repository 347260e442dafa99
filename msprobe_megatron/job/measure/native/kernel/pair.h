// Two results of one operator, element by element: measure/pair.py and measure/exact.py.

#pragma once
#include "vectors.h"

extern "C" {

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
