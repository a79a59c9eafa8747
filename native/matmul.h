// Products of small matrices: C (+)= A B, where A is read number by number and B by vectors, both in place.
#pragma once
#include "simd.h"

namespace {

// A number that templates are chosen by.
template <int N> struct Count {
  static constexpr int value = N;
};

// M rows by N vectors of C in registers. TURNED: A is stored [k][m] instead of [m][k]. Sums start at 0 and are
// added to C once, so a long sum over blocks of keys rounds once a block, not once a key.
template <int M, int N, bool TURNED>
INLINE void tile(int64_t K, const float *A, int64_t a_stride, const float *B, int64_t b_stride, float *C,
                 int64_t c_stride, bool add) {
  vec c[M][N];
  UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) c[i][j] = splat(0);
  for (int64_t k = 0; k < K; k++) {
    vec b[N];
    UNROLL for (int j = 0; j < N; j++) b[j] = load(B + k * b_stride + j * LANES);
    UNROLL for (int i = 0; i < M; i++) {
      vec a = splat(A[TURNED ? k * a_stride + i : i * a_stride + k]);
      UNROLL for (int j = 0; j < N; j++) c[i][j] += a * b[j];
    }
  }
  if (add) {
    UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) c[i][j] += load(C + i * c_stride + j * LANES);
  }
  UNROLL for (int i = 0; i < M; i++) UNROLL for (int j = 0; j < N; j++) store(C + i * c_stride + j * LANES, c[i][j]);
}

// As many rows of C at a time as the registers hold beside N vectors of B.
template <int N, bool TURNED>
static void panel(int64_t m, int64_t K, const float *A, int64_t a_stride, const float *B, int64_t b_stride, float *C,
                  int64_t c_stride, bool add) {
  constexpr int M = REGISTERS == 32 ? (N == 4 ? 6 : N == 3 ? 8 : 12) : N == 2 ? (LANES == 4 ? 4 : 6) : (LANES == 4 ? 8 : 12);
  int64_t i = 0;
  auto rows = [&](auto count) __attribute__((always_inline)) {
    constexpr int R = decltype(count)::value;
    tile<R, N, TURNED>(K, A + i * (TURNED ? 1 : a_stride), a_stride, B, b_stride, C + i * c_stride, c_stride, add);
    i += R;
  };
  while (i + M <= m) rows(Count<M>{});
  if (M > 8 && m - i >= 8) rows(Count<8>{});
  if (m - i >= 4) rows(Count<4>{});
  if (m - i >= 2) rows(Count<2>{});
  if (m - i >= 1) rows(Count<1>{});
}

// C[m][vectors * LANES] (+)= A[m][K] B[K][vectors * LANES]
template <bool TURNED>
static void matmul(int64_t m, int64_t vectors, int64_t K, const float *A, int64_t a_stride, const float *B,
                   int64_t b_stride, float *C, int64_t c_stride, bool add) {
  int64_t j = 0;
  auto columns = [&](auto count) __attribute__((always_inline)) {
    constexpr int N = decltype(count)::value;
    panel<N, TURNED>(m, K, A, a_stride, B + j * LANES, b_stride, C + j * LANES, c_stride, add);
    j += N;
  };
  if constexpr (REGISTERS == 32) {
    while (vectors - j >= 4 && vectors - j != 5) columns(Count<4>{});
    while (vectors - j >= 3) columns(Count<3>{});
  }
  while (vectors - j >= 2) columns(Count<2>{});
  if (j < vectors) columns(Count<1>{});
}

} // namespace
