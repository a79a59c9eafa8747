// Rows of queries, keys and values as floats: in place where they are, else converted into a buffer.
#pragma once
#include "attention.h"
#include "simd.h"

namespace {

INLINE float from_bf16(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return f != f ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16; // to nearest, ties to even
}
INLINE float from_f16(uint16_t h) { // 10 bits of fraction, 5 of exponent with bias 15
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, u = sign | (rest << 13);
  float f;
  if (rest >= 0x7c00) u |= 0x7f800000; // infinity and NaN
  else if (rest >= 0x400) u += (127 - 15) << 23;
  else { // zero and subnormal
    f = (float)rest * 0x1p-24f;
    return sign ? -f : f;
  }
  memcpy(&f, &u, 4);
  return f;
}
INLINE uint16_t to_f16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint32_t sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00; // NaN
  if (rest >= 0x477ff000) return sign | 0x7c00; // rounds to infinity
  if (rest < 0x38800000) { // subnormal: adding 1/2 leaves the rounded fraction in the low bits
    float x;
    memcpy(&x, &rest, 4);
    x += 0.5f;
    memcpy(&u, &x, 4);
    return sign | (u - 0x3f000000);
  }
  return sign | ((rest + 0xfff + (rest >> 13 & 1) - ((127 - 15) << 23)) >> 13);
}

INLINE int64_t at(const View &v, int64_t b, int64_t h, int64_t row) { return b * v.batch + h * v.head + row * v.row; }

// n numbers from `offset`, times `factor`.
static void read_row(const View &v, Dtype dtype, int64_t offset, int64_t n, float factor, float *to) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    const float *s = (const float *)v.data + offset;
    for (; i < n; i++) to[i] = s[i] * factor;
    return;
  }
  const uint16_t *s = (const uint16_t *)v.data + offset;
  if (dtype == Dtype::bf16) {
    for (; i < n; i++) to[i] = from_bf16(s[i]) * factor;
    return;
  }
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(s + i))) * _mm512_set1_ps(factor));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(s + i))) * _mm256_set1_ps(factor));
#endif
  for (; i < n; i++) to[i] = from_f16(s[i]) * factor;
}

static void write_row(const View &v, Dtype dtype, int64_t offset, int64_t n, float factor, const float *from) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    float *d = (float *)v.data + offset;
    for (; i < n; i++) d[i] = from[i] * factor;
    return;
  }
  uint16_t *d = (uint16_t *)v.data + offset;
  if (dtype == Dtype::bf16) {
    for (; i < n; i++) d[i] = to_bf16(from[i] * factor);
    return;
  }
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i *)(d + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i) * _mm512_set1_ps(factor),
                                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; i++) d[i] = to_f16(from[i] * factor);
}

struct Matrix {
  const float *data;
  int64_t stride;
};

// Rows of n floats that may be read up to a multiple of `reach` numbers: in place, or copied and padded with 0.
static Matrix rows_of(const View &v, Dtype dtype, int64_t offset, int64_t rows, int64_t n, int64_t reach, float *buffer) {
  if (dtype == Dtype::f32 && n % reach == 0) return {(const float *)v.data + offset, v.row};
  int64_t width = (n + reach - 1) / reach * reach;
  for (int64_t r = 0; r < rows; r++) {
    read_row(v, dtype, offset + r * v.row, n, 1.f, buffer + r * width);
    for (int64_t i = n; i < width; i++) buffer[r * width + i] = 0;
  }
  return {buffer, width};
}

static bool rows_finite(const View &v, Dtype dtype, int64_t offset, int64_t rows, int64_t n) {
  if (dtype == Dtype::f32) return all_finite((const float *)v.data + offset, v.row, rows, n);
  const uint16_t limit = dtype == Dtype::bf16 ? 0x7f80 : 0x7c00; // all bits of the exponent
  uint16_t bad = 0;
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t *s = (const uint16_t *)v.data + offset + r * v.row;
    for (int64_t i = 0; i < n; i++) bad |= (s[i] & limit) == limit;
  }
  return !bad;
}

} // namespace
