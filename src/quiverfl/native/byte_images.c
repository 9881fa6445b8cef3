/* Crops of byte images whose channels are last: cut, mirrored and normalised in one pass. */

#include <stdint.h>

/* images [number][tall][broad][channels]; out [count][height][width][channels]. Image i of the result is image
   places[i] from line down[i] and column right[i] on, mirrored where flips[i]. `scale` and `shift` have one number for
   each place of a line. To be compiled without fused multiply-add, as PyTorch rounds twice. */
void crops(const uint8_t *images, const int64_t *places, const int64_t *down, const int64_t *right, const uint8_t *flips,
           const float *scale, const float *shift, float *restrict out, int64_t count, int64_t tall, int64_t broad,
           int64_t height, int64_t width, int64_t channels) {
  const int64_t length = width * channels;
  uint8_t mirrored[length];
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *from = images + ((places[i] * tall + down[i]) * broad + right[i]) * channels;
    if (i + 1 < count) { /* the next image is anywhere: fetch it while this one is done */
      const uint8_t *next = images + (places[i + 1] * tall + down[i + 1]) * broad * channels;
      for (int64_t at = 0; at < height * broad * channels; at += 64) __builtin_prefetch(next + at);
    }
    for (int64_t y = 0; y < height; y++, out += length) {
      const uint8_t *line = from + y * broad * channels;
      if (flips[i]) {
        for (int64_t x = 0; x < width; x++)
          for (int64_t c = 0; c < channels; c++) mirrored[x * channels + c] = line[(width - 1 - x) * channels + c];
        line = mirrored;
      }
      for (int64_t j = 0; j < length; j++) out[j] = (float)line[j] * scale[j] + shift[j];
    }
  }
}
