/* y = x W^T for 1 to 8 rows of x: W is read once, a stripe of its rows at a time, for all rows of x. K is a multiple of 16. */
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, REGISTERS = 32 };
#elif defined(__AVX__)
enum { LANES = 8, REGISTERS = 16 };
#elif defined(__aarch64__)
enum { LANES = 4, REGISTERS = 32 };
#else
enum { LANES = 4, REGISTERS = 16 };
#endif
enum { MOST = 8, WIDEST = 4 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
#define INLINED static inline __attribute__((always_inline))

INLINED lanes load(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINED float added_up(lanes v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* What `stripe` rows of W make of all rows of x. Both numbers are constants where this is inlined: the sums lie in registers. */
INLINED void outputs(int rows, int stripe, const float *x, const float *w, float *y, long K, long N) {
    lanes sum[MOST][WIDEST];
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < stripe; j++) sum[t][j] = (lanes){0};
    for (long k = 0; k < K; k += LANES) {
        lanes weight[WIDEST];
        for (int j = 0; j < stripe; j++) weight[j] = load(w + j * K + k);
        for (int t = 0; t < rows; t++) {
            lanes some = load(x + t * K + k);
            for (int j = 0; j < stripe; j++) sum[t][j] += some * weight[j];
        }
    }
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < stripe; j++) y[t * N + j] = added_up(sum[t][j]);
}

INLINED void range(int rows, const float *x, const float *w, float *y, long K, long N, long from, long to) {
    const int fits = (REGISTERS - WIDEST - 1) / rows, stripe = fits > WIDEST ? WIDEST : fits > 1 ? fits : 1;
    long n = from;
    for (; n + stripe <= to; n += stripe) outputs(rows, stripe, x, w + n * K, y + n, K, N);
    for (; n < to; n++) outputs(rows, 1, x, w + n * K, y + n, K, N);
}

static void part(int rows, const float *x, const float *w, float *y, long K, long N, long from, long to) {
    switch (rows) {
        case 1: range(1, x, w, y, K, N, from, to); break;
        case 2: range(2, x, w, y, K, N, from, to); break;
        case 3: range(3, x, w, y, K, N, from, to); break;
        case 4: range(4, x, w, y, K, N, from, to); break;
        case 5: range(5, x, w, y, K, N, from, to); break;
        case 6: range(6, x, w, y, K, N, from, to); break;
        case 7: range(7, x, w, y, K, N, from, to); break;
        case 8: range(8, x, w, y, K, N, from, to); break;
    }
}

void few_rows(long rows, const float *x, const float *w, float *y, long K, long N, long threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (long i = 0; i < threads; i++) part(rows, x, w, y, K, N, i * N / threads, (i + 1) * N / threads);
}
