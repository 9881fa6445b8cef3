/* Convolution with a 5x5 kernel, 2x2 max-pooling and ReLU in one pass, and back.

   On the way forward LANES samples lie innermost, [blocks][channels][height][width][LANES], with
   anything behind the last sample of a batch: every instruction works on LANES samples, however few
   channels a layer has, and what a convolution gives is pooled in registers before it is written.
   On the way back a pool passes its gradient to the one pixel that was chosen, another one in each
   sample, or to none: only these pixels are visited, sample by sample, [height][width][channels],
   where the part of an image that a kernel sees is K runs of K * channels numbers. All sums are
   taken in a fixed order, so results do not depend on threads or on where memory lies.

   What the first layer is given are images, of floats or of bytes. A block of them is laid out where
   it is needed, forward and once more backward: it stays in the processor's cache, and a batch of
   floats, larger than that, is never written. */

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, OUTPUTS = 6 }; /* 32 registers of 16 */
#else
enum { LANES = 8, OUTPUTS = 2 }; /* 16 registers of 8 */
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

/* rows[i][j] becomes rows[j][i]. */
INLINE void transpose(V *rows) {
#if defined(__clang__) /* which has no __builtin_shuffle, and finds its own way */
  V turned[LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) turned[j][i] = rows[i][j];
  memcpy(rows, turned, sizeof turned);
#else
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
    M low, high;
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
      low[j] = j & step ? LANES + j - step : j;
      high[j] = j & step ? LANES + j : j + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & step)) {
        V one = rows[i], other = rows[i + step];
        rows[i] = __builtin_shuffle(one, other, low);
        rows[i + step] = __builtin_shuffle(one, other, high);
      }
  }
#endif
}

/* [samples][height][width][channels] of floats or, if there are scale and shift, of bytes. Those have one
   number for each place of a line. `side` zeros are put around an image on every side. */
typedef struct {
  const void *numbers;
  const float *scale, *shift;
  int64_t channels, height, width, side;
} Images;

static volatile int32_t NOTHING = 0;

/* One line of an image. A byte is multiplied and shifted with two roundings, as PyTorch does: a change of bits that the
   compiler cannot know to be none keeps it from fusing them. */
INLINE void line_of_image(const Images *m, int64_t sample, int64_t y, float *restrict to) {
  const int64_t length = m->width * m->channels, at = (sample * m->height + y) * length;
  if (!m->scale) {
    memcpy(to, (const float *)m->numbers + at, (size_t)length * sizeof(float));
    return;
  }
  const uint8_t *bytes = (const uint8_t *)m->numbers + at;
  const int32_t nothing = NOTHING;
  for (int64_t j = 0; j < length; j++) {
    union {
      float number;
      int32_t bits;
    } product = {(float)bytes[j] * m->scale[j]};
    product.bits ^= nothing;
    to[j] = product.number + m->shift[j];
  }
}

/* Samples from `first` on as a block [channels][lines][columns][LANES], sides included, which are left as
   they are; lanes without a sample have anything. `lines` has room for a line of each, `line` floats apart. */
static void block_of(const Images *m, int64_t first, int64_t some, float *to, float *lines, int64_t line) {
  const int64_t columns = m->width + 2 * m->side, plane = (m->height + 2 * m->side) * columns * LANES;
  const int64_t length = m->width * m->channels;
  for (int64_t y = 0; y < m->height; y++) {
    float *at = to + ((y + m->side) * columns + m->side) * LANES;
    for (int64_t i = 0; i < some; i++) line_of_image(m, first + i, y, lines + i * line);
    for (int64_t start = 0, channel = 0; start < length; start += LANES) {
      V rows[LANES];
      for (int i = 0; i < LANES; i++) rows[i] = load(lines + i * line + start);
      transpose(rows);
      for (int64_t i = 0; i < LANES && start + i < length; i++) {
        store(at + channel * plane, rows[i]);
        if (++channel == m->channels) channel = 0, at += LANES;
      }
    }
  }
}

