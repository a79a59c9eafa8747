// Products by the instructions that multiply pairs of bfloat16 and sum in float32, where the processor has them.
//
// A 32-bit word holds two neighbours along the summed axis. A tile is 16 x 16 words: of the left factor 16 rows by 32
// of the summed axis, of the right one 32 of the summed axis (two a row, woven) by 16 columns.
//
// bfloat16 goes in as it is. A float32 goes in as three pieces: it has 24 bits and a bfloat16 8, so x = x0 + x1 + x2
// without a rest. Of the nine products of the pieces of x and y the six largest are summed; those left out are below
// 2^-22 |x y|, about 2^-25 of it, and of either sign (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype For Higher-Precision Computations", arXiv 1904.06376). A tile's product takes a 16th of the
// time that vectors need, so six of them less than half, and round like float32.
//
// The instructions take numbers below 2^-126 as 0, in and out: of a float32 below about 1e-31 the last bits are lost.
#pragma once
#include "block.h"
#include "matmul.h"

namespace {

constexpr int64_t TILE = 256; // words

INLINE int64_t steps_of(int64_t n) { return (n + 31) / 32; } // tiles along n of the summed axis

// A matrix in tiles, its pieces side by side: those of tile i across and k along the summed axis begin at (i, k).
struct Tiles {
  float *data;
  int64_t across, along;

