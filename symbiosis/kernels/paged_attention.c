/* Attention of few rows over keys and values that lie in pages. A page holds some tokens: first their keys, a row of all heads for each
   token, and further on their values. Each is read once, in the order in which it lies there: a sequence is cut into parts, which threads
   compute beside each other, and what they found is put together at the end. Sums are float32, whatever is stored. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#if defined(BFLOAT16)
typedef uint16_t stored;
#elif defined(FLOAT16)
typedef _Float16 stored;
#else
typedef float stored;
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { TILE = 16, WIDEST = 8 }; /* tokens at once; sums of values at once */

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t numbers __attribute__((vector_size(4 * LANES)));
typedef stored few __attribute__((vector_size(sizeof(stored) * LANES)));
#define INLINED static inline __attribute__((always_inline))

typedef struct {
    long sequences, rows;            /* which look, and rows of each */
    long heads, shared, key, value;  /* heads of queries, and of keys; the sizes of a key and of a value */
    long block, page, values_at;     /* tokens of a page; elements of a page, and before its values */
    long query_row, query_head;      /* strides of the queries, in elements */
    long tables;                     /* pages that the table has room for, for each sequence */
    long masked;                     /* tokens that the mask has room for, for each row */
    long window;                     /* tokens that a row sees, itself included; 0: all */
    long parts, threads;             /* into how many a sequence is cut */
    float scaling, softcap;          /* softcap 0: none */
} shape;

typedef struct {
    const stored *queries, *memory;
    const int64_t *addresses; /* of pages; or null, and then `numbers` tells which of the memory they are */
    const int32_t *numbers;
    const int64_t *which, *begins, *ends; /* a sequence's first row; which tokens a row sees, from, and up to; begins may be null */
    const uint8_t *mask;                  /* null, or 0 where a row does not see a token */
    const float *sinks;
    float *room;
    stored *results;
} tensors;

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

INLINED lanes load(const stored *p) {
#if defined(FLOAT16) && defined(__AVX512F__)
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(FLOAT16) && defined(__F16C__)
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(BFLOAT16) && defined(__AVX512F__)
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(BFLOAT16) && defined(__AVX2__)
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    few x;
    memcpy(&x, p, sizeof x);
#ifdef BFLOAT16
    return (lanes)(__builtin_convertvector(x, words) << 16);
#else
    return __builtin_convertvector(x, lanes);
#endif
#endif
}

