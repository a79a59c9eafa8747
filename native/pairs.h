// Products of bfloat16 with sums in float32, where the processor has instructions for them.
//
// They multiply pairs: a 32-bit word holds two neighbours along the summed axis. "Words" of a matrix are its rows
// read two numbers at a time; "pairs" of it are [rows / 2][columns] with two rows woven together.
#pragma once
#include "block.h"
#include "matmul.h"

namespace {

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;

INLINE __m512i weave(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}
INLINE __m256i halves(const float *x) { return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x)); }

// pairs[ceil(rows / 2)][width] of floats [rows][width]
static void pairs_of(const float *x, int64_t rows, int64_t width, float *pairs) {
  for (int64_t r = 0; r < rows; r += 2, x += 2 * width, pairs += width)
    for (int64_t i = 0; i < width; i += 16)
      _mm512_storeu_si512(pairs + i, weave(halves(x + i), r + 1 < rows ? halves(x + width + i) : _mm256_setzero_si256()));
}

// words[rows][width / 2] of floats [rows][width]
static void words_of(const float *x, int64_t rows, int64_t width, float *words) {
  for (int64_t i = 0; i < rows * width; i += 16) _mm256_storeu_si256((__m256i *)(words + i / 2), halves(x + i));
}

#if defined(__AMX_BF16__)
// 16 x 16 words a tile; two by two tiles of C at a time.
template <int M, int N>
INLINE void tiles(int64_t K, const float *A, int64_t a_stride, const float *B, int64_t b_stride, float *C, int64_t c_stride, bool add) {
// Tile t of C at (i, j) is the product of tiles a and b; the compiler wants their numbers as they are.
#define EACH(DO)                                 \
  DO(0, 0, 0, 4, 6)                              \
  if constexpr (N > 1) { DO(1, 0, 1, 4, 7) }     \
  if constexpr (M > 1) { DO(2, 1, 0, 5, 6) }     \
  if constexpr (M > 1 && N > 1) { DO(3, 1, 1, 5, 7) }
#define BEGIN(t, i, j, a, b) if (add) _tile_loadd(t, C + i * 16 * c_stride + j * 16, c_stride * 4); else _tile_zero(t);
#define MULTIPLY(t, i, j, a, b) _tile_dpbf16ps(t, a, b);
#define END(t, i, j, a, b) _tile_stored(t, C + i * 16 * c_stride + j * 16, c_stride * 4);
  __asm__ volatile("" ::: "memory"); // what was written before is read by the tiles
  EACH(BEGIN)
  for (int64_t k = 0; k < K; k += 16) {
    _tile_loadd(4, A + k, a_stride * 4);
    if constexpr (M > 1) _tile_loadd(5, A + 16 * a_stride + k, a_stride * 4);
    _tile_loadd(6, B + k * b_stride, b_stride * 4);
    if constexpr (N > 1) _tile_loadd(7, B + k * b_stride + 16, b_stride * 4);
    EACH(MULTIPLY)
  }
  EACH(END)
#undef EACH
#undef BEGIN
#undef MULTIPLY
#undef END
}

static void begin_pairs() {
  static const struct alignas(64) { // static: the compiler takes the instruction to read 8 bytes of it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}
static void end_pairs() { _tile_release(); }
#else
static void begin_pairs() {}
static void end_pairs() {}
#endif

// C[m][width] (+)= A B with A words [m][K], B pairs [K][width]; width is a multiple of 16.
static void matmul_pairs(int64_t m, int64_t width, int64_t K, const float *A, int64_t a_stride, const float *B, int64_t b_stride,
                         float *C, int64_t c_stride, bool add) {
  int64_t i = 0;
#if defined(__AMX_BF16__)
  if (K % 16 == 0)
    for (; i + 16 <= m;) {
      const int64_t rows = m - i >= 32 ? 32 : 16;
      for (int64_t j = 0; j < width;) {
        const float *a = A + i * a_stride, *b = B + j;
        float *c = C + i * c_stride + j;
        if (width - j >= 32) {
          if (rows == 32) tiles<2, 2>(K, a, a_stride, b, b_stride, c, c_stride, add);
          else tiles<1, 2>(K, a, a_stride, b, b_stride, c, c_stride, add);
          j += 32;
        } else {
          if (rows == 32) tiles<2, 1>(K, a, a_stride, b, b_stride, c, c_stride, add);
          else tiles<1, 1>(K, a, a_stride, b, b_stride, c, c_stride, add);
          j += 16;
        }
      }
      i += rows;
    }
#endif
  if (i < m) matmul<false, true>(m - i, width / LANES, K, A + i * a_stride, a_stride, B, b_stride, C + i * c_stride, c_stride, add);
}

#else
constexpr bool HAS_PAIRS = false;
static void pairs_of(const float *, int64_t, int64_t, float *) {}
static void words_of(const float *, int64_t, int64_t, float *) {}
static void begin_pairs() {}
static void end_pairs() {}
static void matmul_pairs(int64_t, int64_t, int64_t, const float *, int64_t, const float *, int64_t, float *, int64_t, bool) {}
#endif

// Whether a problem's products go by pairs: rows of whole words, and enough queries for the packing to pay.
INLINE bool by_pairs(const Problem &p) {
  return HAS_PAIRS && p.dtype == Dtype::bf16 && p.key_splits == 1 && p.E % 2 == 0 && p.Ev % 2 == 0 && p.E > 0 && p.Ev > 0 &&
         p.H / p.Hkv * p.L >= 32;
}

// Keys at a time: their weights and values stay in the first cache. Pairs take more, as adding to C costs them more.
INLINE int64_t keys_at_once(const Problem &p) { return by_pairs(p) ? KEYS : 64; }

// Words of a tensor like the key, turned: [n padded][stride], word w of a row holding keys 2w and 2w + 1. Keys are
// read as blocks come to them; from the last key on there are zeros.
struct Turned {
  float *words = nullptr;
  int64_t stride = 0;
  Reached reached;

  static int64_t size(const Problem &p, int64_t n) { return padded(n) * width(p); }
  static int64_t width(const Problem &p) { return (p.S + 1) / 2 + KEYS / 2; }

  void begin(const Problem &p, float *room, int64_t n) {
    words = room;
    stride = width(p);
    reached = {};
    memset(words, 0, size(p, n) * 4);
  }
  void need(const Problem &p, const Block &k, const View &v, int64_t n, int64_t start, int64_t stop) {
    reached.extend(start - start % 2, min(p.S, stop + stop % 2), [&](int64_t a, int64_t b) { read(p, k, v, n, a, b); });
  }
  void read(const Problem &p, const Block &k, const View &v, int64_t n, int64_t start, int64_t stop) {
    for (int64_t j = start; j < stop; j += 2) {
      const uint16_t *even = (const uint16_t *)v.data + at(v, k.b, k.kv, j), *odd = j + 1 < p.S ? even + v.row : nullptr;
      for (int64_t i = 0; i < n; i++) {
        const uint32_t word = even[i] | (odd ? (uint32_t)odd[i] << 16 : 0);
        memcpy(words + i * stride + j / 2, &word, 4);
      }
    }
  }
};

} // namespace
