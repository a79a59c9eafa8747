// A block of up to 64 query rows of one key/value head, and what each of them may see.
//
// Scores of a block are kept turned, [key][row]: a vector holds one key and many queries, so softmax needs no sums
// across a vector, and a mask is a comparison of vectors. The query heads that share a key/value head are laid one
// after another: row r is (head of the group, query) = divmod(r, L).
#pragma once
#include "rows.h"

namespace {

// Hands out parts of a task's scratch; without a base it only counts.
struct Arena {
  float *base;
  int64_t used = 0;
  float *take(int64_t n) {
    float *part = base ? base + used : nullptr;
    used += (n + 15) / 16 * 16;
    return part;
  }
};

// What `Problem::pieces` is for a forward pass. Taking numbers apart pays from some queries, keys and features on, by
// measurement; where rows see a part of the keys, from twice as many.
static int forward_pieces(const Problem *problem) {
  const Problem &p = *problem;
  const int64_t rows = p.H / p.Hkv * p.L;
  if (p.key_splits != 1 || rows < 32 || p.E < 1 || p.Ev < 1) return 0;
  if (p.dtype == Dtype::bf16) return min(MOST_PIECES, 1);
  const Masking &m = p.mask;
  const int64_t enough = m.left > -p.L || m.right < p.S - 1 || m.first.data || m.behind.data ? 1024 : 512;
  return MOST_PIECES == 3 && rows >= enough && p.S >= enough && p.E >= 24 && p.Ev >= 24 ? 3 : 0;
}

// Of a backward pass: taking weights and their gradients apart, both ways, costs what the products gain.
static int backward_pieces(const Problem *p) { return p->dtype == Dtype::bf16 ? forward_pieces(p) : 0; }

// Whether scores are scaled after they are summed: bfloat16 queries times a scale that is no power of two would be rounded.
INLINE bool scales_late(const Problem &p) {
  uint32_t bits;
  memcpy(&bits, &p.scale, 4);
  return p.pieces == 1 && bits & 0x7fffff;
}
INLINE float early_scale(const Problem &p) { return scales_late(p) ? 1 : p.scale; } // of the queries

struct Block {
  int64_t b, kv;                  // batch item, key/value head
  int64_t first, count, width;    // rows [first, first + count), padded to a multiple of the vector
  int64_t from, to;               // keys that any row may see by its interval
  int64_t open_from, open_to;     // keys that every row sees by its interval
  int64_t least, most;            // queries
  int32_t low[ROWS], high[ROWS];  // each row's interval
  int32_t head[ROWS], query[ROWS];
  uint32_t dice[ROWS];            // of the dropout
  bool dead[ROWS];                // sees nothing, by its interval

