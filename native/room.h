// What a task works in: its scratch, the sums of a block of queries, and the scores of a block of keys.
#pragma once
#include "packed.h"

namespace {

// What a block's rows have gathered over the keys so far. Sums are relative to `top`.
struct Sums {
  float *context;           // [ROWS][Ev padded], turned where products go by tiles
  float *top, *sum;         // [ROWS]: the largest score, the sum of e^(score - top)
  float *inverse;           // [ROWS], in the end: what e^(score - top) times this is a weight
  float *surprise, *far;    // [ROWS]: sums of e^(score - top) times (score - top), and times the distance
  float *mass;              // [groups][ROWS]
  float *best, *best_key;   // [top k][ROWS]: the largest scores and (int32) their keys
  float *at;                // [offsets][ROWS]: scores at fixed distances
  float *kept, *kept_tops;  // [S][ROWS], where weights are kept; what they are relative to, for each block of keys
  bool fresh = true;        // no keys yet: context holds nothing

  Sums() = default;
  Sums(const Problem &p, Arena &a) {
    context = a.take(ROWS * padded(p.Ev));
    top = a.take(ROWS);
    sum = a.take(ROWS);
    inverse = a.take(ROWS);
    surprise = a.take(ROWS);
    far = a.take(ROWS);
    mass = a.take(p.seen.groups * ROWS);
    best = a.take(p.seen.top * ROWS);
    best_key = a.take(p.seen.top * ROWS);
    at = a.take(p.seen.offsets * ROWS);
    kept = a.take(keeps_weights(p) ? padded(p.S) * ROWS : 0);
    kept_tops = a.take(keeps_weights(p) ? (p.S / keys_at_once(p) + 1) * ROWS : 0);
  }

  void clear(const Problem &p, const Block &k) {
    for (int64_t r = 0; r < k.width; r++) top[r] = -INF, sum[r] = surprise[r] = far[r] = 0;
    fresh = true;
    for (int64_t i = 0; i < p.seen.groups * ROWS; i++) mass[i] = 0;
    for (int64_t i = 0; i < p.seen.top * ROWS; i++) best[i] = -INF, ((int32_t *)best_key)[i] = -1;
    for (int64_t i = 0; i < p.seen.offsets * ROWS; i++) at[i] = -INF;
  }
};

// Room for one block of rows and one block of keys.
struct Room {
  float *rows, *query; // [ROWS][E padded], [E][width]
  float *P, *grid, *grid_rows, *kept, *keys, *values;
  float *alpha; // [ROWS]
  Factor query_right, P_right;
  Tiles Q;
  Keys key_tiles;
  Turned turned_values;

  Room(const Problem &p, Arena &a)
      : query_right(p, a, p.E, ROWS), P_right(p, a, keys_at_once(p), ROWS), key_tiles(p, a, keys_in_tiles(p), p.E),
        turned_values(p, a, keys_in_tiles(p), p.Ev) {
    const int64_t once = keys_at_once(p), n = min(once, max(p.S, 1));
    rows = a.take(ROWS * padded(p.E));
    query = a.take(ROWS * padded(p.E));
    P = a.take(padded(n) * ROWS);
    grid = a.take(has_grid(p) ? n * ROWS : 0);
    grid_rows = a.take(has_grid(p) ? n * ROWS : 0);
    kept = a.take(p.dropout.on ? n * ROWS : 0);
    keys = a.take(n * padded(p.E));
    values = a.take(max(n, ROWS) * padded(p.Ev));
    alpha = a.take(ROWS);
  }
};

// Keys that a task has found finite.
struct Scan {
  Reached reached;

  void keys(const Problem &p, const Block &k, int64_t start, int64_t stop) {
    if (p.non_finite) reached.extend(start, stop, [&](int64_t a, int64_t b) { check(p, k, a, b); });
  }
  void check(const Problem &p, const Block &k, int64_t start, int64_t stop) {
    if (start >= stop) return;
    if (!rows_finite(p.key, p.dtype, at(p.key, k.b, k.kv, start), stop - start, p.E) ||
        !rows_finite(p.value, p.dtype, at(p.value, k.b, k.kv, start), stop - start, p.Ev))
      report(p);
  }
  static void rows(const Problem &p, const float *rows, int64_t stride, int64_t count, int64_t n) {
    if (p.non_finite && !all_finite(rows, stride, count, n)) report(p);
  }
};

// Scores of M keys and R queries: sums along the features, as most lanes of a vector of queries would stand empty.
template <int M, int R> INLINE void dots(int64_t E, Matrix keys, const float *queries, int64_t stride, float *P, int64_t width) {
  vec sums[M][R] = {};
  for (int64_t e = 0; e < E; e += LANES)
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int r = 0; r < R; r++)
      sums[i][r] += load(keys.data + i * keys.stride + e) * load(queries + r * stride + e);
  UNROLL for (int i = 0; i < M; i++) UNROLL for (int r = 0; r < R; r++) P[i * width + r] = sum(sums[i][r]);
}