/* The same samples one after the other, [lines][columns][channels], `image` floats apart. */
static void images_of(const Images *m, int64_t first, int64_t some, float *to, int64_t image) {
  const int64_t line = (m->width + 2 * m->side) * m->channels;
  for (int64_t i = 0; i < some; i++)
    for (int64_t y = 0; y < m->height; y++)
      line_of_image(m, first + i, y, to + i * image + (y + m->side) * line + m->side * m->channels);
}

/* A block [channels][pixels][LANES] to [LANES][image]: each [pixels][channels], and room behind. */
static void block_outermost(const float *from, float *to, int64_t pixels, int64_t channels, int64_t image) {
  for (int64_t start = 0, pixel = 0, channel = 0; start < pixels * channels; start += LANES) {
    V rows[LANES] = {{0}};
    for (int64_t i = 0; i < LANES && pixel < pixels; i++) {
      rows[i] = load(from + (channel * pixels + pixel) * LANES);
      if (++channel == channels) channel = 0, pixel++;
    }
    transpose(rows);
    for (int64_t i = 0; i < LANES; i++) store(to + i * image + start, rows[i]);
  }
}

typedef struct {
  int64_t inputs, outputs, height, width; /* of what is convolved */
  int64_t plane, row;                     /* floats of a channel of a block, of a line of it */
  int64_t high, wide, pooled;             /* of the result; floats of a channel of a block of it */
} Shape;

