/* GroupNorm and what follows it in a residual block, in one pass each way; channels are last.

     PLAIN     y = gn(x)                       x, r, y: [samples][pixels][channels]
     RELU      y = relu(gn(x))
     ADD       y = relu(gn(x) + r)
     ADD_NORM  y = relu(gn(x) + gn'(r))        the shortcut has a norm of its own

   A sample is read twice, for its moments and for its result, and stays in the second-level cache between the two.
   Channels fill a vector. Where there are few of them, several pixels lie side by side: a *row* is `lanes` numbers, one
   pixel's channels or those of several. Moments are of differences from the first row, so that a large mean costs no
   digits, and in float32 whatever the numbers are stored in. Backward computes x-hat and the mask of relu again.

   This file includes itself, once for float and once for bfloat16. */
#ifndef OF
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

enum { VECTOR = 16, WIDE = 4 * VECTOR, MOST_LANES = 2048 };
enum { PLAIN, RELU, ADD, ADD_NORM };

typedef float V __attribute__((vector_size(4 * VECTOR)));
typedef int32_t Bits __attribute__((vector_size(4 * VECTOR)));
typedef uint32_t Words __attribute__((vector_size(4 * VECTOR)));
typedef uint16_t Halves __attribute__((vector_size(2 * VECTOR)));
#define INLINE static inline __attribute__((always_inline))
#define SEPARATE static __attribute__((noinline))

/* As in models/compiled.py. */
typedef struct {
  int64_t mode, samples, pixels, channels, groups;
  double eps, other_eps;
  const float *weight, *bias, *other_weight, *other_bias; /* [channels]; the others are gn's of the shortcut */
} Norm;

/* What gn makes of one sample: gn(x) = scale x + shift, x-hat = inverse x + centre, lane by lane. */
typedef struct {
  float inverse[MOST_LANES], centre[MOST_LANES], scale[MOST_LANES], shift[MOST_LANES];
} Affine;

