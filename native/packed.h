// Matrices of a task in tiles: blocks of queries or weights, and the keys and values that the task has come to.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t CHUNK = 768 << 10; // bytes

// Keys at a time: the weights of 64 stay in the first cache. Tiles take more, as adding to the contexts costs them more.
INLINE int64_t keys_at_once(const Problem &p) { return p.pieces ? 128 : 64; }

// As many of the keys [j, to) as are taken at once, cut at the same places wherever j is.
INLINE int64_t next_keys(const Problem &p, int64_t j, int64_t to) { return min(keys_at_once(p) - j % keys_at_once(p), to - j); }

// Keys that stay in the second cache with their values, as they are multiplied.
INLINE int64_t keys_in_chunk(const Problem &p) {
  const int64_t each = (p.E + p.Ev) * (p.pieces ? 2 * p.pieces : p.dtype == Dtype::f32 ? 4 : 2);
  return max(KEYS, CHUNK / max(each, 1) / KEYS * KEYS);
}

// For `received` the weights of a block are kept until their sums are known, if it isn't too many.
INLINE bool keeps_weights(const Problem &p) { return p.seen.received && p.S <= STRIP && p.key_splits == 1; }

// Keys that are in tiles at a time: of few blocks of queries, taking a chunk apart again for the next ones would be long.
INLINE int64_t keys_in_tiles(const Problem &p) { return keeps_weights(p) ? p.S : min(p.S, keys_in_chunk(p)); }

// Blocks of queries that go over a chunk of keys before the next chunk comes; few where their weights are kept.
INLINE int64_t blocks_together(const Problem &p) {
  return keys_in_chunk(p) < p.S ? min(keeps_weights(p) ? 2 : TOGETHER, (p.blocks + p.splits - 1) / p.splits) : 1;
}

// Room for a factor: `summed` numbers along the summed axis, and `across` rows of a left one or columns of a right one.
struct Factor {
  int pieces;
  int64_t steps;
  float *data;

  Factor(const Problem &p, Arena &a, int64_t summed, int64_t across)
      : pieces(p.pieces), steps(steps_of(summed)), data(a.take(pieces * steps * (padded(across) / 16) * TILE)) {}
  Tiles tiles() const { return {data, steps * pieces * TILE, pieces * TILE}; }
  Tiles left(const float *x, int64_t rows, int64_t width) const {
    for (int64_t r = 0; r < rows; r++) left_row(pieces, x + r * width, width, r, tiles());
    return tiles();
  }
  Tiles right(const float *x, int64_t rows, int64_t width) const {
    right_factor(pieces, x, rows, width, tiles());
    return tiles();
  }
};

// A chunk of a tensor like the key, from `base` on, as a left factor whose rows are keys; read as blocks come to them.
struct Keys {
  int64_t n, base = 0;
  Factor factor;
  float *row;
  Reached reached;

  Keys(const Problem &p, Arena &a, int64_t keys, int64_t n) : n(n), factor(p, a, n, keys), row(a.take(padded(n))) {}
  void begin(int64_t first) {
    reached = {};
    base = first;
    for (int64_t i = n; i < padded(n); i++) row[i] = 0;
  }
  // start is a multiple of 16
  Tiles of(const Problem &p, const Block &k, const View &v, int64_t start, int64_t stop) {
    reached.extend(start, stop, [&](int64_t a, int64_t b) {
      for (int64_t j = a; j < b; j++) {
        read_row(v, p.dtype, at(v, k.b, k.kv, j), n, 1, row);
        left_row(factor.pieces, row, padded(n), j - base, factor.tiles());
      }
    });
    const Tiles t = factor.tiles();
    return {t.at((start - base) / 16, 0), t.across, t.along};
  }
};

// The same turned: a left factor whose rows are features. In a chunk of 32 keys that is reached, keys that are not are 0.
struct Turned {
  int pieces;
  int64_t n, height, chunk, base = 0;
  float *words, *rows, *pairs;
  Reached reached;

  Turned(const Problem &p, Arena &a, int64_t keys, int64_t n)
      : pieces(p.pieces), n(n), height(padded(n)), chunk(pieces * (height / 16) * TILE) {
    words = a.take(steps_of(keys) * chunk);
    rows = a.take(pieces ? 32 * height : 0);
    pairs = a.take(chunk);
  }
  void begin(int64_t first) {
    reached = {};
    base = first;
    for (int64_t i = 0; i < 32 * height; i++) rows[i] = 0;
  }
  // start is a multiple of 32
  Tiles of(const Problem &p, const Block &k, const View &v, int64_t start, int64_t stop) {
    reached.extend(start, stop, [&](int64_t a, int64_t b) {
      a -= a % 2; // a word that is half there comes again; beyond stop there may be a NaN that nobody has looked for
      for (int64_t c = a - a % 32; c < b; c += 32) read(p, k, v, c, max(a, c), min(b, c + 32));
    });
    return {words + (start - base) / 32 * chunk, pieces * TILE, chunk};
  }
  void read(const Problem &p, const Block &k, const View &v, int64_t c, int64_t start, int64_t stop) {
    float *to = words + (c - base) / 32 * chunk;
    if (c + 32 <= reached.from || c >= reached.to) memset(to, 0, chunk * 4);
    for (int64_t j = start; j < stop; j++) read_row(v, p.dtype, at(v, k.b, k.kv, j), n, 1, rows + (j - start) * height);
    right_factor(pieces, rows, stop - start, height, {pairs, pieces * TILE, 0});
    // What is 16 columns of 16 words of keys becomes 16 rows.
    for (int64_t t = 0; t < height / 16 * pieces; t++)
      transpose(pairs + t * TILE, 16, (stop - start + 1) / 2, 16, to + t * TILE + (start - c) / 2, 16, (stop - start + 1) / 2);
  }
};

} // namespace
