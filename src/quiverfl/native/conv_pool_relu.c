/* Convolution with a 5x5 kernel, 2x2 max-pooling and ReLU in one pass, and back.

   The samples of a batch lie innermost, [channels][height][width][samples], their number a multiple
   of LANES (and zeros behind the last): every instruction works on LANES samples, however few channels
   a layer has, and what a convolution gives is pooled in registers before it is written. All sums are
   taken in a fixed order, so results do not depend on threads or on where memory lies. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, OUTPUTS = 6, ROWS = 4 }; /* 32 registers of 16 */
#else
enum { LANES = 8, OUTPUTS = 2, ROWS = 2 }; /* 16 registers of 8 */
#endif
enum { K = 5, PIXELS = 4, OFF = 4 };

typedef float V __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t M __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE V load(const float *from) { return *(const V *)from; }
INLINE void store(float *to, V value) { *(V *)to = value; }
INLINE V either(M which, V yes, V no) { return (V)(((M)yes & which) | ((M)no & ~which)); }
INLINE M either_number(M which, M yes, M no) { return (yes & which) | (no & ~which); }

int lanes(void) { return LANES; }

/* [samples][pixels][channels] to [channels][pixels][wide], with zeros behind the last sample. */
void batch_innermost(const float *from, float *to, int64_t samples, int64_t pixels, int64_t channels, int64_t wide) {
  for (int64_t first = 0; first < wide; first += LANES) {
    int64_t some = samples - first < LANES ? samples - first : LANES;
    const float *sample = from + first * pixels * channels;
    for (int64_t pixel = 0; pixel < pixels; pixel++)
      for (int64_t channel = 0; channel < channels; channel++) {
        V values = {0};
        const float *at = sample + pixel * channels + channel;
        if (some == LANES)
          for (int i = 0; i < LANES; i++) values[i] = at[i * pixels * channels];
        else
          for (int i = 0; i < some; i++) values[i] = at[i * pixels * channels];
        store(to + (channel * pixels + pixel) * wide + first, values);
      }
  }
}

typedef struct {
  int64_t inputs, outputs, height, width, samples; /* of what is convolved */
  int64_t plane, row;                              /* floats of a channel, of a line of it */
  int64_t high, wide, pooled;                      /* of the result; floats of a channel of it */
} Shape;

static Shape shape_of(int64_t inputs, int64_t outputs, int64_t height, int64_t width, int64_t samples) {
  int64_t high = (height - K + 1) / 2, wide = (width - K + 1) / 2;
  return (Shape){inputs, outputs, height, width, samples, height * width * samples, width * samples,
                 high, wide, high * wide * samples};
}

/* `count` outputs of one pooled pixel, for LANES samples. */
INLINE void pooled_pixel(const int count, const Shape *s, const float *in, const float *weights, const float *bias,
                         float *out, uint8_t *chosen) {
  V sum[OUTPUTS][PIXELS];
  for (int c = 0; c < count; c++)
    for (int p = 0; p < PIXELS; p++) sum[c][p] = (V){0} + bias[c];
  for (int64_t input = 0; input < s->inputs; input++)
    for (int ky = 0; ky < K; ky++) {
      const float *line = in + input * s->plane + ky * s->row, *below = line + s->row;
      const float *w = weights + (input * K + ky) * K;
      for (int kx = 0; kx < K; kx++) {
        V a = load(line + kx * s->samples), b = load(line + (kx + 1) * s->samples);
        V c_ = load(below + kx * s->samples), d = load(below + (kx + 1) * s->samples);
#pragma GCC unroll 6
        for (int c = 0; c < count; c++) {
          float weight = w[c * s->inputs * K * K + kx];
          sum[c][0] += weight * a;
          sum[c][1] += weight * b;
          sum[c][2] += weight * c_;
          sum[c][3] += weight * d;
        }
      }
    }
  for (int c = 0; c < count; c++) {
    /* As PyTorch: the first of equals, and what is not a number wins. */
    V best = sum[c][0];
    M at = {0};
    for (int p = 1; p < PIXELS; p++) {
      M more = (sum[c][p] > best) | (sum[c][p] != sum[c][p]);
      best = either(more, sum[c][p], best);
      at = either_number(more, (M){0} + p, at);
    }
    M off = best <= 0;
    store(out + c * s->pooled, either(off, (V){0}, best));
    at = either_number(off, (M){0} + OFF, at);
    for (int i = 0; i < LANES; i++) chosen[c * s->pooled + i] = (uint8_t)at[i];
  }
}

