// The forward pass: an online softmax over blocks of keys (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
// 2022, arXiv 2205.14135), and the statistics of the weights in the same pass.
#pragma once
#include "pairs.h"

namespace {

// Hands out pieces of a task's scratch; without a base it only counts.
struct Arena {
  float *base;
  int64_t used = 0;
  float *take(int64_t n) {
    float *piece = base ? base + used : nullptr;
    used += (n + 15) / 16 * 16;
    return piece;
  }
};

// What a block's rows have gathered over the keys so far. Sums are relative to `top`.
struct Sums {
  float *context;           // [ROWS][Ev padded], or turned where products go by pairs
  float *top, *sum;         // [ROWS]: the largest score, the sum of e^(score - top)
  float *surprise, *far;    // [ROWS]: sums of e^(score - top) times (score - top), and times the distance
  float *mass;              // [groups][ROWS]
  float *best, *best_key;   // [top k][ROWS]: the largest scores and (int32) their keys
  float *at;                // [offsets][ROWS]: scores at fixed distances
  bool fresh = true;        // no keys yet: context holds nothing

  Sums(const Problem &p, Arena &a) {
    context = a.take(ROWS * padded(p.Ev));
    top = a.take(ROWS);
    sum = a.take(ROWS);
    surprise = a.take(ROWS);
    far = a.take(ROWS);
    mass = a.take(p.seen.groups * ROWS);
    best = a.take(p.seen.top * ROWS);
    best_key = a.take(p.seen.top * ROWS);
    at = a.take(p.seen.offsets * ROWS);
  }

  void clear(const Problem &p, const Block &k) {
    for (int64_t r = 0; r < k.width; r++) top[r] = -INF, sum[r] = surprise[r] = far[r] = 0;
    fresh = true;
    for (int64_t i = 0; i < p.seen.groups * ROWS; i++) mass[i] = 0;
    for (int64_t i = 0; i < p.seen.top * ROWS; i++) best[i] = -INF, ((int32_t *)best_key)[i] = -1;
    for (int64_t i = 0; i < p.seen.offsets * ROWS; i++) at[i] = -INF;
  }
};

// Room for one block of rows and one block of keys; of `strip` keys where weights are kept until the end.
struct Room {
  float *rows, *query; // [ROWS][E padded], [E][width]
  float *P, *grid, *grid_rows, *kept, *keys, *values;
  float *alpha, *inverse, *tops;  // [ROWS], [ROWS], [blocks of keys in a strip][ROWS]
  float *query_pairs, *P_pairs;   // [E / 2][width], [KEYS / 2][width]
  bool pairs;
  Turned turned_values;

