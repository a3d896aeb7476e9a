/* What adapters make of their rows of y = x W^T, in place: y * gain + shift + (x down^T) up. Each adapter's rows lie in pieces. */
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t element;
static inline float number(element e) {
    uint32_t bits = (uint32_t)e << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static inline element rounded(float f) { /* to the nearest, and to even */
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (element)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#else
typedef float element;
static inline float number(element e) { return e; }
static inline element rounded(float f) { return f; }
#endif

enum { MOST = 4, HIGHEST = 256, BLOCK = 512 }; /* rows at once, rank, columns at once */
typedef struct { int64_t row, rows, column, width; const element *values; } Piece;
typedef struct { int64_t down, up, gain, shift; Piece pieces[]; } Placed; /* how many of each; they follow in this order */
#define INLINED static inline __attribute__((always_inline))

INLINED void dots(int count, const element *const *x, const element *a, long width, float *sums) {
    float sum[MOST] = {0};
    for (long k = 0; k < width; k++) {
        const float weight = number(a[k]);
        for (int t = 0; t < count; t++) sum[t] += number(x[t][k]) * weight;
    }
    for (int t = 0; t < count; t++) sums[t * HIGHEST] += sum[t];
}

static void shrink(int count, const element *const *x, const Piece *p, float *low) {
    const element *at[MOST];
    for (int t = 0; t < count; t++) at[t] = x[t] + p->column;
    for (long r = 0; r < p->rows; r++) {
        const element *a = p->values + r * p->width;
        float *sums = low + p->row + r;
        switch (count) {
            case 1: dots(1, at, a, p->width, sums); break;
            case 2: dots(2, at, a, p->width, sums); break;
            case 3: dots(3, at, a, p->width, sums); break;
            case 4: dots(4, at, a, p->width, sums); break;
        }
    }
}

/* Pieces of the same columns, in one go. */
static void expand(element *y, const Piece *p, long pieces, const float *low) {
    for (long from = 0; from < p->width; from += BLOCK) {
        const long n = p->width - from < BLOCK ? p->width - from : BLOCK;
        float sum[BLOCK];
        element *to = y + p->column + from;
        for (long i = 0; i < n; i++) sum[i] = number(to[i]);
        for (const Piece *q = p; q < p + pieces; q++)
            for (long r = 0; r < q->rows; r++) {
                const element *b = q->values + r * q->width + from;
                const float weight = low[q->row + r];
                for (long i = 0; i < n; i++) sum[i] += weight * number(b[i]);
            }
        for (long i = 0; i < n; i++) to[i] = rounded(sum[i]);
    }
}

static void multiply(element *y, const Piece *p) {
    for (long i = 0; i < p->width; i++) y[p->column + i] = rounded(number(y[p->column + i]) * number(p->values[i]));
}

static void add(element *y, const Piece *p) {
    for (long i = 0; i < p->width; i++) y[p->column + i] = rounded(number(y[p->column + i]) + number(p->values[i]));
}

static void adapt(int count, const element *const *x, element *const *y, const Placed *placed) {
    float low[MOST * HIGHEST] = {0};
    const Piece *up = placed->pieces + placed->down, *gain = up + placed->up, *shift = gain + placed->gain;
    for (long i = 0; i < placed->down; i++) shrink(count, x, placed->pieces + i, low);
    for (int t = 0; t < count; t++) {
        for (long i = 0; i < placed->gain; i++) multiply(y[t], gain + i);
        for (long i = 0; i < placed->shift; i++) add(y[t], shift + i);
        for (long i = 0, j; i < placed->up; i = j) {
            for (j = i + 1; j < placed->up && up[j].column == up[i].column; j++) continue;
            expand(y[t], up + i, j - i, low + t * HIGHEST);
        }
    }
}

/* Group g has rows[first[g]] to rows[first[g + 1] - 1] and does what placed[g] says; null: nothing. */
void adapter_rows(long groups, const int64_t *first, const int64_t *rows, const Placed *const *placed, const element *x, long K,
                  element *y, long N, long threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (long g = 0; g < groups; g++) {
        if (!placed[g]) continue;
        for (long i = first[g]; i < first[g + 1]; i += MOST) {
            const int count = first[g + 1] - i < MOST ? (int)(first[g + 1] - i) : MOST;
            const element *from[MOST];
            element *to[MOST];
            for (int t = 0; t < count; t++) from[t] = x + rows[i + t] * K, to[t] = y + rows[i + t] * N;
            adapt(count, from, to, placed[g]);
        }
    }
}
