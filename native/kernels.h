// What each instruction set provides, as plain C structs.
#pragma once
#include <cstdint>

struct Kernels {
  const char *isa;
  int64_t width;  // floats a vector
  float (*dot)(const float *a, const float *b, int64_t n);
};