constexpr int64_t FEW = 8; // queries whose scores are summed along the features

// Calls n rows into the cache.
INLINE void fetch(const Problem &p, const Block &k, const View &v, int64_t features, int64_t from, int64_t n) {
  const int64_t size = p.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t j = from; j < min(from + n, p.S); j++)
    for (int64_t x = 0; x < features * size; x += 64) __builtin_prefetch((const char *)v.data + at(v, k.b, k.kv, j) * size + x, 0, 2);
}

// The scores of few queries. With many keys their way from memory takes longest: the next run's are called for.
static void few_scores(const Problem &p, const Block &k, const Room &w, int64_t from, int64_t n, float *P) {
  const int64_t E = padded(p.E);
  const Matrix K = rows_of(p.key, p.dtype, at(p.key, k.b, k.kv, from), n, p.E, LANES, w.keys);
  for (int64_t i = 0; i < n * k.width; i += LANES) store(P + i, splat(0));
  for (int64_t j = 0, m; j < n; j += m) {
    m = n - j >= 4 ? 4 : 1;
    if (p.key_splits > 1) {
      fetch(p, k, p.key, p.E, from + j + KEYS, m);
      if (p.context.data) fetch(p, k, p.value, p.Ev, from + j + KEYS, m);
    }
    for (int64_t r = 0; r < k.count;) {
      const Matrix keys = {K.data + j * K.stride, K.stride};
      const float *queries = w.rows + r * E;
      float *to = P + j * k.width + r;
      if (m == 4 && k.count - r >= 4) dots<4, 4>(E, keys, queries, E, to, k.width), r += 4;
      else if (m == 4) dots<4, 1>(E, keys, queries, E, to, k.width), r++;
      else dots<1, 1>(E, keys, queries, E, to, k.width), r++;
    }
  }
}

// The scores of n keys in tiles, in the room of a forward or a backward pass.
template <class R> static void scores_by_tiles(const Problem &p, const Block &k, R &w, int64_t from, int64_t n, float *P) {
  matmul_tiles(p.pieces, n, k.width, steps_of(p.E), w.key_tiles.of(p, k, p.key, from, from + n), w.Q, P, k.width, false);
  if (scales_late(p))
    for (int64_t i = 0; i < n * k.width; i += LANES) store(P + i, load(P + i) * splat(p.scale));
}

// The scores of n keys.
static void scores(const Problem &p, const Block &k, Room &w, int64_t from, int64_t n, float *P) {
  if (p.pieces) return scores_by_tiles(p, k, w, from, n, P);
  if (k.count <= FEW && p.E >= 32) return few_scores(p, k, w, from, n, P);
  Matrix K = rows_of(p.key, p.dtype, at(p.key, k.b, k.kv, from), n, p.E, 1, w.keys);
  matmul<false>(n, k.width / LANES, p.E, K.data, K.stride, w.query, k.width, P, k.width, false);
}

// n scores bent towards the cap; `slopes`, if given: of what comes out by what went in.
static void cap(const Problem &p, int64_t n, float *P, float *slopes) {
  const vec by = splat(1 / p.softcap), most = splat(p.softcap);
  for (int64_t i = 0; i < n; i += LANES) {
    vec slope;
    store(P + i, most * tanh(load(P + i) * by, slope));
    if (slopes) store(slopes + i, slope);
  }
}

// The block's queries, turned; where products go by tiles, in them too.
static void read_queries(const Problem &p, const Block &k, Room &w) {
  read_rows(p, k, p.query, p.E, early_scale(p), w.rows, padded(p.E), w.query);
  Scan::rows(p, w.rows, padded(p.E), k.count, padded(p.E));
  if (p.pieces) w.Q = w.query_right.right(w.query, p.E, k.width);
}

// Scores of n keys, hidden ones -inf; false if the grid hides them all.
static bool masked_scores(const Problem &p, const Block &k, Room &w, int64_t from, int64_t n, float *P) {
  if (has_grid(p) && !read_grid(p, k, from, n, w.grid, w.grid_rows)) return false;
  scores(p, k, w, from, n, P);
  if (p.softcap > 0) cap(p, n * k.width, P, nullptr);
  hide(k, from, n, has_grid(p) ? w.grid : nullptr, P);
  return true;
}

} // namespace
