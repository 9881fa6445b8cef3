/* Crops of byte images whose channels are last: cut, mirrored and, if floats are wanted, normalised in one pass. */

#include <stdint.h>
#include <string.h>

/* Bits of a key for each of the two shifts, as in data/augmentation.py; the top bit is for the flip. */
enum { FIELD = 24 };

/* Images [number][tall][broad][channels] with `side` black pixels around each. Image i of the result is
   images[places[i]]: moved and, if that is wanted, mirrored as the bits keys[i] say, or as it is where
   there are no keys. */
typedef struct {
  const uint8_t *images;
  const int64_t *places;
  const uint64_t *keys;
  int64_t count, number, tall, broad, channels, side, flips;
} Cuts;

static int64_t moved_by(const Cuts *c, uint64_t bits) {
  return (int64_t)(((bits & ((1u << FIELD) - 1)) * (uint64_t)(2 * c->side + 1)) >> FIELD);
}

/* Where the first line of image i begins. */
static const uint8_t *corner(const Cuts *c, int64_t i) {
  int64_t down = c->keys ? moved_by(c, c->keys[i]) : c->side;
  int64_t right = c->keys ? moved_by(c, c->keys[i] >> FIELD) : c->side;
  return c->images + ((c->places[i] * c->tall + down) * c->broad + right) * c->channels;
}

static int is_mirrored(const Cuts *c, int64_t i) { return c->keys && c->flips && c->keys[i] >> 63; }

static int are_there(const Cuts *c) {
  int64_t outside = 0;
  for (int64_t i = 0; i < c->count; i++) outside |= c->places[i] < 0 || c->places[i] >= c->number;
  return !outside;
}

typedef uint8_t B __attribute__((vector_size(16), aligned(1), may_alias));

static void mirror(const uint8_t *line, uint8_t *restrict to, int64_t width, int64_t channels) {
  int64_t x = 0;
#if !defined(__clang__) /* which has no __builtin_shuffle */
  if (channels == 3) {  /* five pixels at once, and a byte before them that is written over */
    const B turned = {13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0};
    for (; x + 6 <= width; x += 5)
      *(B *)(to + 3 * x) = __builtin_shuffle(*(const B *)(line + 3 * (width - 5 - x) - 1), turned);
  }
#endif
  for (; x < width; x++)
    for (int64_t c = 0; c < channels; c++) to[x * channels + c] = line[(width - 1 - x) * channels + c];
}

#define ARGUMENTS                                                                                        \
  const uint8_t *images, const int64_t *places, const uint64_t *keys, int64_t count, int64_t number,     \
      int64_t tall, int64_t broad, int64_t channels, int64_t side, int64_t flips
#define GIVEN {images, places, keys, count, number, tall, broad, channels, side, flips}

/* out [count][height][width][channels]; whether all places are there. */
int cuts(uint8_t *restrict out, ARGUMENTS) {
  const Cuts c = GIVEN;
  const int64_t height = tall - 2 * side, width = broad - 2 * side;
  if (!are_there(&c)) return 0;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *line = corner(&c, i);
    for (int64_t y = 0; y < height; y++, line += broad * channels, out += width * channels)
      if (is_mirrored(&c, i)) mirror(line, out, width, channels);
      else memcpy(out, line, (size_t)(width * channels));
  }
  return 1;
}

/* The same of floats. `scale` and `shift` have one number for each place of a line. To be compiled without fused
   multiply-add, as PyTorch rounds twice. */
int crops(float *restrict out, const float *scale, const float *shift, ARGUMENTS) {
  const Cuts c = GIVEN;
  const int64_t height = tall - 2 * side, width = broad - 2 * side, length = width * channels;
  uint8_t mirrored[length];
  if (!are_there(&c)) return 0;
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *from = corner(&c, i);
    for (int64_t y = 0; y < height; y++, out += length) {
      const uint8_t *line = from + y * broad * channels;
      if (is_mirrored(&c, i)) {
        mirror(line, mirrored, width, channels);
        line = mirrored;
      }
      for (int64_t j = 0; j < length; j++) out[j] = (float)line[j] * scale[j] + shift[j];
    }
  }
  return 1;
}
