// Choice of the instruction set, cutting into tasks, threads. Compiled for any processor of its kind.
#include "dispatch.h"
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define KERNELS(name) extern "C" const Kernels kernels_##name;
#if defined(HAVE_ISA_AVX512)
KERNELS(avx512)
#endif
#if defined(HAVE_ISA_AVX512BF16)
KERNELS(avx512bf16)
#endif
#if defined(HAVE_ISA_AMX)
KERNELS(amx)
#endif
#if defined(HAVE_ISA_AVX2)
KERNELS(avx2)
#endif
#if defined(HAVE_ISA_BASELINE)
KERNELS(baseline)
#endif
#if defined(HAVE_ISA_NEON)
KERNELS(neon)
#endif
#if defined(HAVE_ISA_GENERIC)
KERNELS(generic)
#endif
#undef KERNELS

namespace {

#if defined(__x86_64__)
#define HAS(feature) __builtin_cpu_supports(feature)
bool v3() { return HAS("avx2") && HAS("fma") && HAS("f16c") && HAS("bmi") && HAS("bmi2") && HAS("lzcnt"); }
bool v4() { return v3() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl"); }
#endif

std::vector<const Kernels *> find() {
  std::vector<const Kernels *> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(HAVE_ISA_AMX) && defined(__linux__)
  // Linux gives the registers of tiles to processes that ask for them: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  if (v4() && HAS("avx512bf16") && HAS("amx-tile") && HAS("amx-bf16") && !syscall(SYS_arch_prctl, 0x1023, 18))
    found.push_back(&kernels_amx);
#endif
#if defined(HAVE_ISA_AVX512BF16)
  if (v4() && HAS("avx512bf16")) found.push_back(&kernels_avx512bf16);
#endif
#if defined(HAVE_ISA_AVX512)
  if (v4()) found.push_back(&kernels_avx512);
#endif
#if defined(HAVE_ISA_AVX2)
  if (v3()) found.push_back(&kernels_avx2);
#endif
#if defined(HAVE_ISA_BASELINE)
  found.push_back(&kernels_baseline);
#endif
#if defined(HAVE_ISA_NEON)
  found.push_back(&kernels_neon);
#endif
#if defined(HAVE_ISA_GENERIC)
  found.push_back(&kernels_generic);
#endif
  return found;
}

const std::vector<const Kernels *> &usable() {
  static const std::vector<const Kernels *> found = find();
  return found;
}

const Kernels *chosen = usable().front();

bool forked = false; // OpenMP's threads don't exist in a forked child, and starting a team there hangs

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr size_t KEPT = 8 << 20; // floats

// Scratch of a thread, kept from call to call if small: fresh pages cost more than a small attention.
float *scratch(size_t floats) {
  struct Free {
    void operator()(float *p) const { std::free(p); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local size_t size = 0;
  if (floats > size || !floats) { // none: it is given back
    memory.reset();
    size = 0;
    if (!floats) return nullptr;
    memory.reset((float *)std::aligned_alloc(64, (floats * 4 + 127) / 64 * 64));
    if (!memory) return nullptr;
    size = floats;
  }
  return memory.get();
}

// run(scratch, i) for i < n, each thread with a scratch of its own.
template <class F> void parallel(int64_t n, int64_t threads, size_t floats, F run) {
  bool enough = true;
  if (threads > n) threads = n;
#if defined(_OPENMP)
  if (threads > 1 && !forked && !omp_in_parallel()) {
    const int64_t chunk = n / (threads * 16) > 1 ? n / (threads * 16) : 1;
#pragma omp parallel num_threads((int)threads)
    {
      float *own = scratch(floats);
      if (!own) {
#pragma omp atomic write
        enough = false;
      }
#pragma omp for schedule(dynamic, chunk)
      for (int64_t i = 0; i < n; i++)
        if (own) run(own, i);
      if (floats > KEPT) scratch(0);
    }
    if (!enough) throw std::bad_alloc();
    return;
  }
#endif
  float *own = scratch(floats);
  if (!own) throw std::bad_alloc();
  for (int64_t i = 0; i < n; i++) run(own, i);
  if (floats > KEPT) scratch(0);
}

// Below about 0.3 million multiply-adds a second thread costs more than it brings.
int64_t threads_for(const Problem &p, double passes) {
  const double work = passes * p.B * p.H * (double)p.L * p.S * (p.E + p.Ev);
  return work < 3e5 ? 1 : p.threads;
}

// A NaN or +inf among the sinks is for the caller, like one in any other input.
bool sinks_fit(const Problem &p) {
  if (p.non_finite && p.sinks)
    for (int64_t h = 0; h < p.H; h++)
      if (!(p.sinks[h] < std::numeric_limits<float>::infinity())) return false;
  return true;
}

struct Partial { // what tasks leave for a later sum
  float *data;
  explicit Partial(size_t floats) : data((float *)std::aligned_alloc(64, (floats * 4 + 127) / 64 * 64)) {
    if (!data) throw std::bad_alloc();
  }
  ~Partial() { std::free(data); }
};

} // namespace

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels *k : usable()) names.push_back(k->name);
  return names;
}

const char *isa() { return chosen->name; }

bool set_isa(const std::string &name) {
  for (const Kernels *k : usable())
    if (name == k->name) return chosen = k, true;
  return false;
}

bool openmp() {
#if defined(_OPENMP)
  return true;
#else
  return false;
#endif
}

double peak(int64_t threads) {
  double total = 0;
  const auto start = std::chrono::steady_clock::now();
  const Kernels &K = *chosen;
  parallel(threads, threads, 16, [&](float *, int64_t) {
    double done = K.multiply_adds(50000);
#if defined(_OPENMP)
#pragma omp atomic
#endif
    total += done;
  });
  return 2e-9 * total / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

bool attend(Problem &p) {
  const Kernels &K = *chosen;
  const int64_t heads = p.B * p.Hkv, rows = p.H / p.Hkv * p.L, threads = threads_for(p, 1);
  if (!rows && p.seen.received) std::memset(p.seen.received, 0, p.B * p.H * p.S * 4);
  if (!heads || !rows) return true;
  if (!sinks_fit(p)) return false;
  int32_t non_finite = 0;
  if (p.non_finite) p.non_finite = &non_finite;
  p.blocks = ceil_div(rows, ROWS);
  p.splits = p.key_splits = 1;
  p.key_run = p.S;
  p.partial = nullptr;
  // Few queries and many keys: the keys are cut, whatever the number of threads, so that no bit depends on it.
  if (p.blocks == 1 && heads < 64 && p.S >= 4 * KEYS) {
    p.key_splits = std::min(p.S / (2 * KEYS), ceil_div(64, heads));
    p.key_run = ceil_div(ceil_div(p.S, p.key_splits), KEYS) * KEYS;
    p.key_splits = ceil_div(p.S, p.key_run);
  }
  p.pieces = K.forward_pieces(&p);
  if (p.key_splits > 1) {
    Partial partial(heads * p.key_splits * K.forward_partial(&p));
    p.partial = partial.data;
    const int64_t tasks = heads * p.key_splits;
    parallel(tasks, threads, K.forward_scratch(&p), [&](float *s, int64_t i) { K.forward(&p, s, i); });
    if (non_finite) return false;
    parallel(heads, threads, 16, [&](float *, int64_t i) { K.forward_merge(&p, i); });
    if (p.seen.received)
      parallel(tasks, threads, K.forward_scratch(&p), [&](float *s, int64_t i) { K.received(&p, s, i); });
    return true;
  }
  // Several tasks a thread, so that none waits long for the last; one thread goes through a head at once.
  if (threads > 1) p.splits = std::min(p.blocks, ceil_div(8 * threads, heads));
  std::unique_ptr<Partial> partial;
  if (p.seen.received && p.splits > 1) {
    partial = std::make_unique<Partial>(p.B * p.H * p.splits * p.S);
    p.partial = partial->data;
  }
  parallel(heads * p.splits, threads, K.forward_scratch(&p), [&](float *s, int64_t i) { K.forward(&p, s, i); });
  if (non_finite) return false;
  if (partial) parallel(heads, threads, 16, [&](float *, int64_t i) { K.received_sum(&p, i); });
  return true;
}

bool attend_backward(Problem &p) {
  const Kernels &K = *chosen;
  const int64_t heads = p.B * p.Hkv, rows = p.H / p.Hkv * p.L, threads = threads_for(p, 2.5);
  if (!heads) return true;
  if (!sinks_fit(p)) return false;
  int32_t non_finite = 0;
  if (p.non_finite) p.non_finite = &non_finite;
  p.blocks = ceil_div(rows, ROWS);
  p.splits = p.key_splits = 1;
  p.pieces = K.backward_pieces(&p);
  p.partial = nullptr;
  // Each split sums its own dK and dV: no more of them than threads need.
  if (threads > 1 && heads < 4 * threads) p.splits = std::max<int64_t>(1, std::min(p.blocks, ceil_div(4 * threads, heads)));
  std::unique_ptr<Partial> partial;
  if (p.splits > 1) {
    partial = std::make_unique<Partial>(heads * p.splits * K.backward_partial(&p));
    p.partial = partial->data;
  }
  parallel(heads * p.splits, threads, K.backward_scratch(&p), [&](float *s, int64_t i) { K.backward(&p, s, i); });
  if (non_finite) return false;
  if (partial) {
    const int64_t run = 256, runs = ceil_div(p.S, run);
    parallel(heads * runs, threads, 16, [&](float *, int64_t i) {
      K.backward_sum(&p, i / runs, i % runs * run, std::min(p.S, (i % runs + 1) * run));
    });
  }
  const Grid &bias = p.gradient.bias;
  if (bias.data) {
    const int64_t tasks = (bias.batch ? p.B : 1) * (bias.head ? p.H : 1) * (bias.query ? ceil_div(p.L, ROWS) : 1);
    parallel(tasks, threads, K.backward_scratch(&p), [&](float *s, int64_t i) { K.bias_backward(&p, s, i); });
  }
  return !non_finite;
}

#if defined(__unix__) || defined(__APPLE__)
namespace {
const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
}
#endif
