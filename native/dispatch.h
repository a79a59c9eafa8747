// What the module calls: one problem, on the instruction set in use and as many threads as it says.
#pragma once
#include "attention.h"
#include <string>
#include <vector>

std::vector<std::string> isas();       // built, and supported by this processor; best first
const char *isa();                     // the one in use
bool set_isa(const std::string &name); // false: not one of isas()
bool openmp();
double peak(int64_t threads); // GFLOP/s of multiply-adds (two each), all in registers

bool attend(Problem &p);        // false: a NaN or an infinity that a query could see; the results mean nothing
bool attend_backward(Problem &p);
