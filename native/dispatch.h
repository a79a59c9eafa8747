// The choice among the instruction sets, for the module.
#pragma once
#include <vector>

#include "kernels.h"

const std::vector<const Kernels *> &available();  // built, and supported by this processor, best first
const Kernels *chosen();
bool choose(const char *isa);  // false: not available
bool openmp();