  int64_t row(const Problem &p, int64_t r) const { return (b * p.H + head[r]) * p.L + query[r]; }
};

INLINE uint32_t hash(uint32_t x) { // a bijection: lowbias32 of C. Wellons' search ("hash-prospector")
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}
INLINE uvec hash(uvec x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Rows [first, first + count) of the task_head'th of the B x Hkv key/value heads.
static void begin(const Problem &p, Block &k, int64_t task_head, int64_t first, int64_t count) {
  const int64_t group = p.H / p.Hkv;
  k.b = task_head / p.Hkv;
  k.kv = task_head % p.Hkv;
  k.first = first;
  k.count = count;
  k.width = padded(k.count);
  k.from = p.S;
  k.to = k.open_from = 0;
  k.open_to = p.S;
  k.least = p.L, k.most = 0;
  int64_t g = k.first / p.L, q = k.first % p.L;
  const Masking &m = p.mask;
  for (int64_t r = 0; r < k.width; r++) {
    int64_t low = 0, high = p.S;
    k.dead[r] = true;
    if (r < k.count) {
      k.head[r] = k.kv * group + g;
      k.query[r] = q;
      k.least = min(k.least, q), k.most = max(k.most, q);
      low = max(low, q + m.left);
      high = min(high, q + m.right + 1);
      if (m.first.data) low = max(low, ((const int64_t *)m.first.data)[k.b * m.first.batch + q * m.first.query]);
      if (m.behind.data) high = min(high, ((const int64_t *)m.behind.data)[k.b * m.behind.batch + q * m.behind.query]);
      if (p.dropout.on) {
        uint32_t dice = hash(p.dropout.seed0 ^ (uint32_t)(k.b + p.dropout.batch));
        dice = hash(dice ^ (uint32_t)k.head[r]);
        k.dice[r] = hash(hash(dice ^ (uint32_t)(q + p.dropout.query)) ^ p.dropout.seed1);
      }
      k.dead[r] = high <= low;
      if (!k.dead[r]) {
        k.from = min(k.from, low);
        k.to = max(k.to, high);
        k.open_from = max(k.open_from, low);
        k.open_to = min(k.open_to, high);
      }
      if (++q == p.L) q = 0, g++;
    } else {
      k.head[r] = k.query[r] = k.dice[r] = 0;
    }
    // Dead rows and padding compute harmless zeros.
    k.low[r] = k.dead[r] ? 0 : low;
    k.high[r] = k.dead[r] ? p.S : high;
  }
  if (p.pieces) k.from -= k.from % 32; // where a tile begins; what a row doesn't see of it is hidden
}

// The block'th of a key/value head.
static void begin(const Problem &p, Block &k, int64_t task_head, int64_t block) {
  begin(p, k, task_head, block * ROWS, min(ROWS, p.H / p.Hkv * p.L - block * ROWS));
}

// A run of keys that a task has read already.
struct Reached {
  int64_t from = 0, to = 0;

  // read(start, stop) of what is new in [start, stop); what doesn't touch it is forgotten.
  template <class F> void extend(int64_t start, int64_t stop, F read) {
    if (start >= stop) return;
    if (from == to || start > to || stop < from) from = to = start;
    if (start < from) read(start, from);
    if (stop > to) read(to, stop);
    from = min(from, start);
    to = max(to, stop);
  }
};

// The block's rows of a tensor like the query, times factor: rows[count][stride] and turned [n][width].
static void read_rows(const Problem &p, const Block &k, const View &v, int64_t n, float factor, float *rows,
                      int64_t stride, float *turned) {
  for (int64_t r = 0; r < k.width; r++) {
    float *to = rows + r * stride;
    int64_t i = 0;
    if (!k.dead[r]) {
      read_row(v, p.dtype, at(v, k.b, k.head[r], k.query[r]), n, factor, to);
      i = n;
    }
    for (; i < stride; i++) to[i] = 0;
  }
  transpose(rows, stride, k.width, n, turned, k.width, k.width);
}

INLINE bool has_grid(const Problem &p) { return p.mask.visible.data || p.mask.bias.data; }

INLINE float bias_at(const Problem &p, int64_t offset) {
  const void *data = p.mask.bias.data;
  if (p.mask.bias_dtype == Dtype::f32) return ((const float *)data)[offset];
  uint16_t h = ((const uint16_t *)data)[offset];
  return p.mask.bias_dtype == Dtype::bf16 ? from_bf16(h) : from_f16(h);
}

// One row of what `visible` and the bias add to the scores: -inf where hidden.
static void grid_row(const Problem &p, const Block &k, int64_t r, int64_t from, int64_t n, float *to) {
  const Grid &v = p.mask.visible, &a = p.mask.bias;
  if (a.data) {
    int64_t o = k.b * a.batch + k.head[r] * a.head + k.query[r] * a.query + from * a.key;
    if (p.mask.bias_dtype == Dtype::f32 && a.key == 1) {
      const float *s = (const float *)a.data + o;
      for (int64_t j = 0; j < n; j++) to[j] = s[j];
    } else
      for (int64_t j = 0; j < n; j++) to[j] = bias_at(p, o + j * a.key);
  } else
    for (int64_t j = 0; j < n; j++) to[j] = 0;
  if (v.data) {
    const uint8_t *s = (const uint8_t *)v.data + k.b * v.batch + k.head[r] * v.head + k.query[r] * v.query + from * v.key;
    if (v.key == 1)
      for (int64_t j = 0; j < n; j++) to[j] = s[j] ? to[j] : -INF;
    else
      for (int64_t j = 0; j < n; j++) to[j] = s[j * v.key] ? to[j] : -INF;
  }
}

// A NaN or infinity that a query could see is for the caller to deal with.
INLINE void report(const Problem &p) {
  if (p.non_finite) __atomic_store_n(p.non_finite, 1, __ATOMIC_RELAXED);
}
INLINE bool hopeless(const Problem &p) { return p.non_finite && __atomic_load_n(p.non_finite, __ATOMIC_RELAXED); }

// What `visible` and the bias add to the scores of n keys, turned: grid[n][width]. False if that hides them all.
// rows: room for width x n.
static bool read_grid(const Problem &p, const Block &k, int64_t from, int64_t n, float *grid, float *rows) {
  const Grid &v = p.mask.visible, &a = p.mask.bias;
  // A tensor without axes of heads and queries (padding): one row says it all.
  const bool same = !v.head && !v.query && !a.head && !a.query;
  int64_t count = same ? 1 : k.count;
  ivec seen = isplat(0);
  float top = -INF;
  for (int64_t r = 0; r < count; r++) {
    float *to = rows + r * n;
    grid_row(p, k, r, from, n, to);
    int64_t j = 0;
    for (; j + LANES <= n; j += LANES) seen |= load(to + j) > splat(-INF);
    for (; j < n; j++) top = to[j] > top ? to[j] : top;
    if (a.data)
      for (j = 0; j < n; j++)
        if (!(to[j] < INF)) report(p);
  }
  if (!any(seen) && top == -INF) return false;
  if (same)
    for (int64_t j = 0; j < n; j++)
      for (int64_t r = 0; r < k.width; r += LANES) store(grid + j * k.width + r, splat(rows[j]));
  else
    transpose(rows, n, k.count, n, grid, k.width, k.width);
  return true;
}

// Hides what intervals and grid hide: P[key][row] = -inf.
static void hide(const Block &k, int64_t from, int64_t n, const float *grid, float *P) {
  if (grid)
    for (int64_t i = 0; i < n * k.width; i += LANES) {
      vec g = load(grid + i), s = load(P + i) + g;
      store(P + i, g == splat(-INF) ? g : s); // not by the sum: an overflow plus -inf would be NaN
    }
  if (from >= k.open_from && from + n <= k.open_to) return;
  for (int64_t r = 0; r < k.width; r += LANES) {
    ivec low = iload(k.low + r), high = iload(k.high + r);
    for (int64_t j = 0; j < n; j++) {
      ivec key = isplat((int32_t)(from + j));
      float *s = P + j * k.width + r;
      store(s, ((key >= low) & (key < high)) ? load(s) : splat(-INF));
    }
  }
}

// Which weights of one key are kept, a lane for each row.
INLINE ivec kept(const Problem &p, const Block &k, int64_t key, int64_t r) {
  uvec dice = (uvec)iload((const int32_t *)k.dice + r);
  return (ivec)hash(dice ^ (uvec)isplat((int32_t)(key + p.dropout.key))) >= isplat(p.dropout.threshold);
}

} // namespace
