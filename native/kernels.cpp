// Compiled once per instruction set: g++ -march=... -DISA=avx2 -c kernels.cpp.
#include "kernels.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#if defined(__AVX512F__)
enum { WIDTH = 16 };
#elif defined(__AVX2__)
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif

static float dot(const float *a, const float *b, int64_t n) {
  typedef float vector __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
  vector sum = {};
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) sum += *(const vector *)(a + i) * *(const vector *)(b + i);
  float total = 0;
  for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
  for (; i < n; i++) total += a[i] * b[i];
  return total;
}

extern const Kernels JOIN(kernels_, ISA) = {TEXT(ISA), WIDTH, dot};