  float *at(int64_t i, int64_t k) const { return data + i * across + k * along; }
};

#if MOST_PIECES

INLINE uvec bits(vec x) { return (uvec)x; }
INLINE vec upper(uvec x) { return (vec)(x & 0xffff0000u); }

// Pieces of x in the upper halves of words; in the lower ones anything. Rounded to nearest but for the first of three,
// which is cut: rounding the largest float32 would give infinity.
template <int PIECES> INLINE void split(vec x, uvec *piece) {
  if constexpr (PIECES == 1) {
    piece[0] = bits(x) + 0x8000u;
  } else {
    piece[0] = bits(x);
    const vec rest = x - upper(piece[0]);
    piece[1] = bits(rest) + 0x8000u;
    piece[2] = bits(rest - upper(piece[1]));
  }
}

// 16 columns of rows r and r + 1 into the right factor's tile `to`.
template <int PIECES> INLINE void weave(vec even, vec odd, int64_t r, float *to) {
  uvec x[PIECES], y[PIECES];
  split<PIECES>(even, x);
  split<PIECES>(odd, y);
  UNROLL for (int p = 0; p < PIECES; p++) store(to + p * TILE + r % 32 / 2 * 16, (vec)((x[p] >> 16) | (y[p] & 0xffff0000u)));
}

// Floats [rows][width] as a right factor, with 0 up to the end of a tile.
template <int PIECES> static void right_factor(const float *x, int64_t rows, int64_t width, Tiles to) {
  for (int64_t r = 0; r < steps_of(rows) * 32; r += 2)
    for (int64_t i = 0; i < width; i += 16)
      weave<PIECES>(r < rows ? load(x + r * width + i) : splat(0), r + 1 < rows ? load(x + (r + 1) * width + i) : splat(0), r,
                    to.at(i / 16, r / 32));
}

// 16 columns from i on of row r into the left factor's tile `to`.
template <int PIECES> INLINE void lay(vec x, int64_t r, int64_t i, float *to) {
  uvec piece[PIECES];
  split<PIECES>(x, piece);
  UNROLL for (int p = 0; p < PIECES; p++)
    _mm256_storeu_si256((__m256i *)(to + p * TILE + r % 16 * 16 + i % 32 / 2), _mm512_cvtepi32_epi16((__m512i)(piece[p] >> 16)));
}

// Row r of a left factor: `width` floats at x, a multiple of 16, with 0 up to the end of a tile.
template <int PIECES> static void left_row(const float *x, int64_t width, int64_t r, Tiles to) {
  for (int64_t i = 0; i < steps_of(width) * 32; i += 16) lay<PIECES>(i < width ? load(x + i) : splat(0), r, i, to.at(r / 16, i / 32));
}

#if MOST_PIECES == 3
// C[M * 16][N * 16] = A B
template <int PIECES, int M, int N> INLINE void multiply(int64_t steps, Tiles A, Tiles B, float *C, int64_t c_stride) {
// Tile t of C is the product of tiles a and b; the compiler wants their numbers as they are.
#define EACH(DO)                                 \
  DO(0, 0, 0, 4, 6)                              \
  if constexpr (N > 1) { DO(1, 0, 1, 4, 7) }     \
  if constexpr (M > 1) { DO(2, 1, 0, 5, 6) }     \
  if constexpr (M > 1 && N > 1) { DO(3, 1, 1, 5, 7) }
#define BEGIN(t, i, j, a, b) _tile_zero(t);
#define MULTIPLY(t, i, j, a, b) _tile_dpbf16ps(t, a, b);
#define END(t, i, j, a, b) _tile_stored(t, C + i * 16 * c_stride + j * 16, c_stride * 4);
#define LEFT(piece)                        \
  _tile_loadd(4, a + piece * TILE, 64);    \
  if constexpr (M > 1) _tile_loadd(5, a + A.across + piece * TILE, 64);
#define RIGHT(piece)                       \
  _tile_loadd(6, b + piece * TILE, 64);    \
  if constexpr (N > 1) _tile_loadd(7, b + B.across + piece * TILE, 64);
  __asm__ volatile("" ::: "memory"); // what was written before is read by the tiles
  EACH(BEGIN)
  for (int64_t k = 0; k < steps; k++) {
    const float *a = A.at(0, k), *b = B.at(0, k);
    if constexpr (PIECES == 3) { // each product shares a factor with the one before it
      LEFT(2) RIGHT(0) EACH(MULTIPLY)
      LEFT(1) EACH(MULTIPLY)
      RIGHT(1) EACH(MULTIPLY)
      LEFT(0) EACH(MULTIPLY)
      RIGHT(2) EACH(MULTIPLY)
      RIGHT(0) EACH(MULTIPLY)
    } else {
      LEFT(0) RIGHT(0) EACH(MULTIPLY)
    }
  }
  EACH(END)
  __asm__ volatile("" ::: "memory");
#undef EACH
#undef BEGIN
#undef MULTIPLY
#undef END
#undef LEFT
#undef RIGHT
}

static void begin_tiles() {
  static const struct alignas(64) { // static: the compiler takes the instruction to read 8 bytes of it
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shape;
  _tile_loadconfig(&shape);
}
static void end_tiles() { _tile_release(); }

#else
template <int PIECES, int M, int N> INLINE void multiply(int64_t steps, Tiles A, Tiles B, float *C, int64_t c_stride) {
  for (int64_t r = 0; r < M * 16; r += 8) {
    vec c[8][N] = {};
    for (int64_t k = 0; k < steps; k++) {
      const float *a = A.at(r / 16, k) + r % 16 * 16, *b = B.at(0, k);
      for (int64_t w = 0; w < 16; w++)
        UNROLL for (int i = 0; i < 8; i++) {
          int32_t word;
          memcpy(&word, a + i * 16 + w, 4);
          const __m512i left = _mm512_set1_epi32(word);
          UNROLL for (int j = 0; j < N; j++)
            c[i][j] = (vec)_mm512_dpbf16_ps((__m512)c[i][j], (__m512bh)left, (__m512bh)load(b + j * B.across + w * 16));
        }
    }
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int j = 0; j < N; j++) store(C + (r + i) * c_stride + j * 16, c[i][j]);
  }
}
static void begin_tiles() {}
static void end_tiles() {}
#endif

// C[m][width] = A B, written up to a multiple of 16 rows; or C = factor C + A B, with a factor for each column, or 1.
template <int PIECES>
static void matmul_tiles(int64_t m, int64_t width, int64_t steps, Tiles A, Tiles B, float *C, int64_t c_stride, bool add,
                         const float *factor) {
  alignas(64) float sums[32 * 32];
  for (int64_t i = 0; i < m; i += 32)
    for (int64_t j = 0; j < width; j += 32) {
      const Tiles a = {A.at(i / 16, 0), A.across, A.along}, b = {B.at(j / 16, 0), B.across, B.along};
      float *c = C + i * c_stride + j, *to = add ? sums : c;
      const int64_t to_stride = add ? 32 : c_stride;
      if (m - i > 16)
        if (width - j > 16) multiply<PIECES, 2, 2>(steps, a, b, to, to_stride);
        else multiply<PIECES, 2, 1>(steps, a, b, to, to_stride);
      else if (width - j > 16) multiply<PIECES, 1, 2>(steps, a, b, to, to_stride);
      else multiply<PIECES, 1, 1>(steps, a, b, to, to_stride);
      if (!add) continue;
      for (int64_t x = 0; x < min(32, width - j); x += 16) {
        const vec by = factor ? load(factor + j + x) : splat(1);
        for (int64_t r = 0; r < min(32, m - i); r++) store(c + r * c_stride + x, load(c + r * c_stride + x) * by + load(sums + r * 32 + x));
      }
    }
}

static void right_factor(int pieces, const float *x, int64_t rows, int64_t width, Tiles to) {
  if constexpr (MOST_PIECES == 3)
    if (pieces == 3) return right_factor<3>(x, rows, width, to);
  right_factor<1>(x, rows, width, to);
}
static void left_row(int pieces, const float *x, int64_t width, int64_t r, Tiles to) {
  if constexpr (MOST_PIECES == 3)
    if (pieces == 3) return left_row<3>(x, width, r, to);
  left_row<1>(x, width, r, to);
}
static void matmul_tiles(int pieces, int64_t m, int64_t width, int64_t steps, Tiles A, Tiles B, float *C, int64_t c_stride, bool add,
                         const float *factor = nullptr) {
  if constexpr (MOST_PIECES == 3)
    if (pieces == 3) return matmul_tiles<3>(m, width, steps, A, B, C, c_stride, add, factor);
  matmul_tiles<1>(m, width, steps, A, B, C, c_stride, add, factor);
}

#else
template <int> INLINE void weave(vec, vec, int64_t, float *) {}
static void begin_tiles() {}
static void end_tiles() {}
static void right_factor(int, const float *, int64_t, int64_t, Tiles) {}
static void left_row(int, const float *, int64_t, int64_t, Tiles) {}
static void matmul_tiles(int, int64_t, int64_t, int64_t, Tiles, Tiles, float *, int64_t, bool, const float * = nullptr) {}
#endif

} // namespace
