// The forward pass: an online softmax over blocks of keys (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
// 2022, arXiv 2205.14135), and the statistics of the weights in the same pass.
#pragma once
#include "statistics.h"

namespace {

// P becomes e^(P - top), for N vectors of rows; sums go on, alpha is what earlier sums were multiplied by. With PIECES
// the weights go into the right factor `to`, and stay in P only with KEEP.
template <int N, bool SURPRISE, bool FAR, int PIECES, bool KEEP>
static void softmax(const Block &k, int64_t row, int64_t from, int64_t n, float shift, float *P, const Sums &s, float *alpha, Tiles to) {
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
  auto weigh = [&](int64_t j, int c) __attribute__((always_inline)) {
    float *at = P + j * width + c * LANES;
    vec x = load(at) - top[c], weight = exp(x);
    if (KEEP) store(at, weight);
    sum[c] += weight;
    if (SURPRISE) surprise[c] += weight * vmax(x, splat(-88.f)); // 0 * -inf is NaN
    if (FAR) {
      vec apart = place[c] - splat((float)j);
      far[c] += weight * vmax(apart, -apart);
    }
    return weight;
  };
  if constexpr (PIECES) {
    for (int64_t j = 0; j < steps_of(n) * 32; j += 2)
      UNROLL for (int c = 0; c < N; c++) {
        const vec even = j < n ? weigh(j, c) : splat(0), odd = j + 1 < n ? weigh(j + 1, c) : splat(0);
        weave<PIECES>(even, odd, j, to.at(row / 16 + c, j / 32));
      }
  } else
    for (int64_t j = 0; j < n; j++) UNROLL for (int c = 0; c < N; c++) weigh(j, c);
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

template <bool SURPRISE, bool FAR, int PIECES, bool KEEP>
static void softmax_rows(const Problem &p, const Block &k, int64_t from, int64_t n, float *P, const Sums &s, float *alpha, Tiles to) {
  const float shift = (float)(p.S - p.L);
  int64_t r = 0;
  for (; r + 4 * LANES <= k.width; r += 4 * LANES) softmax<4, SURPRISE, FAR, PIECES, KEEP>(k, r, from, n, shift, P + r, s, alpha, to);
  for (; r < k.width; r += LANES) softmax<1, SURPRISE, FAR, PIECES, KEEP>(k, r, from, n, shift, P + r, s, alpha, to);
}

template <int PIECES, bool KEEP>
static void softmax_rows(const Problem &p, const Block &k, int64_t from, int64_t n, float *P, const Sums &s, float *alpha, Tiles to) {
  if (p.seen.entropy && p.seen.distance) softmax_rows<true, true, PIECES, KEEP>(p, k, from, n, P, s, alpha, to);
  else if (p.seen.entropy) softmax_rows<true, false, PIECES, KEEP>(p, k, from, n, P, s, alpha, to);
  else if (p.seen.distance) softmax_rows<false, true, PIECES, KEEP>(p, k, from, n, P, s, alpha, to);
  else softmax_rows<false, false, PIECES, KEEP>(p, k, from, n, P, s, alpha, to);
}

// keep: the weights are looked at after they are multiplied.
static void softmax_rows(const Problem &p, const Block &k, Room &w, int64_t from, int64_t n, float *P, const Sums &s, bool keep) {
  auto run = [&](auto pieces) {
    constexpr int PIECES = decltype(pieces)::value;
    if (!PIECES || keep) softmax_rows<PIECES, true>(p, k, from, n, P, s, w.alpha, w.P_right.tiles());
    else softmax_rows<PIECES, false>(p, k, from, n, P, s, w.alpha, w.P_right.tiles());
  };
  const int pieces = p.context.data && !p.dropout.on ? p.pieces : 0;
  if (pieces == 3) run(Count<MOST_PIECES>{});
  else if (pieces == 1) run(Count<MOST_PIECES ? 1 : 0>{});
  else run(Count<0>{});
}

static void drop(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, float *kept_weights) {
  for (int64_t j = 0; j < n; j++)
    for (int64_t r = 0; r < k.width; r += LANES) {
      vec weight = load(P + j * k.width + r) * splat(p.dropout.factor);
      store(kept_weights + j * k.width + r, kept(p, k, from + j, r) ? weight : splat(0));
    }
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

// The same turned: context^T = alpha context^T + V^T weights, which the softmax has left in tiles.
static void add_context_by_tiles(const Problem &p, const Block &k, Room &w, const Sums &s, int64_t from, int64_t n) {
  if (p.dropout.on) w.P_right.right(w.kept, n, k.width);
  const Tiles V = w.turned_values.of(p, k, p.value, from, from + n);
  matmul_tiles(p.pieces, padded(p.Ev), k.width, steps_of(n), V, w.P_right.tiles(), s.context, k.width, !s.fresh, w.alpha);
}

// Keys [from, to) into the block's sums. Where weights are kept, they stay in the sums' room.
static void gather(const Problem &p, const Block &k, Room &w, Sums &s, int64_t from, int64_t to) {
  const bool keep = keeps_weights(p);
  for (int64_t j = from, n; j < to; j += n) {
    n = next_keys(p, j, to);
    const int64_t step = j / keys_at_once(p) - k.from / keys_at_once(p);
    float *P = keep ? s.kept + (j - k.from) * k.width : w.P;
    if (!masked_scores(p, k, w, j, n, P)) {
      if (keep) {
        for (int64_t i = 0; i < n * k.width; i++) P[i] = 0;
        memcpy(s.kept_tops + step * ROWS, s.top, ROWS * 4);
      }
      continue;
    }
    if (p.seen.top) keep_best(p, k, j, n, P, s);
    if (p.seen.offsets) keep_offsets(p, k, j, n, P, s);
    softmax_rows(p, k, w, j, n, P, s, keep || p.seen.groups);
    if (keep) memcpy(s.kept_tops + step * ROWS, s.top, ROWS * 4);
    if (p.seen.groups) add_mass(p, k, j, n, P, s, w.alpha);
    if (!p.context.data) continue; // statistics alone
    if (p.dropout.on) drop(p, k, j, n, P, w.kept);
    if (p.pieces) add_context_by_tiles(p, k, w, s, j, n);
    else add_context(p, k, w, s, j, n, p.dropout.on ? w.kept : P);
    s.fresh = false;
  }
}

// Divides by the sums and writes what was asked for; inverse = e^top / (the sum of e^score and e^sink), 0 in a
// dead row. Sinks come in here alone, so that they count once wherever the keys were cut.
static void finish(const Problem &p, const Block &k, const Sums &s) {
  float *inverse = s.inverse;
  const Statistics &seen = p.seen;
  bool gone[ROWS];
  float base[ROWS], total[ROWS], rest[ROWS]; // lse = base + log(total)
  for (int64_t r = 0; r < k.width; r++) {
    gone[r] = r >= k.count || k.dead[r] || s.sum[r] == 0;
    inverse[r] = gone[r] ? 0 : 1 / s.sum[r];
    base[r] = s.top[r], total[r] = s.sum[r], rest[r] = 0;
    if (!p.sinks || gone[r]) continue;
    const float sink = p.sinks[k.head[r]];
    if (sink == -INF) continue;
    base[r] = sink > s.top[r] ? sink : s.top[r];
    const float of_keys = __builtin_expf(s.top[r] - base[r]), of_sink = __builtin_expf(sink - base[r]);
    total[r] = s.sum[r] * of_keys + of_sink;
    inverse[r] = of_keys / total[r];
    rest[r] = of_sink / total[r];
  }
  for (int64_t r = 0; r < k.count; r++) {
    const bool dead = gone[r];
    const int64_t i = k.row(p, r);
    if (p.context.data) {
      float *context = s.context + r * padded(p.Ev);
      if (dead) memset(context, 0, p.Ev * 4);
      write_row(p.context, p.dtype, at(p.context, k.b, k.head[r], k.query[r]), p.Ev, dead ? 1 : inverse[r], context);
    }
    const float log_sum = dead || !(seen.lse || seen.entropy) ? 0 : __builtin_logf(total[r]);
    if (seen.lse) {
      const float lse = dead ? -INF : base[r] + log_sum;
      seen.lse[2 * i] = lse;
      seen.lse[2 * i + 1] = dead ? 0 : base[r] - lse + log_sum;
    }
    if (seen.entropy) { // -sum w (score - lse), with all of it relative to top
      const float share = p.sinks ? s.sum[r] * inverse[r] : 1;
      seen.entropy[i] = inverse[r] == 0 ? 0 : share * (base[r] - s.top[r] + log_sum) - s.surprise[r] * inverse[r];
    }
    if (seen.rest) seen.rest[i] = rest[r];
    if (seen.max_score) seen.max_score[i] = dead ? -INF : s.top[r];
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
      seen.top_keys[k.row(p, r) * seen.top + t] = gone[r] ? -1 : ((const int32_t *)s.best_key)[t * ROWS + r];
}

static size_t forward_scratch(const Problem *p) {
  Arena a{nullptr};
  Room w(*p, a);
  for (int64_t i = 0; i < (p->key_splits > 1 ? 0 : blocks_together(*p)); i++) Sums(*p, a);
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
      gather(p, k, w, s, j, min(j + KEYS, to));
    }
    if (s.fresh) memset(s.context, 0, ROWS * padded(p.Ev) * 4);
    return;
  }
  const int64_t head = task / p.splits, split = p.splits - 1 - task % p.splits, group = p.H / p.Hkv; // causal: long ones first
  const int64_t first = split * p.blocks / p.splits, last = (split + 1) * p.blocks / p.splits;
  float *received = nullptr;
  if (p.seen.received) {
    received = p.splits == 1 ? p.seen.received + head * group * p.S : p.partial + (head * p.splits + split) * group * p.S;
    memset(received, 0, group * p.S * 4);
  }
  const int64_t chunk = keys_in_chunk(p), together = blocks_together(p);
  Sums sums[TOGETHER];
  for (int64_t i = 0; i < together; i++) sums[i] = Sums(p, a);
  int64_t here = -1, packed = -1; // the block that k is, the chunk of keys in tiles
  auto go_to = [&](int64_t block) {
    if (block != here) begin(p, k, head, here = block);
  };
  if (p.pieces) begin_tiles();
  for (int64_t start = first; start < last && !hopeless(p); start += together) {
    const int64_t stop = min(last, start + together);
    int64_t from = p.S, to = 0;
    for (int64_t block = start; block < stop; block++) {
      go_to(block);
      sums[block - start].clear(p, k);
      from = min(from, k.from), to = max(to, k.to);
    }
    auto each = [&](auto run) { // run(sums, from, to) for each block and each chunk of its keys
      for (int64_t c = from - from % chunk; c < to; c += chunk) {
        const int64_t base = keeps_weights(p) ? 0 : c; // then all keys are in tiles
        if (p.pieces && base != packed) w.key_tiles.begin(base), w.turned_values.begin(base), packed = base;
        for (int64_t block = start; block < stop && !hopeless(p); block++) {
          go_to(block);
          if (max(k.from, c) < min(k.to, c + chunk)) run(sums[block - start], max(k.from, c), min(k.to, c + chunk));
        }
      }
    };
    each([&](Sums &s, int64_t own_from, int64_t own_to) {
      read_queries(p, k, w);
      scan.keys(p, k, own_from, own_to);
      if (!hopeless(p)) gather(p, k, w, s, own_from, own_to);
    });
    for (int64_t block = start; block < stop && !hopeless(p); block++) {
      go_to(block);
      Sums s = sums[block - start];
      if (p.pieces && p.context.data) { // the rows' contexts, no longer turned, in the room of the values
        transpose(s.context, k.width, p.Ev, k.width, w.values, padded(p.Ev), padded(p.Ev));
        s.context = w.values;
      }
      finish(p, k, s);
      if (keeps_weights(p)) received_of_kept(p, k, s, received);
    }
    if (received && !keeps_weights(p))
      each([&](Sums &s, int64_t own_from, int64_t own_to) {
        read_queries(p, k, w);
        received_again(p, k, w, s, own_from, own_to, received);
      });
  }
  if (p.pieces) end_tiles();
}

// The runs of keys of one head put together.
static void forward_merge(const Problem *problem, int64_t head) {
  const Problem &p = *problem;
  const int64_t size = forward_partial(problem), vectors = padded(p.Ev) / LANES;
  Block k;
  begin(p, k, head, 0);
  Arena first{p.partial + head * p.key_splits * size};
  Sums all(p, first);
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
        bool moved = false; // what is pushed out goes before its equals
        for (int64_t u = 0; u < p.seen.top; u++) {
          float &y = all.best[u * ROWS + r];
          int32_t &other = ((int32_t *)all.best_key)[u * ROWS + r];
          if (!(moved |= x > y)) continue;
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
  finish(p, k, all);
}

} // namespace
