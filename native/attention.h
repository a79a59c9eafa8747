// One attention problem as the kernels see it, and the table of functions that each instruction set provides.
// Plain data only: the structs are shared by objects that are compiled for different processors.
#pragma once
#include <cstddef>
#include <cstdint>

enum class Dtype : int32_t { f32, bf16, f16 };

// (batch, heads, rows, features); strides in elements, 0 broadcasts, features lie side by side.
struct View {
  void *data;
  int64_t batch, head, row;
};

// (batch, heads, queries, keys); strides in elements, 0 broadcasts. data == nullptr: there is none.
struct Grid {
  const void *data;
  int64_t batch, head, query, key;
};

// Query q of batch item b sees the keys of [max(q + left, first), min(q + right + 1, behind)) that `visible` and
// a bias above -inf leave visible. first and behind hold int64 and have no axes of heads and keys.
struct Masking {
  int64_t left, right;
  Grid first, behind;
  Grid visible; // bytes, 0 = hidden
  Grid bias;    // added to the scaled scores
  Dtype bias_dtype;
};

// A weight is kept if a hash of its place, counted from the given batch item, query and key, is at least
// `threshold`; kept ones are multiplied by `factor`.
struct Dropout {
  bool on;
  int32_t threshold;
  uint32_t seed0, seed1;
  float factor;
  int64_t batch, query, key;
};

constexpr int MAX_GROUPS = 16, MAX_OFFSETS = 64;

// What is looked at; null or 0: not asked for. Contiguous, (B, H, L) unless said otherwise.
struct Statistics {
  float *lse; // (B, H, L, 2): the nearest float, and what it is short of, which beside 1e38 is all of log(sum)
  float *entropy, *max_weight, *distance;
  float *received; // (B, H, S)
  float *rest;     // what the sinks take
  float *max_score;
  int64_t top;
  float *top_weights; // (B, H, L, top)
  int32_t *top_keys;
  int64_t groups;
  Grid group[MAX_GROUPS]; // bytes with axes of batch and keys; not 0 = in the group
  float *mass;            // (groups, B, H, L)
  int64_t offsets;
  int64_t offset[MAX_OFFSETS];
  float *at_offsets; // (B, H, L, offsets)
};

struct Gradients {
  View context;           // of the context, given
  View query, key, value; // wanted
  Grid bias;              // wanted, float; strides 0 where the bias broadcasts. data == nullptr: not wanted
};

struct Problem {
  Dtype dtype; // of query, key, value, context and their gradients
  int64_t B, H, Hkv, L, S, E, Ev;
  float scale;
  float softcap;      // scaled scores s become softcap tanh(s / softcap), before the bias; 0: they stay
  const float *sinks; // (H): a logit beside each row's scores, without a value; or null
  View query, key, value, context;
  Masking mask;
  Dropout dropout;
  Statistics seen;
  Gradients gradient;
  int64_t threads;

  // Filled in by the driver.
  int pieces;         // of bfloat16 that numbers are multiplied as (tiles.h); 0: they are multiplied as floats
  int64_t blocks;     // blocks of query rows for each key/value head
  int64_t splits;     // runs of blocks, each a task
  int64_t key_splits; // runs of keys, each a task (few queries, many keys)
  int64_t key_run;    // keys in such a run
  float *partial;     // what tasks leave for a later sum
  int32_t *non_finite; // set to 1 where an input holds a NaN or an infinity that a query could see
};

struct Kernels {
  const char *name;
  int (*forward_pieces)(const Problem *);
  int (*backward_pieces)(const Problem *);
  size_t (*forward_scratch)(const Problem *); // floats that a task works in
  size_t (*forward_partial)(const Problem *); // floats that a task leaves
  void (*forward)(const Problem *, float *scratch, int64_t task);
  void (*forward_merge)(const Problem *, int64_t head); // key_splits > 1
  void (*received)(const Problem *, float *scratch, int64_t task);      // a pass of its own
  void (*received_sum)(const Problem *, int64_t head);
  size_t (*backward_scratch)(const Problem *);
  size_t (*backward_partial)(const Problem *);
  void (*backward)(const Problem *, float *scratch, int64_t task);
  void (*backward_sum)(const Problem *, int64_t head, int64_t from, int64_t to);
  void (*bias_backward)(const Problem *, float *scratch, int64_t task);
  double (*multiply_adds)(int64_t rounds); // how many multiply-adds were done, all in registers
};

constexpr int64_t ROWS = 64;     // query rows in a block
constexpr int64_t KEYS = 256;    // runs and chunks of keys are multiples of it
constexpr int64_t TOGETHER = 32; // blocks that go over a chunk of keys before the next chunk comes, at most
constexpr int64_t STRIP = 4096;  // keys whose weights can be kept until their sum is known: 1 MiB