  Room(const Problem &p, Arena &a) {
    const int64_t once = keys_at_once(p), n = min(once, max(p.S, 1)), strip = p.seen.received ? min(STRIP, max(p.S, 1)) : n;
    rows = a.take(ROWS * padded(p.E));
    query = a.take(ROWS * padded(p.E));
    P = a.take(strip * ROWS);
    grid = a.take(has_grid(p) ? n * ROWS : 0);
    grid_rows = a.take(has_grid(p) ? n * ROWS : 0);
    kept = a.take(p.dropout.on ? n * ROWS : 0);
    keys = a.take(n * padded(p.E));
    values = a.take(max(n, ROWS) * padded(p.Ev));
    alpha = a.take(ROWS);
    inverse = a.take(ROWS);
    tops = a.take(p.seen.received ? STRIP / once * ROWS : 0);
    pairs = by_pairs(p);
    query_pairs = a.take(pairs ? p.E / 2 * ROWS : 0);
    P_pairs = a.take(pairs ? KEYS / 2 * ROWS : 0);
    turned_values.words = a.take(pairs ? Turned::size(p, p.Ev) : 0);
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

// P[n][width] = K V' with rows of a tensor like the key in place, and pairs [features / 2][width].
static void by_words(const Block &k, const View &v, int64_t from, int64_t n, int64_t features, const float *pairs, float *P) {
  const float *words = (const float *)((const uint16_t *)v.data + at(v, k.b, k.kv, from));
  matmul_pairs(n, k.width, features / 2, words, v.row / 2, pairs, k.width, P, k.width, false);
}

static void scores(const Problem &p, const Block &k, const Room &w, int64_t from, int64_t n, float *P) {
  if (w.pairs) {
    by_words(k, p.key, from, n, p.E, w.query_pairs, P);
    const vec scale = splat(p.scale);
    for (int64_t i = 0; i < n * k.width; i += LANES) store(P + i, load(P + i) * scale);
    return;
  }
  Matrix K = rows_of(p.key, p.dtype, at(p.key, k.b, k.kv, from), n, p.E, 1, w.keys);
  matmul<false>(n, k.width / LANES, p.E, K.data, K.stride, w.query, k.width, P, k.width, false);
}

// The block's queries: times scale and turned, or as pairs.
static void read_queries(const Problem &p, const Block &k, const Room &w) {
  read_rows(p, k, p.query, p.E, w.pairs ? 1 : p.scale, w.rows, padded(p.E), w.query);
  Scan::rows(p, w.rows, padded(p.E), k.count, padded(p.E));
  if (w.pairs) pairs_of(w.query, p.E, k.width, w.query_pairs);
}

// Scores of n keys, hidden ones -inf; false if the grid hides them all.
static bool masked_scores(const Problem &p, const Block &k, const Room &w, int64_t from, int64_t n, float *P) {
  if (has_grid(p) && !read_grid(p, k, from, n, w.grid, w.grid_rows)) return false;
  scores(p, k, w, from, n, P);
  hide(k, from, n, has_grid(p) ? w.grid : nullptr, P);
  return true;
}

// P becomes e^(P - top), for N vectors of rows; sums go on, alpha is what earlier sums were multiplied by.
template <int N, bool SURPRISE, bool FAR>
static void softmax(const Block &k, int64_t row, int64_t from, int64_t n, float shift, float *P, const Sums &s, float *alpha) {
  const int64_t width = k.width;
  vec top[N], old[N], sum[N], surprise[N], far[N], place[N];
  UNROLL for (int c = 0; c < N; c++) {
    top[c] = old[c] = load(s.top + row + c * LANES);
    sum[c] = surprise[c] = far[c] = splat(0);
    place[c] = __builtin_convertvector(iload(k.query + row + c * LANES), vec) + splat(shift - (float)from);
  }
  for (int64_t j = 0; j < n; j++)
    UNROLL for (int c = 0; c < N; c++) top[c] = vmax(load(P + j * width + c * LANES), top[c]);
  UNROLL for (int c = 0; c < N; c++) {
    store(s.top + row + c * LANES, top[c]);
    top[c] = top[c] == splat(-INF) ? splat(0) : top[c]; // nothing seen yet: e^(-inf - 0) = 0
  }
  for (int64_t j = 0; j < n; j++)
    UNROLL for (int c = 0; c < N; c++) {
      float *at = P + j * width + c * LANES;
      vec x = load(at) - top[c], weight = exp(x);
      store(at, weight);
      sum[c] += weight;
      if (SURPRISE) surprise[c] += weight * vmax(x, splat(-88.f)); // 0 * -inf is NaN
      if (FAR) {
        vec apart = place[c] - splat((float)j);
        far[c] += weight * vmax(apart, -apart);
      }
    }
  UNROLL for (int c = 0; c < N; c++) {
    const int64_t r = row + c * LANES;
    vec fall = old[c] - top[c], factor = exp(fall), before = load(s.sum + r);
    store(alpha + r, factor);
    if (SURPRISE) {
      fall = vmax(fall, splat(-88.f)); // beside a factor of 0
      store(s.surprise + r, factor * (load(s.surprise + r) + fall * before) + surprise[c]);
    }
    if (FAR) store(s.far + r, load(s.far + r) * factor + far[c]);
    store(s.sum + r, before * factor + sum[c]);
  }
}

template <bool SURPRISE, bool FAR>
static void softmax_rows(const Problem &p, const Block &k, int64_t from, int64_t n, float *P, const Sums &s, float *alpha) {
  const float shift = (float)(p.S - p.L);
  int64_t r = 0;
  for (; r + 4 * LANES <= k.width; r += 4 * LANES) softmax<4, SURPRISE, FAR>(k, r, from, n, shift, P + r, s, alpha);
  for (; r < k.width; r += LANES) softmax<1, SURPRISE, FAR>(k, r, from, n, shift, P + r, s, alpha);
}

// The largest scores of each row, sorted; equal ones in the order of their keys.
static void keep_best(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const Sums &s) {
  const int64_t count = p.seen.top;
  int32_t *keys = (int32_t *)s.best_key;
  for (int64_t r = 0; r < k.width; r += LANES) {
    vec last = load(s.best + (count - 1) * ROWS + r);
    for (int64_t j = 0; j < n; j++) {
      vec x = load(P + j * k.width + r);
      if (__builtin_expect(!any(x > last), 1)) continue;
      ivec key = isplat((int32_t)(from + j));
      for (int64_t t = 0; t < count; t++) {
        float *best = s.best + t * ROWS + r;
        int32_t *best_key = keys + t * ROWS + r;
        vec y = load(best);
        ivec other = iload(best_key), better = x > y;
        store(best, better ? x : y);
        *(ivec *)best_key = better ? key : other;
        x = better ? y : x;
        key = better ? other : key;
      }
      last = load(s.best + (count - 1) * ROWS + r);
    }
  }
}

static void keep_offsets(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const Sums &s) {
  for (int64_t o = 0; o < p.seen.offsets; o++)
    for (int64_t r = 0; r < k.count; r++) {
      int64_t j = k.query[r] + p.S - p.L - p.seen.offset[o] - from;
      if (j >= 0 && j < n) s.at[o * ROWS + r] = P[j * k.width + r];
    }
}

static void add_mass(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const Sums &s, const float *alpha) {
  for (int64_t g = 0; g < p.seen.groups; g++) {
    const Grid &group = p.seen.group[g];
    const uint8_t *in = (const uint8_t *)group.data + k.b * group.batch + from * group.key;
    for (int64_t r = 0; r < k.width; r += LANES) {
      float *mass = s.mass + g * ROWS + r;
      vec total = load(mass) * load(alpha + r);
      for (int64_t j = 0; j < n; j++)
        if (in[j * group.key]) total += load(P + j * k.width + r);
      store(mass, total);
    }
  }
}

// received[head of the group][S] += the rows' weights, P times factor.
static void add_received(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const float *factor,
                         float *received) {
  for (int64_t r = 0; r < k.count;) {
    const int64_t g = (k.first + r) / p.L, end = min(k.count, (g + 1) * p.L - k.first);
    float own[ROWS]; // the factors of the rows of this head
    for (int64_t i = 0; i < k.width; i++) own[i] = i >= r && i < end ? factor[i] : 0;
    float *to = received + g * p.S + from;
    for (int64_t j = 0; j < n; j++) {
      vec total = splat(0);
      for (int64_t i = 0; i < k.width; i += LANES) total += load(P + j * k.width + i) * load(own + i);
      to[j] += sum(total);
    }
    r = end;
  }
}

static const float *drop(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, float *kept_weights) {
  if (!p.dropout.on) return P;
  for (int64_t j = 0; j < n; j++)
    for (int64_t r = 0; r < k.width; r += LANES) {
      vec weight = load(P + j * k.width + r) * splat(p.dropout.factor);
      store(kept_weights + j * k.width + r, kept(p, k, from + j, r) ? weight : splat(0));
    }
  return kept_weights;
}

// context = alpha context + weights^T V
static void add_context(const Problem &p, const Block &k, const Room &w, const Sums &s, int64_t from, int64_t n, const float *weights) {
  const int64_t vectors = padded(p.Ev) / LANES;
  for (int64_t r = 0; r < k.count; r++)
    if (!s.fresh && w.alpha[r] != 1)
      for (int64_t e = 0; e < vectors; e++) {
        float *c = s.context + (r * vectors + e) * LANES;
        store(c, load(c) * splat(w.alpha[r]));
      }
  Matrix V = rows_of(p.value, p.dtype, at(p.value, k.b, k.kv, from), n, p.Ev, LANES, w.values);
  matmul<true>(k.count, vectors, n, weights, k.width, V.data, V.stride, s.context, vectors * LANES, !s.fresh);
}

// The same turned: context^T = alpha context^T + V^T weights, with V^T in words of two keys.
static void add_context_by_pairs(const Problem &p, const Block &k, Room &w, const Sums &s, int64_t from, int64_t n, const float *weights) {
  if (!s.fresh)
    for (int64_t e = 0; e < p.Ev; e++)
      for (int64_t r = 0; r < k.width; r += LANES) {
        float *c = s.context + e * k.width + r;
        store(c, load(c) * load(w.alpha + r));
      }
  const int64_t words = (n + 31) / 32 * 16;
  pairs_of(weights, n, k.width, w.P_pairs);
  for (int64_t i = (n + 1) / 2 * k.width; i < words * k.width; i++) w.P_pairs[i] = 0;
  w.turned_values.need(p, k, p.value, p.Ev, from, from + n);
  const float *V = w.turned_values.words + from / 2;
  matmul_pairs(p.Ev, k.width, words, V, w.turned_values.stride, w.P_pairs, k.width, s.context, k.width, !s.fresh);
}

// Keys [from, to) into the block's sums. With `strip` the weights stay in P, block after block.
static void gather(const Problem &p, const Block &k, Room &w, Sums &s, int64_t from, int64_t to, bool strip) {
  const int64_t once = keys_at_once(p);
  for (int64_t j = from; j < to; j += once) {
    const int64_t n = min(once, to - j), step = (j - from) / once;
    float *P = strip ? w.P + (j - from) * k.width : w.P;
    if (!masked_scores(p, k, w, j, n, P)) {
      if (strip) {
        for (int64_t i = 0; i < n * k.width; i++) P[i] = 0;
        memcpy(w.tops + step * ROWS, s.top, ROWS * 4);
      }
      continue;
    }
    if (p.seen.top) keep_best(p, k, j, n, P, s);
    if (p.seen.offsets) keep_offsets(p, k, j, n, P, s);
    if (p.seen.entropy && p.seen.distance) softmax_rows<true, true>(p, k, j, n, P, s, w.alpha);
    else if (p.seen.entropy) softmax_rows<true, false>(p, k, j, n, P, s, w.alpha);
    else if (p.seen.distance) softmax_rows<false, true>(p, k, j, n, P, s, w.alpha);
    else softmax_rows<false, false>(p, k, j, n, P, s, w.alpha);
    if (strip) memcpy(w.tops + step * ROWS, s.top, ROWS * 4);
    if (p.seen.groups) add_mass(p, k, j, n, P, s, w.alpha);
    if (!p.context.data) continue; // statistics alone
    const float *weights = drop(p, k, j, n, P, w.kept);
    if (w.pairs) add_context_by_pairs(p, k, w, s, j, n, weights);
    else add_context(p, k, w, s, j, n, weights);
    s.fresh = false;
  }
}

// Divides by the sums and writes what was asked for; inverse[r] = 1 / sum, 0 in a dead row.
static void finish(const Problem &p, const Block &k, const Sums &s, float *inverse) {
  const Statistics &seen = p.seen;
  for (int64_t r = 0; r < k.width; r++) inverse[r] = r >= k.count || k.dead[r] || s.sum[r] == 0 ? 0 : 1 / s.sum[r];
  for (int64_t r = 0; r < k.count; r++) {
    const bool dead = inverse[r] == 0;
    const int64_t i = k.row(p, r);
    if (p.context.data) {
      float *context = s.context + r * padded(p.Ev);
      if (dead) memset(context, 0, p.Ev * 4);
      write_row(p.context, p.dtype, at(p.context, k.b, k.head[r], k.query[r]), p.Ev, dead ? 1 : inverse[r], context);
    }
    const float log_sum = dead || !(seen.lse || seen.entropy) ? 0 : __builtin_logf(s.sum[r]);
    if (seen.lse) seen.lse[i] = dead ? -INF : s.top[r] + log_sum;
    if (seen.entropy) seen.entropy[i] = dead ? 0 : log_sum - s.surprise[r] * inverse[r];
    if (seen.max_weight) seen.max_weight[i] = inverse[r];
    if (seen.distance) seen.distance[i] = dead ? 0 : s.far[r] * inverse[r];
    for (int64_t g = 0; g < seen.groups; g++)
      seen.mass[g * p.B * p.H * p.L + i] = dead ? 0 : s.mass[g * ROWS + r] * inverse[r];
  }
  auto write_weights = [&](const float *at, int64_t count, float *to) {
    for (int64_t t = 0; t < count; t++)
      for (int64_t r = 0; r < k.width; r += LANES) {
        float weight[LANES];
        vec top = load(s.top + r), x = load(at + t * ROWS + r) - (top == splat(-INF) ? splat(0) : top);
        store(weight, exp(x) * load(inverse + r));
        for (int64_t i = r; i < min(r + LANES, k.count); i++)
          to[k.row(p, i) * count + t] = inverse[i] == 0 ? 0 : weight[i - r];
      }
  };
  write_weights(s.best, seen.top, seen.top_weights);
  write_weights(s.at, seen.offsets, seen.at_offsets);
  for (int64_t t = 0; t < seen.top; t++)
    for (int64_t r = 0; r < k.count; r++)
      seen.top_keys[k.row(p, r) * seen.top + t] = inverse[r] == 0 ? -1 : ((const int32_t *)s.best_key)[t * ROWS + r];
}

// received of a block whose weights are in the strip, or else from scores computed again.
static void received_of(const Problem &p, const Block &k, const Room &w, const Sums &s, bool strip, float *received) {
  float top[ROWS], factor[ROWS];
  for (int64_t r = 0; r < k.width; r++) top[r] = s.top[r] == -INF ? 0 : s.top[r];
  const int64_t once = keys_at_once(p);
  for (int64_t j = k.from; j < k.to; j += once) {
    const int64_t n = min(once, k.to - j);
    float *P = strip ? w.P + (j - k.from) * k.width : w.P;
    if (strip) {
      const float *then = w.tops + (j - k.from) / once * ROWS; // what the weights are relative to
      for (int64_t r = 0; r < k.width; r += LANES)
        store(factor + r, exp(load(then + r) - load(top + r)) * load(w.inverse + r));
    } else {
      if (!masked_scores(p, k, w, j, n, P)) continue;
      for (int64_t i = 0; i < n; i++)
        for (int64_t r = 0; r < k.width; r += LANES) {
          float *x = P + i * k.width + r;
          store(x, exp(load(x) - load(top + r)));
        }
      memcpy(factor, w.inverse, sizeof factor);
    }
    add_received(p, k, j, n, P, factor, received);
  }
}

static size_t forward_scratch(const Problem *p) {
  Arena a{nullptr};
  Room w(*p, a);
  Sums s(*p, a);
  return a.used;
}

static size_t forward_partial(const Problem *p) {
  Arena a{nullptr};
  Sums s(*p, a);
  return a.used;
}

// A task: a run of blocks of one key/value head; or, with few queries and many keys, one block and a run of keys.
static void forward(const Problem *problem, float *scratch, int64_t task) {
  const Problem &p = *problem;
  Arena a{scratch};
  Room w(p, a);
  Scan scan;
  Block k;
  if (p.key_splits > 1) {
    const int64_t head = task / p.key_splits, run = task % p.key_splits;
    Arena own{p.partial + task * (int64_t)forward_partial(problem)};
    Sums s(p, own);
    begin(p, k, head, 0);
    s.clear(p, k);
    const int64_t from = max(k.from, run * p.key_run), to = min(k.to, (run + 1) * p.key_run);
    read_queries(p, k, w);
    for (int64_t j = from; j < to && !hopeless(p); j += KEYS) {
      if (p.non_finite) scan.check(p, k, j, min(j + KEYS, to)); // while they are in the cache
      gather(p, k, w, s, j, min(j + KEYS, to), false);
    }
    if (s.fresh) memset(s.context, 0, ROWS * padded(p.Ev) * 4);
    return;
  }
  Sums s(p, a);
  if (w.pairs) begin_pairs(), w.turned_values.begin(p, w.turned_values.words, p.Ev);
  const int64_t head = task / p.splits, split = p.splits - 1 - task % p.splits, group = p.H / p.Hkv; // causal: long ones first
  float *received = nullptr;
  if (p.seen.received) {
    received = p.splits == 1 ? p.seen.received + head * group * p.S : p.partial + (head * p.splits + split) * group * p.S;
    memset(received, 0, group * p.S * 4);
  }
  for (int64_t block = split * p.blocks / p.splits; block < (split + 1) * p.blocks / p.splits; block++) {
    begin(p, k, head, block);
    s.clear(p, k);
    read_queries(p, k, w);
    scan.keys(p, k, k.from, k.to);
    if (hopeless(p)) break;
    const bool strip = received && k.to - k.from <= STRIP;
    gather(p, k, w, s, k.from, k.to, strip);
    if (w.pairs && p.context.data) { // the rows' contexts, no longer turned, in the room of the values
      Sums rows = s;
      rows.context = w.values;
      transpose(s.context, k.width, p.Ev, k.width, rows.context, padded(p.Ev), padded(p.Ev));
      finish(p, k, rows, w.inverse);
    } else
      finish(p, k, s, w.inverse);
    if (received) received_of(p, k, w, s, strip, received);
  }
  if (w.pairs) end_pairs();
}

// The runs of keys of one head put together.
static void forward_merge(const Problem *problem, float *scratch, int64_t head) {
  const Problem &p = *problem;
  const int64_t size = forward_partial(problem), vectors = padded(p.Ev) / LANES;
  Block k;
  begin(p, k, head, 0);
  Arena first{p.partial + head * p.key_splits * size}, room{scratch};
  Sums all(p, first);
  float *inverse = room.take(ROWS);
  for (int64_t run = 1; run < p.key_splits; run++) {
    Arena own{p.partial + (head * p.key_splits + run) * size};
    Sums s(p, own);
    for (int64_t r = 0; r < k.width; r += LANES) {
      const vec a = load(all.top + r), b = load(s.top + r), top = vmax(a, b), known = top == splat(-INF) ? splat(0) : top;
      const vec fall_a = a - known, fall_b = b - known, x = exp(fall_a), y = exp(fall_b);
      const vec sum_a = load(all.sum + r), sum_b = load(s.sum + r);
      store(all.top + r, top);
      store(all.sum + r, x * sum_a + y * sum_b);
      store(all.surprise + r, x * (load(all.surprise + r) + vmax(fall_a, splat(-88)) * sum_a) +
                                  y * (load(s.surprise + r) + vmax(fall_b, splat(-88)) * sum_b));
      store(all.far + r, x * load(all.far + r) + y * load(s.far + r));
      for (int64_t g = 0; g < p.seen.groups; g++)
        store(all.mass + g * ROWS + r, x * load(all.mass + g * ROWS + r) + y * load(s.mass + g * ROWS + r));
      for (int64_t i = r; i < min(r + LANES, k.count); i++)
        for (int64_t e = 0; e < vectors; e++) {
          float *c = all.context + (i * vectors + e) * LANES;
          store(c, load(c) * splat(x[i - r]) + load(s.context + (i * vectors + e) * LANES) * splat(y[i - r]));
        }
    }
    for (int64_t r = 0; r < k.count; r++) {
      for (int64_t t = 0; t < p.seen.top; t++) { // insert into the sorted list
        float x = s.best[t * ROWS + r];
        int32_t key = ((const int32_t *)s.best_key)[t * ROWS + r];
        for (int64_t u = 0; u < p.seen.top; u++) {
          float &y = all.best[u * ROWS + r];
          int32_t &other = ((int32_t *)all.best_key)[u * ROWS + r];
          if (!(x > y)) continue;
          float z = y;
          y = x, x = z;
          int32_t swap = other;
          other = key, key = swap;
        }
      }
      for (int64_t o = 0; o < p.seen.offsets; o++)
        if (s.at[o * ROWS + r] > all.at[o * ROWS + r]) all.at[o * ROWS + r] = s.at[o * ROWS + r];
    }
  }
  finish(p, k, all, inverse);
}

// received of one run of keys from the rows' lse: a pass of its own.
static void received(const Problem *problem, float *scratch, int64_t task) {
  const Problem &p = *problem;
  const int64_t head = task / p.key_splits, run = task % p.key_splits, group = p.H / p.Hkv;
  Arena a{scratch};
  Room w(p, a);
  Block k;
  begin(p, k, head, 0);
  float *to = p.seen.received + head * group * p.S;
  const int64_t start = run * p.key_run, stop = min(p.S, start + p.key_run);
  for (int64_t g = 0; g < group; g++) memset(to + g * p.S + start, 0, max(0, stop - start) * 4);
  read_queries(p, k, w);
  float lse[ROWS], alive[ROWS];
  for (int64_t r = 0; r < k.width; r++) {
    lse[r] = r < k.count ? p.seen.lse[k.row(p, r)] : -INF;
    alive[r] = lse[r] == -INF ? 0 : 1;
    if (lse[r] == -INF) lse[r] = 0;
  }
  const int64_t once = keys_at_once(p);
  for (int64_t j = max(k.from, start); j < min(k.to, stop); j += once) {
    const int64_t n = min(once, min(k.to, stop) - j);
    if (!masked_scores(p, k, w, j, n, w.P)) continue;
    for (int64_t i = 0; i < n; i++)
      for (int64_t r = 0; r < k.width; r += LANES) {
        float *x = w.P + i * k.width + r;
        store(x, exp(load(x) - load(lse + r)));
      }
    add_received(p, k, j, n, w.P, alive, to);
  }
}

// The splits' shares of received, in their order.
static void received_sum(const Problem *problem, int64_t head) {
  const Problem &p = *problem;
  const int64_t n = p.H / p.Hkv * p.S;
  const float *part = p.partial + head * p.splits * n;
  for (int64_t j = 0; j < n; j++) {
    float total = 0;
    for (int64_t s = 0; s < p.splits; s++) total += part[s * n + j];
    p.seen.received[head * n + j] = total;
  }
}

} // namespace