/* in [inputs][height][width][samples]; out, and which pixel was chosen (OFF: none), [outputs][high][wide][samples] */
void conv_pool_relu(const float *in, const float *weights, const float *bias, float *out, uint8_t *chosen,
                    int64_t inputs, int64_t outputs, int64_t height, int64_t width, int64_t samples) {
  const Shape s = shape_of(inputs, outputs, height, width, samples);
  for (int64_t n = 0; n < samples; n += LANES)
    for (int64_t y = 0; y < s.high; y++)
      for (int64_t x = 0; x < s.wide; x++) {
        const float *at = in + 2 * y * s.row + 2 * x * samples + n;
        int64_t to = (y * s.wide + x) * samples + n;
        for (int64_t first = 0; first < outputs;) {
          int64_t left = outputs - first, place = first * s.pooled + to;
          const float *w = weights + first * inputs * K * K;
#define SOME(count) \
  {                 \
    pooled_pixel(count, &s, at, w, bias + first, out + place, chosen + place); \
    first += count; \
  }
#if defined(__AVX512F__)
          if (left >= 6) SOME(6) else if (left >= 4) SOME(4) else
#endif
          if (left >= 2) SOME(2) else SOME(1)
#undef SOME
        }
      }
}

/* The gradient at the convolution's result, of one row of pooled pixels: two lines [outputs][border + 2 wide + border]
   [LANES] for each; it is what was given where a pixel was chosen. */
INLINE void spread(const Shape *s, const float *gradient, const uint8_t *chosen, float *lines, int64_t channel, int64_t line) {
  for (int64_t c = 0; c < s->outputs; c++)
    for (int64_t x = 0; x < s->wide; x++) {
      int64_t place = c * s->pooled + x * s->samples;
      V value = load(gradient + place);
      M at;
      for (int i = 0; i < LANES; i++) at[i] = chosen[place + i];
      for (int p = 0; p < PIXELS; p++)
        store(lines + (p / 2) * line + c * channel + (2 * x + p % 2) * LANES, either(at == p, value, (V){0}));
    }
}

/* One line of pixels' share of the gradients of the K weights of a kernel's line, for `count` outputs. */
INLINE void weights_line(const int count, const float *in, const float *gradient, float *sums, int64_t pixels,
                         int64_t samples, int64_t channel, int64_t output) {
  V sum[ROWS][K];
  for (int c = 0; c < count; c++)
    for (int k = 0; k < K; k++) sum[c][k] = load(sums + c * output + k * LANES);
  for (int64_t x = 0; x < pixels; x++) {
    V value[K];
    for (int k = 0; k < K; k++) value[k] = load(in + (x + k) * samples);
#pragma GCC unroll 4
    for (int c = 0; c < count; c++) {
      V slope = load(gradient + c * channel + x * LANES);
      for (int k = 0; k < K; k++) sum[c][k] += slope * value[k];
    }
  }
  for (int c = 0; c < count; c++)
    for (int k = 0; k < K; k++) store(sums + c * output + k * LANES, sum[c][k]);
}

/* Four pixels of a line of the gradient at `count` inputs. `weights` are [output][ky][kx][input]. */
INLINE void inputs_pixels(const int count, const Shape *s, const float *lines, const float *weights, float *to, int64_t y,
                          int64_t x, int64_t n, int64_t channel, int64_t line) {
  V sum[OUTPUTS][PIXELS] = {{{0}}};
  int64_t least = y - (2 * s->high - 1) > 0 ? y - (2 * s->high - 1) : 0, most = y < K - 1 ? y : K - 1;
  for (int64_t output = 0; output < s->outputs; output++)
    for (int64_t ky = least; ky <= most; ky++) {
      const float *from = lines + (y - ky) * line + output * channel + (x + K - 1) * LANES;
      const float *w = weights + (output * K + ky) * K * s->inputs;
      for (int kx = 0; kx < K; kx++, from -= LANES) {
        V a = load(from), b = load(from + LANES), c_ = load(from + 2 * LANES), d = load(from + 3 * LANES);
#pragma GCC unroll 6
        for (int c = 0; c < count; c++) {
          float weight = w[kx * s->inputs + c];
          sum[c][0] += weight * a;
          sum[c][1] += weight * b;
          sum[c][2] += weight * c_;
          sum[c][3] += weight * d;
        }
      }
    }
  for (int c = 0; c < count; c++)
    for (int p = 0; p < PIXELS && x + p < s->width; p++)
      store(to + c * s->plane + y * s->row + (x + p) * s->samples + n, sum[c][p]);
}

