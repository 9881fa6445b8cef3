/* mixed = P * messages in place: rows [clients][columns] of floats, P sparse, by rows.

   A chunk of columns of all rows is copied to a buffer that stays in a cache. Sums are made in registers and go straight
   back to their row, while the row's next chunk is fetched: rows lie too far apart for a processor to guess. Products
   are added by fused multiply-adds, from zero, in the order of a row's entries, as PyTorch's embedding_bag does (FBGEMM):
   the same bits, however columns are cut. */

#include <stdint.h>
#include <string.h>

enum { LANES = 16, LINE = 16 /* floats */ };

typedef float V __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* As in engine/exchange/matrix.py. */
typedef struct {
  float *rows; /* `stride` floats from one row to the next */
  int64_t clients, stride;
  const int32_t *starts, *senders; /* entries starts[i] to starts[i + 1] are receiver i's */
  const float *weights;
} Mixing;

/* N vectors of one receiver's sum. */
INLINE void add_senders(const int N, const Mixing *m, int64_t client, const float *buffer, int64_t width, float *out) {
  V sum[N];
  for (int j = 0; j < N; j++) sum[j] = (V){0};
  for (int32_t entry = m->starts[client]; entry < m->starts[client + 1]; entry++) {
    const float *row = buffer + (int64_t)m->senders[entry] * width;
    V weight = (V){0} + m->weights[entry];
    for (int j = 0; j < N; j++) sum[j] = weight * *(const V *)(row + j * LANES) + sum[j];
  }
  for (int j = 0; j < N; j++) *(V *)(out + j * LANES) = sum[j];
}

static void add_rest(const Mixing *m, int64_t client, const float *buffer, int64_t width, float *out, int64_t columns) {
  float sum[LANES] = {0};
  for (int32_t entry = m->starts[client]; entry < m->starts[client + 1]; entry++) {
    const float *row = buffer + (int64_t)m->senders[entry] * width, weight = m->weights[entry];
    for (int64_t c = 0; c < columns; c++) sum[c] = __builtin_fmaf(weight, row[c], sum[c]);
  }
  memcpy(out, sum, (size_t)columns * sizeof *sum);
}

/* Columns `first` up to `last`, `width` at a time. buffer [clients][width] is to work in. */
void mix_rows(const Mixing *m, int64_t first, int64_t last, int64_t width, float *buffer) {
  for (int64_t begin = first; begin < last; begin += width) {
    int64_t columns = last - begin < width ? last - begin : width, rest = last - begin - columns;
    int64_t next = rest < width ? rest : width;
    for (int64_t i = 0; i < m->clients; i++)
      memcpy(buffer + i * width, m->rows + i * m->stride + begin, (size_t)columns * sizeof *buffer);
    for (int64_t i = 0; i < m->clients; i++) {
      float *out = m->rows + i * m->stride + begin;
      for (int64_t c = 0; c < next; c += LINE) __builtin_prefetch(out + columns + c, 0, 2);
      int64_t c = 0;
      for (; c + 8 * LANES <= columns; c += 8 * LANES) add_senders(8, m, i, buffer + c, width, out + c);
      for (; c + 4 * LANES <= columns; c += 4 * LANES) add_senders(4, m, i, buffer + c, width, out + c);
      for (; c + LANES <= columns; c += LANES) add_senders(1, m, i, buffer + c, width, out + c);
      if (c < columns) add_rest(m, i, buffer + c, width, out + c, columns - c);
    }
  }
}
