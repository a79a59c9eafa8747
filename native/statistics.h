// What is seen of the weights on their way: the largest, those at fixed distances, those of groups and of each key.
#pragma once
#include "room.h"

namespace {

// The largest scores of each row, sorted; equal ones in the order of their keys.
static void keep_best(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const Sums &s) {
  const int64_t count = p.seen.top;
  int32_t *keys = (int32_t *)s.best_key;
  for (int64_t r = 0; r < k.width; r += LANES) {
    vec last = load(s.best + (count - 1) * ROWS + r);
    for (int64_t j = 0; j < n; j++) {
      vec x = load(P + j * k.width + r);
      if (__builtin_expect(!any(x > last), 1)) continue;
      ivec key = isplat((int32_t)(from + j)), moved = isplat(0); // what is pushed out goes before its equals
      for (int64_t t = 0; t < count; t++) {
        float *best = s.best + t * ROWS + r;
        int32_t *best_key = keys + t * ROWS + r;
        vec y = load(best);
        ivec other = iload(best_key), better = moved |= x > y;
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
  for (int64_t o = 0; o < p.seen.offsets; o++) {
    const int64_t shift = p.S - p.L - p.seen.offset[o] - from;
    if (k.most + shift < 0 || k.least + shift >= n) continue;
    for (int64_t r = 0; r < k.count; r++) {
      const int64_t j = k.query[r] + shift;
      if (j >= 0 && j < n) s.at[o * ROWS + r] = P[j * k.width + r];
    }
  }
}

static void add_mass(const Problem &p, const Block &k, int64_t from, int64_t n, const float *P, const Sums &s, const float *alpha) {
  for (int64_t g = 0; g < p.seen.groups; g++) {
    const Grid &group = p.seen.group[g];
    const uint8_t *in = (const uint8_t *)group.data + k.b * group.batch + from * group.key;
    float *mass = s.mass + g * ROWS;
    for (int64_t r = 0; r < k.width; r += LANES) store(mass + r, load(mass + r) * load(alpha + r));
    for (int64_t j = 0; j < n; j++)
      if (in[j * group.key])
        for (int64_t r = 0; r < k.width; r += LANES) store(mass + r, load(mass + r) + load(P + j * k.width + r));
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

// received of a block whose weights were kept.
static void received_of_kept(const Problem &p, const Block &k, const Sums &s, float *received) {
  float factor[ROWS];
  int64_t step = 0;
  for (int64_t j = k.from, n; j < k.to; j += n, step++) {
    n = next_keys(p, j, k.to);
    for (int64_t r = 0; r < k.width; r += LANES) {
      const vec then = load(s.kept_tops + step * ROWS + r), top = load(s.top + r); // what the weights are relative to
      store(factor + r, exp(then - (top == splat(-INF) ? splat(0) : top)) * load(s.inverse + r));
    }
    add_received(p, k, j, n, s.kept + (j - k.from) * k.width, factor, received);
  }
}

// received of a block's keys [from, to), from scores computed again.
static void received_again(const Problem &p, const Block &k, Room &w, const Sums &s, int64_t from, int64_t to, float *received) {
  for (int64_t j = from, n; j < to; j += n) {
    n = next_keys(p, j, to);
    if (!masked_scores(p, k, w, j, n, w.P)) continue;
    for (int64_t i = 0; i < n; i++)
      for (int64_t r = 0; r < k.width; r += LANES) {
        const vec top = load(s.top + r);
        float *x = w.P + i * k.width + r;
        store(x, exp(load(x) - (top == splat(-INF) ? splat(0) : top)));
      }
    add_received(p, k, j, n, w.P, s.inverse, received);
  }
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
  float lse[ROWS], rest[ROWS], alive[ROWS];
  for (int64_t r = 0; r < k.width; r++) {
    lse[r] = r < k.count ? p.seen.lse[2 * k.row(p, r)] : -INF;
    rest[r] = r < k.count ? p.seen.lse[2 * k.row(p, r) + 1] : 0;
    alive[r] = lse[r] == -INF ? 0 : 1;
    if (lse[r] == -INF) lse[r] = 0;
  }
  for (int64_t j = max(k.from, start), n; j < min(k.to, stop); j += n) {
    n = next_keys(p, j, min(k.to, stop));
    if (!masked_scores(p, k, w, j, n, w.P)) continue;
    for (int64_t i = 0; i < n; i++)
      for (int64_t r = 0; r < k.width; r += LANES) {
        float *x = w.P + i * k.width + r;
        store(x, exp(load(x) - load(lse + r) - load(rest + r)));
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
