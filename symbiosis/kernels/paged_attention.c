/* Attention of single rows over keys and values that lie in pages. A page holds BLOCK tokens: first their keys, a row of all heads for
   each token, and further on their values. Sums are float32, whatever is stored. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t stored;
#else
typedef float stored;
#endif

#define INLINED static inline __attribute__((always_inline))

typedef struct {
    long rows, heads, shared, key, value; /* rows that look; heads of queries, and of keys; the sizes of a key and of a value */
    long page, values_at;                 /* elements of a page, and before its values */
    long query_row, query_head;           /* strides of the queries, in elements */
    long tables;                          /* pages that the table has room for, for each row */
    long window;                          /* tokens that a row sees, itself included; 0: all */
    long longest, threads;                /* the most tokens of a row */
    float scaling, softcap;               /* softcap 0: none */
} shape;

INLINED float widened(stored x) {
#ifdef BFLOAT16
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
#else
    return x;
#endif
}

INLINED stored narrowed(float x) {
#ifdef BFLOAT16
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#else
    return x;
#endif
}

/* e^x for x <= 0 to a few units in the last place: a power of two by the exponent's bits, the rest by a polynomial, in vectors. */
INLINED float exponential(float x) {
    x = x < -87 ? -87 : x;
    const int32_t n = (int32_t)(x * 1.44269504f - 0.5f), bits = (n + 127) << 23;
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float scale, p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    memcpy(&scale, &bits, sizeof scale);
    return (p * r * r + r + 1) * scale;
}

/* Scores become weights that add up to one, together with the sink's if there is one. */
INLINED void normalise(float *scores, long count, float softcap, const float *sink) {
    if (softcap)
        for (long t = 0; t < count; t++) scores[t] = tanhf(scores[t] / softcap) * softcap;
    float most = sink ? *sink : scores[0], sum = 0;
    for (long t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
    for (long t = 0; t < count; t++) scores[t] = exponential(scores[t] - most);
    for (long t = 0; t < count; t++) sum += scores[t];
    if (sink) sum += exponential(*sink - most);
    for (long t = 0; t < count; t++) scores[t] /= sum;
}

/* What one row sees with some heads of keys, from `head` on; `query`, `sinks` and `result` begin with these. Each token's keys are read
   once for all of them, and so are its values. */
INLINED void look(const shape *s, long head, long heads, long K, long V, const stored *query, const stored *memory, const int32_t *table, long end,
                  const float *sinks, float *room, stored *result) {
    const long group = s->heads / s->shared, rows = heads * group; /* of scores */
    const long from = s->window && end > s->window ? end - s->window : 0, count = end - from;
    float *q = room, *y = q + rows * K, *scores = y + rows * V;
    for (long i = 0; i < rows; i++)
        for (long d = 0; d < K; d++) q[i * K + d] = widened(query[i * s->query_head + d]) * s->scaling;
    for (long t = 0; t < count; t++) {
        const long at = t + from;
        const stored *k = memory + table[at / BLOCK] * s->page + (at % BLOCK * s->shared + head) * K;
        for (long i = 0; i < rows; i++) {
            float sum = 0;
            for (long d = 0; d < K; d++) sum += q[i * K + d] * widened(k[i / group * K + d]);
            scores[i * count + t] = sum;
        }
    }
    for (long i = 0; i < rows; i++) normalise(scores + i * count, count, s->softcap, sinks ? sinks + i : NULL);
    memset(y, 0, rows * V * sizeof *y);
    for (long t = 0; t < count; t++) {
        const long at = t + from;
        const stored *v = memory + table[at / BLOCK] * s->page + s->values_at + (at % BLOCK * s->shared + head) * V;
        for (long i = 0; i < rows; i++) {
            const float weight = scores[i * count + t];
            for (long d = 0; d < V; d++) y[i * V + d] += weight * widened(v[i / group * V + d]);
        }
    }
    for (long i = 0; i < rows * V; i++) result[i] = narrowed(y[i]);
}

/* Row i of the table belongs to row which[i] of the queries and of the results, which sees ends[i] tokens. Where threads outnumber rows,
   each computes some of a row's heads only. */
void attend(const shape *s, const stored *queries, const stored *memory, const int32_t *tables, const int64_t *which, const int64_t *ends,
            const float *sinks, float *room, stored *results) {
    const long group = s->heads / s->shared, K = s->key, V = s->value, share = s->heads * (K + V + s->longest);
    const long wanted = (s->threads + s->rows - 1) / s->rows, parts = wanted < s->shared ? wanted : s->shared;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads) if (s->threads > 1)
    for (long i = 0; i < s->rows * parts; i++) {
        const long row = i / parts, head = i % parts * s->shared / parts, heads = (i % parts + 1) * s->shared / parts - head;
        const long first = head * group;
        const stored *query = queries + which[row] * s->query_row + first * s->query_head;
        const int32_t *table = tables + row * s->tables;
        const float *sink = sinks ? sinks + first : NULL;
        float *space = room + omp_get_thread_num() * share;
        stored *result = results + (which[row] * s->heads + first) * V;
        if (K == 64 && V == 64) look(s, head, heads, 64, 64, query, memory, table, ends[row], sink, space, result);
        else if (K == 128 && V == 128) look(s, head, heads, 128, 128, query, memory, table, ends[row], sink, space, result);
        else look(s, head, heads, K, V, query, memory, table, ends[row], sink, space, result);
    }
}

/* Row i becomes row to[i] of a memory whose rows have all heads one behind the other. */
void store(const stored *rows, long count, long heads, long size, long row, long head, const int64_t *to, stored *memory) {
    for (long i = 0; i < count; i++)
        for (long h = 0; h < heads; h++)
            memcpy(memory + (to[i] * heads + h) * size, rows + i * row + h * head, size * sizeof *rows);
}
