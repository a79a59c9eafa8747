// A vector of floats as wide as the processor's, by GCC's and Clang's vector extensions.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX2__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif

// Pieces of bfloat16 that a number can be multiplied as, at most (tiles.h); 0: there are no such products.
#if defined(__AMX_BF16__)
#define MOST_PIECES 3
#elif defined(__AVX512BF16__)
#define MOST_PIECES 1
#else
#define MOST_PIECES 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

const float INF = __builtin_inff();

INLINE vec splat(float x) { return x - vec{}; }
INLINE ivec isplat(int32_t x) { return x - ivec{}; }
INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE ivec iload(const int32_t *p) { return *(const ivec *)p; }
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec vmax(vec a, vec b) { return a > b ? a : b; }

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE float sum(vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float half[LANES];
  memcpy(half, &x, sizeof x);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) half[i] += half[i + n];
  return half[0];
}

INLINE bool any(ivec mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// e^x for x <= 0; below 2^-126 it is 0, NaN stays NaN, and e^0 is exactly 1.
// e^x = 2^(n + r), and (2^r - 1) / r by a Chebyshev fit of degree 5 on [-1/2, 1/2]. Needs IEEE rules: no -ffast-math.
INLINE vec exp(vec x) {
  const vec least = splat(-126.f);
  x = x * splat(1.44269504f);
#if defined(__AVX512F__)
  vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const vec magic = splat(12582912.f); // adding 1.5 * 2^23 rounds to an integer
  vec y = x < least ? least : x;
  vec n = y + magic;
  n = n - magic;
#endif
  vec r = x - n;
  vec p = splat(0x1.444004p-13f);
  p = p * r + splat(0x1.5f0896p-10f);
  p = p * r + splat(0x1.3b2a1cp-7f);
  p = p * r + splat(0x1.c6af6cp-5f);
  p = p * r + splat(0x1.ebfbe0p-3f);
  p = p * r + splat(0x1.62e430p-1f);
  p = p * r + splat(1.f);
#if defined(__AVX512F__)
  return (vec)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
  ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec power;
  memcpy(&power, &bits, sizeof power);
  return x < least ? splat(0) : p * power;
#endif
}

// tanh of x, and its slope there: 1 - tanh^2, not as a difference where that is small. A Chebyshev fit of
// (tanh(x) / x - 1) / x^2 in x^2 below 0.65, and (1 - e) / (1 + e) with e = e^(-2 |x|) above.
INLINE vec tanh(vec x, vec &slope) {
  const vec size = vmax(x, -x), square = x * x, one = splat(1);
  vec p = splat(0x1.224fcep-9f);
  p = p * square + splat(-0x1.0f1266p-7f);
  p = p * square + splat(0x1.644a1ep-6f);
  p = p * square + splat(-0x1.ba02aap-5f);
  p = p * square + splat(0x1.1110d8p-3f);
  p = p * square + splat(-0x1.555556p-2f);
  const vec near = x + x * (square * p), e = exp(splat(-2) * size), by = one / (one + e);
  const vec far = (one - e) * by;
  const ivec is_near = size < splat(0.65f);
  slope = is_near ? one - near * near : splat(4) * e * (by * by);
  return is_near ? near : x < splat(0) ? -far : far;
}

INLINE bool finite(float x) { return x - x == 0; }

// Whether rows x n floats are all finite: a sum of x * 0 is 0 only then.
static bool all_finite(const float *x, int64_t stride, int64_t rows, int64_t n) {
  vec a = splat(0), b = splat(0);
  float rest = 0;
  if (stride == n) n *= rows, rows = 1; // one run: narrow rows would be read number by number
  for (int64_t r = 0; r < rows; r++, x += stride) {
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
      a += load(x + i) * splat(0);
      b += load(x + i + LANES) * splat(0);
    }
    for (; i + LANES <= n; i += LANES) a += load(x + i) * splat(0);
    for (; i < n; i++) rest += x[i] * 0;
  }
  return sum(a + b) + rest == 0;
}

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec4 __attribute__((vector_size(16)));
#if defined(__clang__)
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, ivec4{i, j, k, l})
#endif

// to[n][to_stride] = from[rows][n] transposed; columns rows .. columns are filled with 0.
static void transpose(const float *from, int64_t stride, int64_t rows, int64_t n, float *to, int64_t to_stride,
                      int64_t columns) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float *s = from + r * stride;
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      vec4 a = *(const vec4 *)(s + i), b = *(const vec4 *)(s + stride + i);
      vec4 c = *(const vec4 *)(s + 2 * stride + i), d = *(const vec4 *)(s + 3 * stride + i);
      vec4 ab0 = PICK(a, b, 0, 4, 1, 5), ab1 = PICK(a, b, 2, 6, 3, 7);
      vec4 cd0 = PICK(c, d, 0, 4, 1, 5), cd1 = PICK(c, d, 2, 6, 3, 7);
      float *t = to + i * to_stride + r;
      *(vec4 *)t = PICK(ab0, cd0, 0, 1, 4, 5);
      *(vec4 *)(t + to_stride) = PICK(ab0, cd0, 2, 3, 6, 7);
      *(vec4 *)(t + 2 * to_stride) = PICK(ab1, cd1, 0, 1, 4, 5);
      *(vec4 *)(t + 3 * to_stride) = PICK(ab1, cd1, 2, 3, 6, 7);
    }
    for (; i < n; i++)
      for (int64_t x = 0; x < 4; x++) to[i * to_stride + r + x] = s[x * stride + i];
  }
  for (; r < rows; r++)
    for (int64_t i = 0; i < n; i++) to[i * to_stride + r] = from[r * stride + i];
  for (; r < columns; r++)
    for (int64_t i = 0; i < n; i++) to[i * to_stride + r] = 0;
}

} // namespace