INLINE V load_float(const float *p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store_float(float *p, V x) { memcpy(p, &x, sizeof x); }

INLINE V load_bfloat16(const uint16_t *p) {
  Halves halves;
  memcpy(&halves, p, sizeof halves);
  return (V)(__builtin_convertvector(halves, Words) << 16);
}

/* To the nearest, of two to the even one. What is not a number must stay so: adding could make it zero. */
INLINE void store_bfloat16(uint16_t *p, V x) {
#if defined(__AVX512BF16__)
  __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
#else
  Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, odd = (Words)(x != x);
  Halves halves = __builtin_convertvector((rounded & ~odd) | (odd & 0x7fc0), Halves);
#endif
  memcpy(p, &halves, sizeof halves);
}

/* x where `z` is positive or not a number, as PyTorch's relu and its gradient have it. */
INLINE V where_positive(V x, V z) { return (V)((Bits)x & ~(z <= 0.0f)); }

INLINE V splat(float x) { return x - (V){0}; }

/* Lanes of a row, and how many rows a sample has. */
INLINE int64_t fold(int64_t pixels, int64_t channels, int64_t *rows) {
  int64_t lanes = channels;
  while (lanes < WIDE && pixels % 2 == 0) lanes *= 2, pixels /= 2;
  *rows = pixels;
  return lanes;
}

/* Whether images of this size can be computed here. */
int64_t can_normalise(int64_t pixels, int64_t channels) {
  int64_t rows, lanes = fold(pixels, channels, &rows);
  return rows > 0 && lanes % VECTOR == 0 && lanes <= MOST_LANES;
}

INLINE void repeat(float *x, int64_t channels, int64_t lanes) {
  for (int64_t l = channels; l < lanes; l++) x[l] = x[l - channels];
}

/* Mean and 1 / deviation of every group, from the means and squared differences of its lanes. */
SEPARATE void find_moments(const float *means, const float *squares, int64_t rows, int64_t lanes, int64_t channels,
                           int64_t groups, double eps, float *moments) {
  int64_t each = channels / groups, folds = lanes / channels;
  for (int64_t g = 0; g < groups; g++) {
    float mean = 0, square = 0;
    for (int64_t f = 0; f < folds; f++)
      for (int64_t c = 0; c < each; c++) mean += means[f * channels + g * each + c];
    mean /= (float)(each * folds);
    for (int64_t f = 0; f < folds; f++)
      for (int64_t c = 0; c < each; c++) {
        int64_t l = f * channels + g * each + c;
        float apart = means[l] - mean;
        square += squares[l] + (float)rows * apart * apart;
      }
    if (square < 0) square = 0; /* by rounding; what is not a number stays */
    moments[2 * g] = mean;
    moments[2 * g + 1] = 1.0f / sqrtf(square / (float)(each * folds * rows) + (float)eps);
  }
}

/* Forward and backward both call this one: rounded otherwise, relu could be off in one and on in the other. */
SEPARATE void find_affine(const float *moments, const float *weight, const float *bias, int64_t lanes, int64_t channels,
                          int64_t groups, Affine *a) {
  int64_t each = channels / groups;
  for (int64_t c = 0; c < channels; c++) {
    float mean = moments[2 * (c / each)], inverse = moments[2 * (c / each) + 1];
    a->inverse[c] = inverse, a->centre[c] = -mean * inverse;
    a->scale[c] = weight[c] * inverse, a->shift[c] = bias[c] - mean * a->scale[c];
  }
  repeat(a->inverse, channels, lanes), repeat(a->centre, channels, lanes);
  repeat(a->scale, channels, lanes), repeat(a->shift, channels, lanes);
}

/* Of one sample, from the sums of g and of g x-hat over each lane: gradients of weight and bias, added to what is
   there; and of x, lane by lane: dx = scale g + slope x + offset. */
SEPARATE void find_slopes(const float *weight, const float *moments, float *sums, float *products, float *of_weight,
                          float *of_bias, int64_t rows, int64_t lanes, int64_t channels, int64_t groups, float *slope,
                          float *offset) {
  int64_t each = channels / groups, folds = lanes / channels;
  for (int64_t l = channels; l < lanes; l++) sums[l % channels] += sums[l], products[l % channels] += products[l];
  for (int64_t c = 0; c < channels; c++) of_weight[c] += products[c], of_bias[c] += sums[c];
  for (int64_t g = 0; g < groups; g++) {
    float mean = moments[2 * g], inverse = moments[2 * g + 1], sum = 0, product = 0;
    for (int64_t c = g * each; c < (g + 1) * each; c++) sum += weight[c] * sums[c], product += weight[c] * products[c];
    float factor = -inverse / (float)(each * folds * rows), steep = factor * product * inverse;
    for (int64_t c = g * each; c < (g + 1) * each; c++) slope[c] = steep, offset[c] = factor * sum - steep * mean;
  }
  repeat(slope, channels, lanes), repeat(offset, channels, lanes);
}

#define T float
#define LOAD load_float
#define STORE store_float
#define OF(name) name##_float32
#include "group_norm.c"
#undef T
#undef LOAD
#undef STORE
#undef OF
#define T uint16_t
#define LOAD load_bfloat16
#define STORE store_bfloat16
#define OF(name) name##_bfloat16
#include "group_norm.c"
#else

/* N vectors are in registers at a time: the columns of them, row after row. */
#define EACH_COLUMN for (int64_t c = 0; c < lanes; c += N * VECTOR)
#define EACH_VECTOR for (int j = 0; j < N; j++)
#define EACH_ROW for (int64_t row = 0, q = c; row < rows; row++, q += lanes)

INLINE void OF(moments_of)(const int N, const T *x, int64_t rows, int64_t lanes, int64_t channels, int64_t groups,
                           double eps, float *moments) {
  float means[MOST_LANES], squares[MOST_LANES];
  EACH_COLUMN {
    V first[N], sum[N], square[N];
    EACH_VECTOR first[j] = LOAD(x + c + j * VECTOR), sum[j] = square[j] = splat(0);
    EACH_ROW EACH_VECTOR {
      V apart = LOAD(x + q + j * VECTOR) - first[j];
      sum[j] += apart, square[j] += apart * apart;
    }
    EACH_VECTOR {
      V mean = sum[j] * (1.0f / (float)rows);
      store_float(means + c + j * VECTOR, mean + first[j]);
      store_float(squares + c + j * VECTOR, square[j] - sum[j] * mean);
    }
  }
  find_moments(means, squares, rows, lanes, channels, groups, eps, moments);
}

INLINE void OF(forward)(const int N, const int mode, const Norm *n, int64_t rows, int64_t lanes, const T *x, const T *r,
                        T *y, float *moments) {
  Affine a, b;
  int64_t size = rows * lanes, groups = n->groups, channels = n->channels;
  for (int64_t s = 0; s < n->samples; s++, x += size, y += size, r += mode >= ADD ? size : 0, moments += 2 * groups) {
    OF(moments_of)(N, x, rows, lanes, channels, groups, n->eps, moments);
    find_affine(moments, n->weight, n->bias, lanes, channels, groups, &a);
    if (mode == ADD_NORM) {
      moments += 2 * groups;
      OF(moments_of)(N, r, rows, lanes, channels, groups, n->other_eps, moments);
      find_affine(moments, n->other_weight, n->other_bias, lanes, channels, groups, &b);
      for (int64_t l = 0; l < lanes; l++) a.shift[l] += b.shift[l];
    }
    EACH_COLUMN {
      V scale[N], shift[N], other[N];
      EACH_VECTOR scale[j] = load_float(a.scale + c + j * VECTOR), shift[j] = load_float(a.shift + c + j * VECTOR);
      if (mode == ADD_NORM) EACH_VECTOR other[j] = load_float(b.scale + c + j * VECTOR);
      EACH_ROW EACH_VECTOR {
        int64_t l = q + j * VECTOR;
        V z = scale[j] * LOAD(x + l) + shift[j];
        if (mode == ADD) z += LOAD(r + l);
        if (mode == ADD_NORM) z += other[j] * LOAD(r + l);
        STORE(y + l, mode == PLAIN ? z : where_positive(z, z));
      }
    }
  }
}

/* `g` where relu let it through. ADD looks at y, which the next layer keeps anyway. */
#define MASKED(g, l)                                                                                   \
  (mode == PLAIN  ? (g)                                                                                \
   : mode == RELU ? where_positive(g, scale[j] * LOAD(x + (l)) + shift[j])                             \
   : mode == ADD  ? where_positive(g, LOAD(y + (l)))                                                   \
                  : where_positive(g, (scale[j] * LOAD(x + (l)) + shift[j]) + other[j] * LOAD(r + (l))))

INLINE void OF(backward)(const int N, const int mode, const Norm *n, int64_t rows, int64_t lanes, const T *of_y,
                         const T *x, const T *r, const T *y, const float *moments, T *of_x, T *of_r, float *of_weights) {
  Affine a, b;
  float sums[MOST_LANES], products[MOST_LANES], other_sums[MOST_LANES], other_products[MOST_LANES];
  float slopes[MOST_LANES], offsets[MOST_LANES], other_slopes[MOST_LANES], other_offsets[MOST_LANES];
  int64_t size = rows * lanes, groups = n->groups, channels = n->channels;
  memset(of_weights, 0, (size_t)(mode == ADD_NORM ? 4 : 2) * (size_t)channels * sizeof *of_weights);
  for (int64_t s = 0; s < n->samples; s++) {
    const float *other_moments = moments + 2 * groups;
    find_affine(moments, n->weight, n->bias, lanes, channels, groups, &a);
    if (mode == ADD_NORM) {
      find_affine(other_moments, n->other_weight, n->other_bias, lanes, channels, groups, &b);
      for (int64_t l = 0; l < lanes; l++) a.shift[l] += b.shift[l];
    }
    EACH_COLUMN {
      V sum[N], product[N], other_product[N], inverse[N], centre[N], scale[N], shift[N];
      V other_inverse[N], other_centre[N], other[N];
      EACH_VECTOR {
        int64_t l = c + j * VECTOR;
        sum[j] = product[j] = other_product[j] = splat(0);
        inverse[j] = load_float(a.inverse + l), centre[j] = load_float(a.centre + l);
        scale[j] = load_float(a.scale + l), shift[j] = load_float(a.shift + l);
        if (mode == ADD_NORM) {
          other_inverse[j] = load_float(b.inverse + l), other_centre[j] = load_float(b.centre + l);
          other[j] = load_float(b.scale + l);
        }
      }
      EACH_ROW EACH_VECTOR {
        int64_t l = q + j * VECTOR;
        V g = LOAD(of_y + l);
        g = MASKED(g, l);
        sum[j] += g, product[j] += g * (inverse[j] * LOAD(x + l) + centre[j]);
        if (mode == ADD_NORM) other_product[j] += g * (other_inverse[j] * LOAD(r + l) + other_centre[j]);
      }
      EACH_VECTOR {
        int64_t l = c + j * VECTOR;
        store_float(sums + l, sum[j]), store_float(products + l, product[j]);
        if (mode == ADD_NORM) store_float(other_sums + l, sum[j]), store_float(other_products + l, other_product[j]);
      }
    }
    find_slopes(n->weight, moments, sums, products, of_weights, of_weights + channels, rows, lanes, channels, groups,
                slopes, offsets);
    if (mode == ADD_NORM)
      find_slopes(n->other_weight, other_moments, other_sums, other_products, of_weights + 2 * channels,
                  of_weights + 3 * channels, rows, lanes, channels, groups, other_slopes, other_offsets);
    EACH_COLUMN {
      V scale[N], shift[N], slope[N], offset[N], other[N], other_slope[N], other_offset[N];
      EACH_VECTOR {
        int64_t l = c + j * VECTOR;
        scale[j] = load_float(a.scale + l), shift[j] = load_float(a.shift + l);
        slope[j] = load_float(slopes + l), offset[j] = load_float(offsets + l);
        if (mode == ADD_NORM) {
          other[j] = load_float(b.scale + l);
          other_slope[j] = load_float(other_slopes + l), other_offset[j] = load_float(other_offsets + l);
        }
      }
      EACH_ROW EACH_VECTOR {
        int64_t l = q + j * VECTOR;
        V g = LOAD(of_y + l);
        g = MASKED(g, l);
        if (mode == ADD) STORE(of_r + l, g);
        if (mode == ADD_NORM) STORE(of_r + l, other[j] * g + (other_slope[j] * LOAD(r + l) + other_offset[j]));
        STORE(of_x + l, scale[j] * g + (slope[j] * LOAD(x + l) + offset[j]));
      }
    }
    of_y += size, x += size, of_x += size, moments += (mode == ADD_NORM ? 4 : 2) * groups;
    if (mode >= ADD) r += size, of_r += size, y += size;
  }
}

/* Two widths and four modes, each compiled by itself. */
#define CHOOSE(CALL)                                                  \
  do {                                                                \
    int64_t rows, lanes = fold(n->pixels, n->channels, &rows);        \
    if (lanes % WIDE == 0) {                                          \
      if (n->mode == PLAIN) CALL(4, PLAIN);                           \
      if (n->mode == RELU) CALL(4, RELU);                             \
      if (n->mode == ADD) CALL(4, ADD);                               \
      if (n->mode == ADD_NORM) CALL(4, ADD_NORM);                     \
    } else {                                                          \
      if (n->mode == PLAIN) CALL(1, PLAIN);                           \
      if (n->mode == RELU) CALL(1, RELU);                             \
      if (n->mode == ADD) CALL(1, ADD);                               \
      if (n->mode == ADD_NORM) CALL(1, ADD_NORM);                     \
    }                                                                 \
  } while (0)

/* moments [samples][1 or 2 norms][groups][2] are kept for the way back. */
void OF(group_norm)(const Norm *n, const T *x, const T *r, T *y, float *moments) {
#define CALL(N, mode) OF(forward)(N, mode, n, rows, lanes, x, r, y, moments)
  CHOOSE(CALL);
#undef CALL
}

/* of_weights [1 or 2 norms][weight, bias][channels]; y of ADD alone, of_r of ADD and ADD_NORM. */
void OF(group_norm_backward)(const Norm *n, const T *of_y, const T *x, const T *r, const T *y, const float *moments,
                             T *of_x, T *of_r, float *of_weights) {
#define CALL(N, mode) OF(backward)(N, mode, n, rows, lanes, of_y, x, r, y, moments, of_x, of_r, of_weights)
  CHOOSE(CALL);
#undef CALL
}

#undef EACH_COLUMN
#undef EACH_VECTOR
#undef EACH_ROW
#undef MASKED
#undef CHOOSE
#endif
