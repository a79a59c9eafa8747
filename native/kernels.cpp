// The kernels, compiled once for each instruction set with -DISA=name.
//
// Everything in here and in the headers is static: a function with external linkage that is compiled for a new
// processor could be the one the linker keeps, for an old one too. For the same reason nothing of std:: is used.
#include "backward.h"

namespace {

static double multiply_adds(int64_t rounds) {
  vec a = splat(0.999f), b = splat(0.001f), sums[10] = {};
  for (int64_t i = 0; i < rounds; i++) {
    for (int once = 0; once < 64; once++) UNROLL for (int j = 0; j < 10; j++) sums[j] = sums[j] * a + b;
    __asm__ volatile("" : "+m"(a)); // so that each round is done
  }
  vec total = splat(0);
  for (int j = 0; j < 10; j++) total += sums[j];
  volatile float sink = sum(total);
  (void)sink;
  return (double)rounds * 64 * 10 * LANES;
}

} // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

extern "C" const Kernels JOIN(kernels_, ISA) = {
    TEXT(ISA),    forward_pieces, backward_pieces,  forward_scratch,  forward_partial, forward,      forward_merge,
    received,     received_sum,   backward_scratch, backward_partial, backward,        backward_sum, bias_backward,
    multiply_adds,
};
