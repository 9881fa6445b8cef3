/* rows + P * Q(rows) for stacked clients, block of columns by block: what CodedExchange does with Quantize.

   The codes of all clients for a block of 96 columns stay in the second-level cache, a quarter of the size of the
   numbers they stand for, and are decoded in registers each time they are added. Every operation is rounded as
   PyTorch rounds it, so results are the same bits:

     - compiled without contraction, so that x / scale and the random number are added as two operations;
     - a decoded number times its weight is added by a fused multiply-add, in the order of the row, from zero, as
       embedding_bag's kernels (FBGEMM) do on every processor that has that instruction. */

#if !defined(__AVX2__) || !defined(__FMA__)
#error "written for AVX2 and AVX-512: what GCC makes of the same sums as plain loops is slower than PyTorch"
#endif

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum {
  BLOCK = 96, /* as in transforms/dither.py */
  PARTS = BLOCK / LANES,
  LINE = 16, /* floats */
  AHEAD = 4  /* rows lie too far apart for a processor to guess which is next */
};

typedef float V __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Bits __attribute__((may_alias));
#define INLINE static inline __attribute__((always_inline))

/* As in engine/quantized_mixing.py. */
typedef struct {
  float *rows; /* [clients][columns], `stride` floats from one row to the next */
  int64_t clients, stride, columns;
  const int32_t *starts, *senders; /* P by rows: entries starts[i] to starts[i + 1] are receiver i's */
  const float *weights;
  const uint8_t *silent;  /* clients that keep all they have */
  const uint16_t *random; /* [random_rows][BLOCK], or null: round to the nearest */
  int64_t random_rows;
  const int64_t *turns; /* [blocks][groups] */
  int64_t groups;
  const int64_t *group_of, *place_of; /* of every client */
  float factor;                       /* of a block's largest magnitude: its scale */
} Exchange;

/* LANES codes as floats. */
INLINE V decoded(const int8_t *codes) {
#if defined(__AVX512F__)
  return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#else
  return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#endif
}

INLINE V multiply_add(V a, V b, V c) {
#if defined(__AVX512F__)
  return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

/* To the nearest bfloat16, of two to the even one; for numbers that are not negative. */
INLINE float bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

/* The step of a block; not a number where one of its numbers is not finite, or the step would not be. */
INLINE float scale_of(const float *x, float factor) {
  const Bits *bits = (const Bits *)x;
  int32_t most = 0; /* magnitudes are ordered as their bits, with what is not a number behind infinity */
  for (int i = 0; i < BLOCK; i++) {
    int32_t magnitude = bits[i] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  float largest;
  memcpy(&largest, &most, sizeof most);
  largest *= factor;
  if (!isfinite(largest)) return NAN;
  float scale = bfloat16(largest < 1e-30f ? 1e-30f : largest);
  return isfinite(scale) ? scale : NAN;
}

/* Random numbers are odd multiples of 2^-17. A conversion rounds towards zero, and vectorises, as floorf does not. */
INLINE void round_down_or_up(const float *x, const uint16_t *random, float inverse, int8_t *codes) {
  for (int i = 0; i < BLOCK; i++) {
    float steps = x[i] * inverse + ((float)random[i] * 0x1p-16f + 0x1p-17f);
    int32_t whole = (int32_t)steps;
    codes[i] = (int8_t)(whole - ((float)whole > steps));
  }
}

INLINE void round_to_nearest(const float *x, float inverse, int8_t *codes) {
  for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)__builtin_rintf(x[i] * inverse);
}

INLINE const uint16_t *random_of(const Exchange *e, int64_t client, int64_t block) {
  int64_t row = e->turns[block * e->groups + e->group_of[client]] + e->place_of[client];
  return e->random + (row < e->random_rows ? row : row - e->random_rows) * BLOCK;
}

/* One client's codes and scale; a number that is not finite makes the whole block so, in its scale. */
INLINE void code(const Exchange *e, int64_t client, int64_t block, const float *x, int8_t *codes, float *scale) {
  *scale = e->silent[client] ? 0 : scale_of(x, e->factor);
  if (!(*scale > 0))
    memset(codes, 0, BLOCK);
  else if (e->random)
    round_down_or_up(x, random_of(e, client, block), 1 / *scale, codes);
  else
    round_to_nearest(x, 1 / *scale, codes);
}

static void code_all(const Exchange *e, int64_t block, int64_t width, int8_t *codes, float *scales) {
  float padded[BLOCK] = {0};
  for (int64_t client = 0; client < e->clients; client++) {
    const float *x = e->rows + client * e->stride + block * BLOCK;
    if (client + AHEAD < e->clients)
      for (int64_t i = 0; i < width; i += LINE) __builtin_prefetch(x + AHEAD * e->stride + i);
    if (width < BLOCK) x = memcpy(padded, x, (size_t)width * sizeof *x);
    code(e, client, block, x, codes + client * BLOCK, scales + client);
  }
}

static void add_all(const Exchange *e, int64_t block, int64_t width, const int8_t *codes, const float *scales) {
  for (int64_t client = 0; client < e->clients; client++) {
    V sum[PARTS] = {{0}};
    for (int32_t entry = e->starts[client]; entry < e->starts[client + 1]; entry++) {
      int64_t sender = e->senders[entry];
      V weight = (V){0} + e->weights[entry];
#pragma GCC unroll 12
      for (int p = 0; p < PARTS; p++)
        sum[p] = multiply_add(weight, decoded(codes + sender * BLOCK + p * LANES) * scales[sender], sum[p]);
    }
    float *x = e->rows + client * e->stride + block * BLOCK;
    if (width == BLOCK)
      for (int p = 0; p < PARTS; p++) *(V *)(x + p * LANES) += sum[p];
    else
      for (int64_t i = 0; i < width; i++) x[i] += sum[i / LANES][i % LANES];
  }
}

/* Blocks `first` up to `last`. codes [clients][BLOCK] and scales [clients] are to work in. */
void mix_quantized(const Exchange *e, int64_t first, int64_t last, int8_t *codes, float *scales) {
  for (int64_t block = first; block < last; block++) {
    int64_t left = e->columns - block * BLOCK, width = left < BLOCK ? left : BLOCK;
    code_all(e, block, width, codes, scales);
    add_all(e, block, width, codes, scales);
  }
}
