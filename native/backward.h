// The backward pass: weights are computed again from the scores and lse (Dao et al. 2022, arXiv 2205.14135, B.4).
//
//   dV = W~^T dC      dW = dC V^T      dS = W * (kept dW - sum(dC * C))      dQ = scale dS K      dK = scale dS^T Q
//
// (of capped scores dS times their slope, in dQ and dK) with W the weights, W~ the kept ones, C the context. dK and dV
// are summed within a task, then over the tasks in their order, so that a fixed number of threads gives the same bits.
#pragma once
#include "forward.h"

namespace {

constexpr int64_t BACKWARD_KEYS = 128; // keys at a time

struct BackwardRoom {
  float *query_rows, *query, *context_rows, *context; // query and the context's gradient: rows, and turned
  float *dquery, *P, *dS, *grid, *grid_rows, *keys, *values;
  float *lse, *lse_rest, *delta;
  float *slopes; // of the capped scores
  Matrix K;      // the keys at hand, where products don't go by tiles
  Factor query_right, context_right, query_rows_right, context_rows_right, dS_right, weights_left;
  Tiles Q, dC, Q_rows, dC_rows;
  Keys key_tiles, value_tiles;
  Turned turned_keys;

  BackwardRoom(const Problem &p, Arena &a)
      : query_right(p, a, p.E, ROWS), context_right(p, a, p.Ev, ROWS), query_rows_right(p, a, ROWS, p.E),
        context_rows_right(p, a, ROWS, p.Ev), dS_right(p, a, BACKWARD_KEYS, ROWS), weights_left(p, a, ROWS, BACKWARD_KEYS),
        key_tiles(p, a, p.S, p.E), value_tiles(p, a, p.S, p.Ev), turned_keys(p, a, p.S, p.E) {
    const int64_t n = min(BACKWARD_KEYS, max(p.S, 1));
    query_rows = a.take(ROWS * padded(p.E));
    query = a.take(ROWS * padded(p.E));
    context_rows = a.take(ROWS * padded(p.Ev));
    context = a.take(ROWS * padded(p.Ev));
    dquery = a.take(ROWS * padded(p.E));
    P = a.take(padded(n) * ROWS);
    dS = a.take(padded(n) * ROWS);
    grid = a.take(has_grid(p) ? n * ROWS : 0);
    grid_rows = a.take(has_grid(p) ? n * ROWS : 0);
    keys = a.take(n * padded(p.E));
    values = a.take(n * padded(p.Ev));
    lse = a.take(ROWS);
    lse_rest = a.take(ROWS);
    delta = a.take(ROWS);
    slopes = a.take(p.softcap > 0 ? n * ROWS : 0);
  }
};

// The block's query rows, the gradient of their context, and the sum of each row's dC * C.
static void read_block(const Problem &p, Block &k, BackwardRoom &w) {
  for (int64_t r = 0; r < k.count; r++) k.dead[r] = k.dead[r] || p.seen.lse[2 * k.row(p, r)] == -INF;
  read_rows(p, k, p.query, p.E, early_scale(p), w.query_rows, padded(p.E), w.query);
  read_rows(p, k, p.gradient.context, p.Ev, 1, w.context_rows, padded(p.Ev), w.context);
  Scan::rows(p, w.query_rows, padded(p.E), k.count, padded(p.E));
  Scan::rows(p, w.context_rows, padded(p.Ev), k.count, padded(p.Ev));
  if (p.pieces) {
    w.Q = w.query_right.right(w.query, p.E, k.width);
    w.dC = w.context_right.right(w.context, p.Ev, k.width);
    w.Q_rows = w.query_rows_right.right(w.query_rows, k.width, padded(p.E));
    w.dC_rows = w.context_rows_right.right(w.context_rows, k.width, padded(p.Ev));
  }
  for (int64_t r = 0; r < k.width; r++) {
    w.lse[r] = INF; // of a dead row all weights are 0
    w.lse_rest[r] = w.delta[r] = 0;
    if (k.dead[r]) continue;
    w.lse[r] = p.seen.lse[2 * k.row(p, r)];
    w.lse_rest[r] = p.seen.lse[2 * k.row(p, r) + 1];
    read_row(p.context, p.dtype, at(p.context, k.b, k.head[r], k.query[r]), p.Ev, 1, w.values);
    for (int64_t e = p.Ev; e < padded(p.Ev); e++) w.values[e] = 0;
    vec delta = splat(0);
    for (int64_t e = 0; e < p.Ev; e += LANES) delta += load(w.values + e) * load(w.context_rows + r * padded(p.Ev) + e);
    w.delta[r] = sum(delta);
  }
}

// P = scores and dS = the gradient of the weights, before masks and dropout.
static void products(const Problem &p, const Block &k, BackwardRoom &w, int64_t from, int64_t n) {
  if (p.pieces) {
    scores_by_tiles(p, k, w, from, n, w.P);
    matmul_tiles(p.pieces, n, k.width, steps_of(p.Ev), w.value_tiles.of(p, k, p.value, from, from + n), w.dC, w.dS, k.width, false);
    return;
  }
  w.K = rows_of(p.key, p.dtype, at(p.key, k.b, k.kv, from), n, p.E, LANES, w.keys);
  matmul<false>(n, k.width / LANES, p.E, w.K.data, w.K.stride, w.query, k.width, w.P, k.width, false);
  Matrix V = rows_of(p.value, p.dtype, at(p.value, k.b, k.kv, from), n, p.Ev, 1, w.values);
  matmul<false>(n, k.width / LANES, p.Ev, V.data, V.stride, w.context, k.width, w.dS, k.width, false);
}

// P = the kept weights and dS = the gradient of the scores, capped ones, [key][row]; false: all hidden.
static bool gradients_of_scores(const Problem &p, const Block &k, BackwardRoom &w, int64_t from, int64_t n) {
  const int64_t width = k.width;
  if (has_grid(p) && !read_grid(p, k, from, n, w.grid, w.grid_rows)) return false;
  products(p, k, w, from, n);
  if (p.softcap > 0) cap(p, n * width, w.P, w.slopes);
  hide(k, from, n, has_grid(p) ? w.grid : nullptr, w.P);
  for (int64_t j = 0; j < n; j++)
    for (int64_t r = 0; r < width; r += LANES) {
      float *P = w.P + j * width + r, *dS = w.dS + j * width + r;
      // Never above 0, but for rounding: of scores of 1e18 that would be a weight of infinity.
      vec log_weight = load(P) - load(w.lse + r) - load(w.lse_rest + r), dW = load(dS);
      vec weight = exp(log_weight > splat(0) ? splat(0) : log_weight);
      if (p.dropout.on) {
        ivec keep = kept(p, k, from + j, r);
        dW = keep ? dW * splat(p.dropout.factor) : splat(0);
        store(P, keep ? weight * splat(p.dropout.factor) : splat(0));
      } else
        store(P, weight);
      // Beside a weight of 0 the value may be hidden, and so large that dW is infinite: 0 x inf is NaN.
      store(dS, weight == splat(0) ? splat(0) : weight * (dW - load(w.delta + r)));
    }
  return true;
}

static size_t backward_scratch(const Problem *p) {
  Arena a{nullptr};
  BackwardRoom w(*p, a);
  if (p->splits == 1) a.take(p->S * (padded(p->E) + padded(p->Ev)));
  return a.used;
}

static size_t backward_partial(const Problem *p) { return p->S * (padded(p->E) + padded(p->Ev)); }

static void write_key(const Problem &p, int64_t head, int64_t j, const float *sums) {
  const int64_t b = head / p.Hkv, kv = head % p.Hkv;
  const float factor = scales_late(p) ? p.scale : 1; // else the queries were read times scale
  write_row(p.gradient.key, p.dtype, at(p.gradient.key, b, kv, j), p.E, factor, sums);
  write_row(p.gradient.value, p.dtype, at(p.gradient.value, b, kv, j), p.Ev, 1, sums + padded(p.E));
}

// Sums of a block of keys: sums += (dK, dV) and dquery += dQ.
static void add_gradients(const Problem &p, const Block &k, const BackwardRoom &w, int64_t n, float *sums) {
  const int64_t wide = padded(p.E), tall = padded(p.Ev), stride = wide + tall;
  matmul<false>(n, tall / LANES, k.count, w.P, k.width, w.context_rows, tall, sums + wide, stride, true);
  matmul<false>(n, wide / LANES, k.count, w.dS, k.width, w.query_rows, wide, sums, stride, true);
  matmul<true>(k.count, wide / LANES, n, w.dS, k.width, w.K.data, w.K.stride, w.dquery, wide, true);
}

// The same in tiles; dquery is turned.
static void add_gradients_by_tiles(const Problem &p, const Block &k, BackwardRoom &w, int64_t from, int64_t n, float *sums) {
  const int64_t wide = padded(p.E), tall = padded(p.Ev), stride = wide + tall, rows = steps_of(k.width);
  matmul_tiles(p.pieces, n, tall, rows, w.weights_left.left(w.P, n, k.width), w.dC_rows, sums + wide, stride, true);
  matmul_tiles(p.pieces, n, wide, rows, w.weights_left.left(w.dS, n, k.width), w.Q_rows, sums, stride, true);
  const Tiles K = w.turned_keys.of(p, k, p.key, from, from + n);
  matmul_tiles(p.pieces, wide, k.width, steps_of(n), K, w.dS_right.right(w.dS, n, k.width), w.dquery, k.width, true);
}

static void backward(const Problem *problem, float *scratch, int64_t task) {
  const Problem &p = *problem;
  const int64_t head = task / p.splits, split = p.splits - 1 - task % p.splits;
  const int64_t wide = padded(p.E), tall = padded(p.Ev), stride = wide + tall;
  Arena a{scratch};
  BackwardRoom w(p, a);
  float *sums = p.splits == 1 ? a.take(p.S * stride) : p.partial + (head * p.splits + split) * p.S * stride; // dK, dV
  memset(sums, 0, p.S * stride * 4);
  if (p.pieces) begin_tiles(), w.key_tiles.begin(0), w.value_tiles.begin(0), w.turned_keys.begin(0);
  Scan scan;
  Block k;
  for (int64_t block = split * p.blocks / p.splits; block < (split + 1) * p.blocks / p.splits; block++) {
    begin(p, k, head, block);
    read_block(p, k, w);
    scan.keys(p, k, k.from, k.to);
    if (hopeless(p)) break;
    memset(w.dquery, 0, ROWS * wide * 4);
    for (int64_t j = k.from; j < k.to; j += BACKWARD_KEYS) {
      const int64_t n = min(BACKWARD_KEYS, k.to - j);
      if (!gradients_of_scores(p, k, w, j, n)) continue;
      if (p.softcap > 0)
        for (int64_t i = 0; i < n * k.width; i += LANES) { // a hidden score may be NaN, by overflow, and so is its slope
          const vec dS = load(w.dS + i);
          store(w.dS + i, dS == splat(0) ? splat(0) : dS * load(w.slopes + i));
        }
      if (p.pieces) add_gradients_by_tiles(p, k, w, j, n, sums + j * stride);
      else add_gradients(p, k, w, n, sums + j * stride);
    }
    const float *dquery = w.dquery;
    if (p.pieces) {
      transpose(w.dquery, k.width, p.E, k.width, w.query, wide, wide);
      dquery = w.query;
    }
    for (int64_t r = 0; r < k.count; r++) {
      // Of a dead row all gradients of scores are 0.
      write_row(p.gradient.query, p.dtype, at(p.gradient.query, k.b, k.head[r], k.query[r]), p.E, p.scale, dquery + r * wide);
    }
  }
  if (p.pieces) end_tiles();
  if (p.splits == 1)
    for (int64_t j = 0; j < p.S; j++) write_key(p, head, j, sums + j * stride);
}

// dK and dV of keys [from, to) of one head from the splits' shares, in their order.
static void backward_sum(const Problem *problem, int64_t head, int64_t from, int64_t to) {
  const Problem &p = *problem;
  const int64_t stride = padded(p.E) + padded(p.Ev);
  float *part = p.partial + head * p.splits * p.S * stride;
  for (int64_t j = from; j < to; j++) {
    float *total = part + j * stride;
    for (int64_t s = 1; s < p.splits; s++)
      for (int64_t i = 0; i < stride; i += LANES) store(total + i, load(total + i) + load(total + s * p.S * stride + i));
    write_key(p, head, j, total);
  }
}

// The bias's gradient, dS summed over the axes that the bias broadcasts: a pass of its own. A task is one of the
// bias's own (batch item, head, block of queries), and goes over all that share it in a fixed order.
static void bias_backward(const Problem *problem, float *scratch, int64_t task) {
  const Problem &p = *problem;
  const Grid &to = p.gradient.bias;
  const int64_t blocks = (p.L + ROWS - 1) / ROWS, tasks = to.query ? blocks : 1, own_heads = to.head ? p.H : 1;
  const int64_t group = p.H / p.Hkv, part = task % tasks, own_head = task / tasks % own_heads, own_batch = task / tasks / own_heads;
  Arena a{scratch};
  BackwardRoom w(p, a);
  if (p.pieces) begin_tiles();
  Block k;
  for (int64_t b = to.batch ? own_batch : 0; b < (to.batch ? own_batch + 1 : p.B); b++)
    for (int64_t h = to.head ? own_head : 0; h < (to.head ? own_head + 1 : p.H); h++) {
      if (p.pieces) w.key_tiles.begin(0), w.value_tiles.begin(0);
      for (int64_t block = to.query ? part : 0; block < (to.query ? part + 1 : blocks); block++) {
        begin(p, k, b * p.Hkv + h / group, h % group * p.L + block * ROWS, min(ROWS, p.L - block * ROWS));
        read_block(p, k, w);
        for (int64_t j = k.from; j < k.to; j += BACKWARD_KEYS) {
          const int64_t n = min(BACKWARD_KEYS, k.to - j);
          if (!gradients_of_scores(p, k, w, j, n)) continue;
          for (int64_t r = 0; r < k.count; r++) {
            if (k.dead[r]) continue;
            float *row = (float *)to.data + b * to.batch + h * to.head + k.query[r] * to.query + j * to.key;
            for (int64_t i = 0; i < n; i++) row[i * to.key] += w.dS[i * k.width + r];
          }
        }
      }
    }
  if (p.pieces) end_tiles();
}

} // namespace
