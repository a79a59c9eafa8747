// Baseline code: which of the compiled instruction sets this processor has.
#include "dispatch.h"

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cstring>
#if defined(__linux__) && defined(HAVE_ISA_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif


#ifdef HAVE_ISA_BASELINE
extern const Kernels kernels_baseline;
#endif
#ifdef HAVE_ISA_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef HAVE_ISA_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef HAVE_ISA_AVX512BF16
extern const Kernels kernels_avx512bf16;
#endif
#ifdef HAVE_ISA_AMX
extern const Kernels kernels_amx;
#endif
#ifdef HAVE_ISA_NEON
extern const Kernels kernels_neon;
#endif
#ifdef HAVE_ISA_GENERIC
extern const Kernels kernels_generic;
#endif

#if defined(__x86_64__)
#define HAS(feature) __builtin_cpu_supports(feature)
static bool v3() { return HAS("avx2") && HAS("fma") && HAS("f16c") && HAS("bmi") && HAS("bmi2") && HAS("lzcnt"); }
static bool v4() {
  return v3() && HAS("avx512f") && HAS("avx512bw") && HAS("avx512cd") && HAS("avx512dq") && HAS("avx512vl");
}
#endif

static std::vector<const Kernels *> find() {
  std::vector<const Kernels *> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
#if defined(__linux__) && defined(HAVE_ISA_AMX)
  // Linux gives the tiles only to processes that ask: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  if (v4() && HAS("avx512bf16") && HAS("amx-tile") && HAS("amx-bf16") && !syscall(SYS_arch_prctl, 0x1023, 18))
    found.push_back(&kernels_amx);
#endif
#ifdef HAVE_ISA_AVX512BF16
  if (v4() && HAS("avx512bf16")) found.push_back(&kernels_avx512bf16);
#endif
#ifdef HAVE_ISA_AVX512
  if (v4()) found.push_back(&kernels_avx512);
#endif
#ifdef HAVE_ISA_AVX2
  if (v3()) found.push_back(&kernels_avx2);
#endif
#ifdef HAVE_ISA_BASELINE
  found.push_back(&kernels_baseline);
#endif
#ifdef HAVE_ISA_NEON
  found.push_back(&kernels_neon);
#endif
#ifdef HAVE_ISA_GENERIC
  found.push_back(&kernels_generic);
#endif
  return found;
}

const std::vector<const Kernels *> &available() {
  static const std::vector<const Kernels *> found = find();
  return found;
}

static const Kernels *current = nullptr;

const Kernels *chosen() { return current ? current : available().front(); }

bool choose(const char *isa) {
  for (const Kernels *kernels : available())
    if (!strcmp(kernels->isa, isa)) {
      current = kernels;
      return true;
    }
  return false;
}

bool openmp() {
#ifdef _OPENMP
  return omp_get_max_threads() > 0;
#else
  return false;
#endif
}
