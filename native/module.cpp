// The Python module clearhead._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"

namespace nb = nanobind;

static std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels *kernels : available()) names.push_back(kernels->isa);
  return names;
}

static void set_isa(const std::string &name) {
  if (choose(name.c_str())) return;
  std::string all;
  for (const std::string &isa : isas()) all += (all.empty() ? "" : ", ") + isa;
  throw nb::value_error(("instruction set '" + name + "' was not built or is not supported by this processor: choose from " + all).c_str());
}

NB_MODULE(_native, m) {
  m.def("isa", [] { return chosen()->isa; }, "The instruction set in use.");
  m.def("isas", isas, "The instruction sets that were built and that this processor has, best first.");
  m.def("set_isa", set_isa, nb::arg("name"), "Use another instruction set; ValueError if it is not in isas().");
  m.def("openmp", openmp, "Whether the kernels were built with threads.");
}
