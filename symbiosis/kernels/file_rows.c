/* Matrices of a file, each read once, and put as rows into pages: scaled, in another dtype and on their side, as they are wanted. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int64_t offset, bytes, is_wide, is_transposed, columns, rows, first_run, runs, scale; } Matrix; /* `scale`: the bits of a double */
typedef struct { int64_t row, rows, column, width, at; } Run; /* `at`: elements from the beginning of the pages */

/* In a file, elements may begin anywhere. */
typedef uint16_t half_there __attribute__((aligned(1), may_alias));
typedef float wide_there __attribute__((aligned(1), may_alias));

static inline double scale_of(const Matrix *m) {
    double scale;
    memcpy(&scale, &m->scale, sizeof scale);
    return scale;
}
static inline float of_half(uint16_t e) {
    uint32_t bits = (uint32_t)e << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static inline uint16_t to_half(float f) { /* bfloat16: to the nearest, and to even */
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline float of_wide(float e) { return e; }
static inline float to_wide(float f) { return f; }

#define PUT(NAME, FROM, TO, READ, WRITE)                                                                                  \
    static void NAME(const Matrix *m, const Run *run, const FROM *restrict from, TO *restrict pages) {                    \
        const int64_t step = m->is_transposed ? m->rows : 1, line = m->is_transposed ? 1 : m->columns;                    \
        const float scale = (float)scale_of(m);                                                                         \
        for (int64_t begin = 0; begin < run->width; begin += 64) {                                                        \
            const int64_t end = begin + 64 < run->width ? begin + 64 : run->width;                                        \
            for (int64_t r = 0; r < run->rows; r++) {                                                                     \
                const FROM *restrict row = from + (run->row + r) * line + run->column * step;                             \
                TO *restrict to = pages + run->at + r * run->width;                                                       \
                if (step == 1)                                                                                            \
                    for (int64_t c = begin; c < end; c++) to[c] = WRITE(READ(row[c]) * scale);                            \
                else                                                                                                      \
                    for (int64_t c = begin; c < end; c++) to[c] = WRITE(READ(row[c * step]) * scale);                     \
            }                                                                                                             \
        }                                                                                                                 \
    }

#ifdef BFLOAT16
typedef uint16_t element;
PUT(put_half, half_there, element, of_half, to_half)
PUT(put_wide, wide_there, element, of_wide, to_half)
#else
typedef float element;
PUT(put_half, half_there, element, of_half, to_wide)
PUT(put_wide, wide_there, element, of_wide, to_wide)
#endif

static int read_all(int fd, char *to, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        const ssize_t got = pread(fd, to, bytes, offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? errno : ENODATA;
        to += got, bytes -= got, offset += got;
    }
    return 0;
}

/* Put matrices of a file, or of its contents unless they are NULL, into pages: one after the other, until threads with the same `taken` have
   taken all. Returns 0, or the number of an error. */
int put_matrices(int fd, const char *contents, const Matrix *matrices, int64_t *taken, int64_t count, const Run *runs, element *pages) {
    int64_t most = 0;
    for (int64_t n = 0; n < count && !contents; n++)
        if (matrices[n].bytes > most) most = matrices[n].bytes;
    char *buffer = malloc(most ? most : 1); /* used for one after the other, so it stays in the cache */
    int error = buffer ? 0 : ENOMEM;
    for (int64_t n; !error && (n = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < count;) {
        const Matrix *m = matrices + n;
        const Run *run = runs + m->first_run;
        const int64_t size = (int64_t)sizeof(element), wide = m->is_wide ? 4 : 2;
        const int is_same = wide == size && !m->is_transposed && scale_of(m) == 1.0;
        const char *from = contents ? contents + m->offset : buffer;
        if (!contents && is_same && m->runs == 1 && run->rows == m->rows && run->width == m->columns) {
            error = read_all(fd, (char *)(pages + run->at), m->bytes, m->offset);
            continue;
        }
        if (!contents) error = read_all(fd, buffer, m->bytes, m->offset);
        for (int64_t k = 0; k < m->runs && !error; k++)
            if (m->is_wide)
                put_wide(m, run + k, (const wide_there *)from, pages);
            else
                put_half(m, run + k, (const half_there *)from, pages);
    }
    free(buffer);
    return error;
}