/* A line of the spread gradient has a border on each side, and room for PIXELS at once at its end. */
static int64_t line_length(const Shape *s) { return s->width + 2 * (K - 1) + PIXELS; }

/* Floats that `conv_pool_relu_backward` needs to work in. */
int64_t workspace(int64_t inputs, int64_t outputs, int64_t height, int64_t width) {
  const Shape s = shape_of(inputs, outputs, height, width, LANES);
  int64_t kernel = outputs * inputs * K * K;
  return kernel * LANES + outputs * LANES + 2 * s.high * outputs * line_length(&s) * LANES + kernel;
}

static float over_lanes(const float *values) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += values[i];
  return sum;
}

/* Gradients of weights and bias and, unless it is null, of what was convolved. */
void conv_pool_relu_backward(const float *in, const float *weights, const float *gradient, const uint8_t *chosen,
                             float *of_weights, float *of_bias, float *of_in, float *work, int64_t inputs,
                             int64_t outputs, int64_t height, int64_t width, int64_t samples) {
  const Shape s = shape_of(inputs, outputs, height, width, samples);
  const int64_t kernel = inputs * K * K, output = kernel * LANES;
  const int64_t channel = line_length(&s) * LANES, line = outputs * channel;
  float *sums = work, *bias = sums + outputs * output, *lines = bias + outputs * LANES;
  float *turned = lines + 2 * s.high * line;
  memset(work, 0, (size_t)(turned - work) * sizeof(float));
  if (of_in)
    for (int64_t c = 0; c < outputs; c++)
      for (int64_t input = 0; input < inputs; input++)
        for (int k = 0; k < K * K; k++)
          turned[(c * K * K + k) * inputs + input] = weights[(c * inputs + input) * K * K + k];
  for (int64_t n = 0; n < samples; n += LANES) {
    for (int64_t y = 0; y < 2 * s.high; y++) {
      if (y % 2 == 0) {
        int64_t place = y / 2 * s.wide * samples + n;
        spread(&s, gradient + place, chosen + place, lines + y * line + (K - 1) * LANES, channel, line);
      }
      const float *slopes = lines + y * line + (K - 1) * LANES;
      for (int64_t c = 0; c < outputs; c++) {
        V sum = load(bias + c * LANES);
        for (int64_t x = 0; x < 2 * s.wide; x++) sum += load(slopes + c * channel + x * LANES);
        store(bias + c * LANES, sum);
      }
      for (int64_t input = 0; input < inputs; input++)
        for (int ky = 0; ky < K; ky++) {
          const float *from = in + input * s.plane + (y + ky) * s.row + n;
          float *to = sums + (input * K + ky) * K * LANES;
          for (int64_t c = 0; c < outputs;) {
            int64_t left = outputs - c;
#define SOME(count) \
  {                 \
    weights_line(count, from, slopes + c * channel, to + c * output, 2 * s.wide, samples, channel, output); \
    c += count;     \
  }
#if defined(__AVX512F__)
            if (left == 3 || left == 6 || left == 9) SOME(3) else if (left >= 4) SOME(4) else
#endif
            if (left >= 2) SOME(2) else SOME(1)
#undef SOME
          }
        }
    }
    if (of_in)
      for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x += PIXELS)
          for (int64_t input = 0; input < inputs;) {
            int64_t left = inputs - input;
#define SOME(count) \
  {                 \
    inputs_pixels(count, &s, lines, turned + input, of_in + input * s.plane, y, x, n, channel, line); \
    input += count; \
  }
#if defined(__AVX512F__)
            if (left >= 6) SOME(6) else if (left >= 4) SOME(4) else
#endif
            if (left >= 2) SOME(2) else SOME(1)
#undef SOME
          }
  }
  for (int64_t i = 0; i < outputs * kernel; i++) of_weights[i] = over_lanes(sums + i * LANES);
  for (int64_t c = 0; c < outputs; c++) of_bias[c] = over_lanes(bias + c * LANES);
}