INLINED lanes floats(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Each vector's sum, for as many vectors as one has lanes: neighbours are added until one number of each is left. */
INLINED lanes added_up(lanes *v) {
#ifndef __clang__
    words even, odd;
    for (int i = 0; i < LANES; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
#pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            v[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) + __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
    return v[0];
#else
    lanes sums = {0};
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) sums[i] += v[i][j];
    return sums;
#endif
}

INLINED lanes chosen(words which, lanes a, lanes b) { return (lanes)((which & (words)a) | (~which & (words)b)); }

INLINED lanes larger(lanes a, lanes b) { return chosen((words)(a > b), a, b); }

INLINED float largest(lanes v) {
#ifndef __clang__
    for (int n = LANES / 2; n; n /= 2) {
        words across;
        for (int i = 0; i < LANES; i++) across[i] = i ^ n;
        v = larger(v, __builtin_shuffle(v, across));
    }
    return v[0];
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* e^x for x <= 0 to a few units in the last place: a power of two by the exponent's bits, the rest by a polynomial. */
INLINED lanes exponentials(lanes x) {
    const lanes least = {0}, bounded = larger(x, least - 87);
    const numbers n = __builtin_convertvector(bounded * 1.44269504f - 0.5f, numbers);
    const lanes whole = __builtin_convertvector(n, lanes), r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r * r + r + 1) * (lanes)((n + 127) << 23);
    return chosen((words)(x == x), (lanes)((words)(x >= least - 87) & (words)p), x);
}

INLINED float exponential(float x) { return exponentials((lanes){0} + x)[0]; }

INLINED lanes capped(lanes x, float softcap) {
    const words sign = {0};
    const lanes e = exponentials((lanes)((words)(x * (2 / softcap)) | (sign + 0x80000000u))); /* of -|2 x / softcap| */
    return (lanes)((words)((1 - e) / (1 + e) * softcap) | ((words)x & (sign + 0x80000000u)));
}

/* Scores of `queries` queries and as many keys as vectors have lanes for. Both numbers are constants where this is inlined: the sums lie in registers. */
INLINED void some_scores(int queries, const float *q, const stored *k, long apart, long K, float *scores) {
    const int tokens = LANES / queries;
    for (int from = 0; from < TILE; from += tokens) {
        lanes sum[LANES];
        for (int i = 0; i < LANES; i++) sum[i] = (lanes){0};
        for (long d = 0; d < K; d += LANES) {
            lanes keys[LANES];
            for (int t = 0; t < tokens; t++) keys[t] = load(k + (from + t) * apart + d);
            for (int i = 0; i < queries; i++) {
                const lanes some = floats(q + i * K + d);
                for (int t = 0; t < tokens; t++) sum[i * tokens + t] += some * keys[t];
            }
        }
        const lanes sums = added_up(sum);
        for (int i = 0; i < queries; i++) memcpy(scores + i * TILE + from, (const float *)&sums + i * tokens, tokens * sizeof(float));
    }
}

/* Scores [queries, TILE] of the queries of one head of keys. */
INLINED void all_scores(long queries, const float *q, const stored *k, long tokens, long apart, long K, float *scores) {
    if (K % LANES || tokens < TILE) {
        for (long i = 0; i < queries; i++)
            for (long t = 0; t < tokens; t++) {
                float sum = 0;
                for (long d = 0; d < K; d++) sum += q[i * K + d] * widened(k[t * apart + d]);
                scores[i * TILE + t] = sum;
            }
        return;
    }
    long i = 0;
    for (; LANES >= 4 && i + 4 <= queries; i += 4) some_scores(4, q + i * K, k, apart, K, scores + i * TILE);
    for (; i + 2 <= queries; i += 2) some_scores(2, q + i * K, k, apart, K, scores + i * TILE);
    for (; i < queries; i++) some_scores(1, q + i * K, k, apart, K, scores + i * TILE);
}

/* Add weights times values to `queries` rows of y, of columns as wide as registers allow. */
INLINED void some_values(int queries, const float *weights, const stored *v, long tokens, long apart, long V, float *y) {
    const int most = WIDEST / queries, wide = V % (most * LANES) ? 1 : most;
    for (long d = 0; d < V; d += wide * LANES) {
        lanes sum[WIDEST];
        for (int i = 0; i < queries; i++)
            for (int c = 0; c < wide; c++) sum[i * wide + c] = floats(y + i * V + d + c * LANES);
        for (long t = 0; t < tokens; t++)
            for (int c = 0; c < wide; c++) {
                const lanes values = load(v + t * apart + d + c * LANES);
                for (int i = 0; i < queries; i++) sum[i * wide + c] += weights[i * TILE + t] * values;
            }
        for (int i = 0; i < queries; i++)
            for (int c = 0; c < wide; c++) memcpy(y + i * V + d + c * LANES, &sum[i * wide + c], sizeof(lanes));
    }
}

INLINED void all_values(long queries, const float *weights, const stored *v, long tokens, long apart, long V, float *y) {
    if (V % LANES) {
        for (long i = 0; i < queries; i++)
            for (long t = 0; t < tokens; t++)
                for (long d = 0; d < V; d++) y[i * V + d] += weights[i * TILE + t] * widened(v[t * apart + d]);
        return;
    }
    long i = 0;
    for (; i + 4 <= queries; i += 4) some_values(4, weights + i * TILE, v, tokens, apart, V, y + i * V);
    for (; i + 2 <= queries; i += 2) some_values(2, weights + i * TILE, v, tokens, apart, V, y + i * V);
    for (; i < queries; i++) some_values(1, weights + i * TILE, v, tokens, apart, V, y + i * V);
}

/* Scores of one query become weights, relative to the largest score so far; what was added up before is made relative to it, too. */
INLINED void weigh(float *scores, float softcap, long seen_from, long seen_to, const uint8_t *mask, long V, float *y, float *most, float *sum) {
    lanes score[TILE / LANES];
    if (softcap)
        for (int t = 0; t < TILE; t += LANES) {
            const lanes some = capped(floats(scores + t), softcap);
            memcpy(scores + t, &some, sizeof some);
        }
    if (seen_from > 0 || seen_to < TILE)
        for (int t = 0; t < TILE; t++) scores[t] = t >= seen_from && t < seen_to ? scores[t] : -INFINITY;
    if (mask)
        for (int t = 0; t < TILE && t < seen_to; t++) scores[t] = mask[t] ? scores[t] : -INFINITY;
    memcpy(score, scores, sizeof score);
    float highest = *most;
    for (int i = 0; i < TILE / LANES; i++) {
        const float some = largest(score[i]);
        highest = some > highest ? some : highest;
    }
    if (highest == -INFINITY) { /* nothing is seen, or what is no number */
        for (int t = 0; t < TILE; t++) *sum += scores[t] != scores[t] ? scores[t] : 0, scores[t] = 0;
        return;
    }
    if (highest != *most) {
        const float shrunk = *most == -INFINITY ? 0 : exponential(*most - highest);
        for (long d = 0; d < V; d++) y[d] *= shrunk;
        *sum *= shrunk;
        *most = highest;
    }
    lanes added[LANES] = {{0}};
    for (int i = 0; i < TILE / LANES; i++) added[0] += score[i] = exponentials(score[i] - highest);
    *sum += added_up(added)[0];
    memcpy(scores, score, sizeof score);
}

INLINED const stored *page_of(const shape *s, const tensors *given, long sequence, long block) {
    const long i = sequence * s->tables + block;
    return given->addresses ? (const stored *)given->addresses[i] : given->memory + given->numbers[i] * s->page;
}

/* From which token on a row sees any. */
INLINED long first_seen(const shape *s, const tensors *given, long row) {
    const long begin = given->begins ? given->begins[row] : 0, end = given->ends[row];
    return s->window && end - s->window > begin ? end - s->window : begin;
}

/* What rows of a sequence see among its tokens `from` to `to`. `room` gets y [heads, V], the largest scores [heads] and the sums of weights
   [heads], where the queries that share a head of keys lie together; `q` has place for them. */
INLINED void look(const shape *s, const tensors *given, long K, long V, long sequence, long from, long to, float *q, float *room) {
    const long group = s->heads / s->shared, queries = group * s->rows, all = s->heads * s->rows, first = sequence * s->rows;
    float *y = room, *most = y + all * V, *sum = most + all, scores[queries * TILE];
    for (long h = 0; h < s->shared; h++)
        for (long i = 0; i < queries; i++) {
            const stored *query = given->queries + (given->which[sequence] + i / group) * s->query_row + (h * group + i % group) * s->query_head;
            for (long d = 0; d < K; d++) q[(h * queries + i) * K + d] = widened(query[d]) * s->scaling;
        }
    memset(y, 0, all * V * sizeof *y);
    for (long i = 0; i < all; i++) most[i] = -INFINITY, sum[i] = 0;
    for (long at = from, tokens; at < to; at += tokens) {
        const long inside = at % s->block, rest = s->block - inside < to - at ? s->block - inside : to - at;
        const stored *page = page_of(s, given, sequence, at / s->block);
        const stored *keys = page + inside * s->shared * K, *values = page + s->values_at + inside * s->shared * V;
        tokens = rest < TILE ? rest : TILE;
        for (long h = 0; h < s->shared; h++) {
            const long one = h * queries;
            all_scores(queries, q + one * K, keys + h * K, tokens, s->shared * K, K, scores);
            for (long i = 0; i < queries; i++) {
                const long row = first + i / group, end = given->ends[row] - at;
                const uint8_t *mask = given->mask ? given->mask + row * s->masked + at : NULL;
                weigh(scores + i * TILE, s->softcap, first_seen(s, given, row) - at, end < tokens ? end : tokens, mask, V, y + (one + i) * V,
                      most + one + i, sum + one + i);
            }
            all_values(queries, scores, values + h * V, tokens, s->shared * V, V, y + one * V);
        }
    }
}

/* One head of one row: what the parts found becomes one result, together with the head's sink if there is one. */
static void put_together(const shape *s, const tensors *given, long sequence, long row, long head, const float *found, long apart) {
    const long group = s->heads / s->shared, V = s->value, all = s->heads * s->rows;
    const long at = (head / group * s->rows + row) * group + head % group;
    float most = given->sinks ? given->sinks[head] : -INFINITY, sum = 0, y[V];
    for (long p = 0; p < s->parts; p++) {
        const float score = found[p * apart + all * V + at];
        most = score > most ? score : most;
    }
    memset(y, 0, sizeof y);
    for (long p = 0; p < s->parts; p++) {
        const float *part = found + p * apart, *scores = part + all * V;
        if (scores[at] == -INFINITY && scores[all + at] == 0) continue;
        const float share = exponential(scores[at] - most);
        sum += share * scores[all + at];
        for (long d = 0; d < V; d++) y[d] += share * part[at * V + d];
    }
    if (given->sinks) sum += exponential(given->sinks[head] - most);
    stored *result = given->results + ((given->which[sequence] + row) * s->heads + head) * V;
    for (long d = 0; d < V; d++) result[d] = narrowed(sum ? y[d] / sum : 0);
}

/* Sequence i has rows which[i], which[i] + 1, ... of the queries and of the results. */
void attend(const shape *s, const tensors *given) {
    const long K = s->key, V = s->value, all = s->heads * s->rows, apart = all * (V + 2);
    float *parts = given->room + s->threads * all * K;
#pragma omp parallel for schedule(dynamic, 1) num_threads(s->threads) if (s->threads > 1)
    for (long i = 0; i < s->sequences * s->parts; i++) {
        const long sequence = i / s->parts, part = i % s->parts;
        long from = INT64_MAX, to = 0;
        for (long row = sequence * s->rows; row < (sequence + 1) * s->rows; row++) {
            const long begin = first_seen(s, given, row);
            from = begin < from ? begin : from, to = given->ends[row] > to ? given->ends[row] : to;
        }
        from -= from % TILE;
        const long tiles = to > from ? (to - from + TILE - 1) / TILE : 0;
        const long begin = from + tiles * part / s->parts * TILE, end = from + tiles * (part + 1) / s->parts * TILE;
        float *q = given->room + omp_get_thread_num() * all * K, *found = parts + i * apart;
        const long last = end < to ? end : to;
        if (K == 64 && V == 64) look(s, given, 64, 64, sequence, begin, last, q, found);
        else if (K == 128 && V == 128) look(s, given, 128, 128, sequence, begin, last, q, found);
        else look(s, given, K, V, sequence, begin, last, q, found);
    }
#pragma omp parallel for schedule(static) num_threads(s->threads) if (s->threads > 1)
    for (long i = 0; i < s->sequences * all; i++)
        put_together(s, given, i / all, i % all / s->heads, i % s->heads, parts + i / all * s->parts * apart, apart);
}

/* Row i becomes row to[i] of a memory whose rows have all heads one behind the other. */
void store(const stored *rows, long count, long heads, long size, long row, long head, const int64_t *to, stored *memory) {
    for (long i = 0; i < count; i++)
        for (long h = 0; h < heads; h++)
            memcpy(memory + (to[i] * heads + h) * size, rows + i * row + h * head, size * sizeof *rows);
}
