// Products of large float32 matrices in pieces of bfloat16, by tiles: C = A B + bias.
//
// B is taken apart once, A by blocks of rows and of the summed axis that stay in the second cache. Of B, 32 columns by
// 128 of the summed axis stay in the first cache while the block of A passes by (Goto & van de Geijn 2008, "Anatomy of
// High-Performance Matrix Multiplication").
#pragma once
#include "pairs.h"

namespace {

#if MOST_PIECES == 3

constexpr int64_t DEPTH = 16, AT_ONCE = 4; // steps of the summed axis in a block, and in the first cache

INLINE vec load_some(const float *x, int64_t n) { return n >= 16 ? load(x) : n <= 0 ? splat(0) : (vec)_mm512_maskz_loadu_ps((1 << n) - 1, x); }

// A tile of a left factor from rows of up to 32 numbers, or of a right one from up to 32 rows of 16; 0 beyond.
static void left_tile(const float *x, int64_t stride, int64_t rows, int64_t columns, float *to) {
  for (int64_t r = 0; r < 16; r++)
    for (int64_t i = 0; i < 32; i += 16) lay<3>(r < rows ? load_some(x + r * stride + i, columns - i) : splat(0), r, i, to);
}
static void right_tile(const float *x, int64_t stride, int64_t rows, int64_t columns, float *to) {
  for (int64_t r = 0; r < 32; r += 2)
    weave<3>(r < rows ? load_some(x + r * stride, columns) : splat(0), r + 1 < rows ? load_some(x + (r + 1) * stride, columns) : splat(0), r, to);
}

static void transpose_tile(const float *from, float *to) {
  for (int64_t r = 0; r < 16; r += 4)
    for (int64_t i = 0; i < 16; i += 4) transpose(from + r * 16 + i, 16, 4, 4, to + i * 16 + r, 16, 4);
}

// The tile at i across and k along the summed axis of a factor, whichever of its axes lies in memory side by side.
static void pack(const Factor &f, bool left, int64_t i, int64_t k, int64_t K, float *to) {
  const float *x = f.data + i * 16 * f.across + k * 32 * f.along;
  const int64_t n = f.size - i * 16, m = K - k * 32;
  const bool along = f.along == 1;
  alignas(64) float turned[3 * TILE];
  float *tile = left == along ? to : turned;
  if (along) left_tile(x, f.across, n, m, tile);
  else right_tile(x, f.along, m, n, tile);
  if (tile == turned)
    for (int64_t p = 0; p < 3; p++) transpose_tile(turned + p * TILE, to + p * TILE);
}

static size_t product_packed(const Product *p) { return ((p->right.size + 31) / 32 * 2) * steps_of(p->K) * 3 * TILE; }
static size_t product_scratch(const Product *p) { return p->block / 16 * DEPTH * 3 * TILE + p->block * 32; }

// 32 columns of the right factor.
static void product_pack(const Product *product, int64_t panel) {
  const Product &p = *product;
  const int64_t steps = steps_of(p.K);
  for (int64_t i = panel * 2; i < panel * 2 + 2; i++)
    for (int64_t k = 0; k < steps; k++) pack(p.right, false, i, k, p.K, p.packed + (i * steps + k) * 3 * TILE);
}

// 32 columns of a block of rows of C to or from a buffer [rows][32]: its rows are often a power of two apart, which
// lie in the same few lines of the first cache.
static void copy_panel(const Product &p, int64_t from, int64_t to, int64_t j, float *sums, bool out) {
  const int64_t columns = min(32, p.right.size - j);
  for (int64_t i = from; i < to; i++) {
    float *c = p.out + i * p.out_row + j, *s = sums + (i - from) * 32;
    memcpy(out ? c : s, out ? s : c, columns * 4);
  }
}

// A block of rows.
static void product_rows(const Product *product, float *scratch, int64_t task) {
  const Product &p = *product;
  const int64_t from = task * p.block, to = min(p.left.size, from + p.block), steps = steps_of(p.K);
  float *sums = scratch + p.block / 16 * DEPTH * 3 * TILE;
  begin_tiles();
  for (int64_t k = 0; k < steps; k += DEPTH) {
    const int64_t depth = min(DEPTH, steps - k);
    for (int64_t i = 0; i < (to - from + 31) / 32 * 2; i++)
      for (int64_t x = 0; x < depth; x++) pack(p.left, true, from / 16 + i, k + x, p.K, scratch + (i * depth + x) * 3 * TILE);
    for (int64_t j = 0; j < p.right.size; j += 32) {
      alignas(64) float bias[32] = {};
      if (p.bias) memcpy(bias, p.bias + j, min(32, p.right.size - j) * 4);
      if (k) copy_panel(p, from, to, j, sums, false);
      for (int64_t x = 0; x < depth; x += AT_ONCE)
        for (int64_t i = 0; i < to - from; i += 32) {
          const Tiles A = {scratch + (i / 16 * depth + x) * 3 * TILE, depth * 3 * TILE, 3 * TILE};
          const Tiles B = {p.packed + (j / 16 * steps + k + x) * 3 * TILE, steps * 3 * TILE, 3 * TILE};
          float *c = sums + i * 32;
          multiply<3, 2, 2>(min(AT_ONCE, depth - x), A, B, c, 32, k + x ? c : bias, k + x ? 32 : 0);
        }
      copy_panel(p, from, to, j, sums, true);
    }
  }
  end_tiles();
  if (!rows_finite({p.out, 0, 0, p.out_row}, Dtype::f32, from * p.out_row, to - from, p.right.size))
    __atomic_store_n(p.non_finite, 1, __ATOMIC_RELAXED);
}

#endif

} // namespace