static Shape shape_of(int64_t inputs, int64_t outputs, int64_t height, int64_t width) {
  int64_t high = (height - K + 1) / 2, wide = (width - K + 1) / 2;
  return (Shape){inputs, outputs, height, width, height * width * LANES, width * LANES, high, wide, high * wide * LANES};
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
        V a = load(line + kx * LANES), b = load(line + (kx + 1) * LANES);
        V c_ = load(below + kx * LANES), d = load(below + (kx + 1) * LANES);
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

/* One block: in [inputs][height][width][LANES]; out, and which pixel was chosen (OFF: none),
   [outputs][high][wide][LANES]. */
static void block_conv_pool_relu(const Shape *s, const float *in, const float *weights, const float *bias, float *out,
                                 uint8_t *chosen) {
  for (int64_t y = 0; y < s->high; y++)
    for (int64_t x = 0; x < s->wide; x++) {
      const float *at = in + 2 * y * s->row + 2 * x * LANES;
      int64_t to = (y * s->wide + x) * LANES;
      for (int64_t first = 0; first < s->outputs;) {
        int64_t left = s->outputs - first, place = first * s->pooled + to;
        const float *w = weights + first * s->inputs * K * K;
#define SOME(count) \
  {                 \
    pooled_pixel(count, s, at, w, bias + first, out + place, chosen + place); \
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

void conv_pool_relu(const float *in, const float *weights, const float *bias, float *out, uint8_t *chosen,
                    int64_t inputs, int64_t outputs, int64_t height, int64_t width, int64_t blocks) {
  const Shape s = shape_of(inputs, outputs, height, width);
  for (int64_t n = 0; n < blocks; n++) {
    int64_t to = n * outputs * s.pooled;
    block_conv_pool_relu(&s, in + n * inputs * s.plane, weights, bias, out + to, chosen + to);
  }
}

static Images images_at(const void *numbers, const float *scale, const float *shift, const Shape *s, int64_t side) {
  return (Images){numbers, scale, shift, s->inputs, s->height - 2 * side, s->width - 2 * side, side};
}

/* Floats of a line of an image and of zeros behind it, so that whole vectors may be read. */
static int64_t strip_of(const Images *m) { return (m->width * m->channels + LANES - 1) / LANES * LANES; }

/* Floats that `first_conv_pool_relu` needs to work in. */
int64_t first_workspace(int64_t inputs, int64_t height, int64_t width) {
  const Shape s = shape_of(inputs, 1, height, width);
  const Images images = images_at(0, 0, 0, &s, 0);
  return inputs * s.plane + LANES * strip_of(&images);
}

/* `conv_pool_relu` of images, whose height and width include `side` zeros on every side. */
void first_conv_pool_relu(const void *numbers, const float *scale, const float *shift, const float *weights,
                          const float *bias, float *out, uint8_t *chosen, float *work, int64_t inputs, int64_t outputs,
                          int64_t height, int64_t width, int64_t side, int64_t samples) {
  const Shape s = shape_of(inputs, outputs, height, width);
  const Images images = images_at(numbers, scale, shift, &s, side);
  const int64_t strip = strip_of(&images);
  float *lines = work + inputs * s.plane;
  memset(side ? work : lines, 0, (size_t)((side ? inputs * s.plane : 0) + LANES * strip) * sizeof(float));
  for (int64_t n = 0; n < samples; n += LANES) {
    int64_t to = n / LANES * outputs * s.pooled;
    block_of(&images, n, samples - n < LANES ? samples - n : LANES, work, lines, strip);
    block_conv_pool_relu(&s, work, weights, bias, out + to, chosen + to);
  }
}

/* Where gradients of the result lie: how far one sample, output, line and pixel is from the next. */
typedef struct {
  int64_t sample, output, line, pixel;
} Steps;

/* Numbers of one sample's image, of one line of a kernel and of all K, with room for whole vectors. */
static int64_t image_of(const Shape *s) { return (s->height * s->width * s->inputs + 2 * LANES - 1) / LANES * LANES; }
static int64_t line_of(const Shape *s) { return (K * s->inputs + LANES - 1) / LANES * LANES; }

/* A gradient, and where the part of an image begins that its pixel was computed from. */
typedef struct {
  int32_t place;
  float slope;
} Visit;

/* What is visited for one output: pool by pool, and sample by sample within it. */
INLINE int64_t visits_of(const Shape *s, const Steps *step, const float *gradient, const uint8_t *chosen, int64_t some,
                         Visit *visits) {
  const int64_t line = s->width * s->inputs, image = image_of(s);
  const int64_t pixel[PIXELS + 1] = {0, s->inputs, line, line + s->inputs, 0};
  int64_t count = 0;
  for (int64_t y = 0; y < s->high; y++)
    for (int64_t x = 0; x < s->wide; x++, chosen += LANES) {
      const float *slope = gradient + y * step->line + x * step->pixel;
      const int64_t place = 2 * y * line + 2 * x * s->inputs;
      for (int64_t i = 0; i < some; i++) {
        visits[count] = (Visit){(int32_t)(i * image + place + pixel[chosen[i]]), slope[i * step->sample]};
        count += chosen[i] != OFF;
      }
    }
  return count;
}

/* Four sums at a time: one would wait for itself. */
INLINE float sum_of(const Visit *visits, int64_t count) {
  float sum[4] = {0};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int k = 0; k < 4; k++) sum[k] += visits[i + k].slope;
  for (; i < count; i++) sum[0] += visits[i].slope;
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* `lines` lines and `wide` vectors of each, of the gradient of one output's kernel. */
INLINE void weights_part(const int lines, const int wide, const float *images, const Visit *visits, int64_t count,
                         float *sums, int64_t image_line, int64_t kernel_line) {
  V sum[K][2] = {{{0}}};
  for (int64_t i = 0; i < count; i++) {
    const float *from = images + visits[i].place;
    float slope = visits[i].slope;
#pragma GCC unroll 5
    for (int k = 0; k < lines; k++)
#pragma GCC unroll 2
      for (int v = 0; v < wide; v++) sum[k][v] += slope * load(from + k * image_line + v * LANES);
  }
  for (int k = 0; k < lines; k++)
    for (int v = 0; v < wide; v++) {
      float *to = sums + k * kernel_line + v * LANES;
      store(to, load(to) + sum[k][v]);
    }
}

/* The same part of what one output's kernel adds to the gradient of the images. */
INLINE void images_part(const int lines, const int wide, float *images, const Visit *visits, int64_t count,
                        const float *weights, int64_t image_line, int64_t kernel_line) {
  V weight[K][2];
  for (int k = 0; k < lines; k++)
    for (int v = 0; v < wide; v++) weight[k][v] = load(weights + k * kernel_line + v * LANES);
  for (int64_t i = 0; i < count; i++) {
    float *to = images + visits[i].place;
    float slope = visits[i].slope;
#pragma GCC unroll 5
    for (int k = 0; k < lines; k++)
#pragma GCC unroll 2
      for (int v = 0; v < wide; v++) {
        float *at = to + k * image_line + v * LANES;
        store(at, load(at) + slope * weight[k][v]);
      }
  }
}

/* All of a kernel in parts that the registers hold. */
#define IN_PARTS(part, images, other)                                                             \
  for (int64_t v = 0; v < kernel_line; v += 2 * LANES) {                                          \
    if (kernel_line - v >= 2 * LANES)                                                             \
      part(K, 2, (images) + v, visits, count, (other) + v, image_line, kernel_line);              \
    else                                                                                          \
      part(K, 1, (images) + v, visits, count, (other) + v, image_line, kernel_line);              \
  }

/* Floats that `conv_pool_relu_backward` needs to work in, and of one sample of the gradient of what was convolved. */
int64_t workspace(int64_t inputs, int64_t outputs, int64_t height, int64_t width) {
  const Shape s = shape_of(inputs, outputs, height, width);
  return LANES * image_of(&s) + 2 * outputs * K * line_of(&s) + 2 * LANES * s.high * s.wide;
}

int64_t image_room(int64_t inputs, int64_t height, int64_t width) {
  const Shape s = shape_of(inputs, 1, height, width);
  return image_of(&s);
}

/* Gradients of weights and bias and, unless it is null, of what was convolved, [samples][image_room] of
   [height][width][inputs]. What was convolved are blocks, `in`, or images with so many zeros on every side. */
void conv_pool_relu_backward(const float *in, const void *numbers, const float *scale, const float *shift,
                             const float *weights, const float *gradient, const uint8_t *chosen, float *of_weights,
                             float *of_bias, float *of_in, float *work, int64_t inputs, int64_t outputs, int64_t height,
                             int64_t width, int64_t side, int64_t samples, int64_t step_sample, int64_t step_output,
                             int64_t step_line, int64_t step_pixel) {
  const Shape s = shape_of(inputs, outputs, height, width);
  const Steps step = {step_sample, step_output, step_line, step_pixel};
  const Images given = images_at(numbers, scale, shift, &s, side);
  const int64_t image = image_of(&s), image_line = width * inputs, kernel_line = line_of(&s), kernel = K * kernel_line;
  float *images = work, *sums = images + LANES * image, *turned = sums + outputs * kernel;
  Visit *visits = (Visit *)(turned + outputs * kernel);
  memset(work, 0, (size_t)((float *)visits - work) * sizeof(float));
  memset(of_bias, 0, (size_t)outputs * sizeof(float));
  for (int64_t c = 0; c < outputs; c++)
    for (int64_t input = 0; input < inputs; input++)
      for (int k = 0; k < K * K; k++)
        turned[c * kernel + k / K * kernel_line + k % K * inputs + input] = weights[(c * inputs + input) * K * K + k];
  for (int64_t n = 0; n < samples; n += LANES) {
    int64_t some = samples - n < LANES ? samples - n : LANES;
    if (in) block_outermost(in + n * height * width * inputs, images, height * width, inputs, image);
    else images_of(&given, n, some, images, image);
    if (of_in) memset(of_in + n * image, 0, (size_t)(some * image) * sizeof(float));
    for (int64_t c = 0; c < outputs; c++) {
      const float *slopes = gradient + n * step.sample + c * step.output;
      const uint8_t *pixels = chosen + n * outputs * s.high * s.wide + c * s.pooled;
      int64_t count = visits_of(&s, &step, slopes, pixels, some, visits);
      of_bias[c] += sum_of(visits, count);
      IN_PARTS(weights_part, images, sums + c * kernel)
      if (of_in) IN_PARTS(images_part, of_in + n * image, turned + c * kernel)
    }
  }
  for (int64_t c = 0; c < outputs; c++)
    for (int64_t input = 0; input < inputs; input++)
      for (int k = 0; k < K * K; k++)
        of_weights[(c * inputs + input) * K * K + k] = sums[c * kernel + k / K * kernel_line + k % K * inputs + input];
}
