// Attention by additive scores without an exponential per edge.
#pragma once

#include "attention.h"

namespace pyg_sar::attention {

// Of each target: rows as in Forward.
struct State {
  float *acc, *maximum, *normaliser;
};

// What Forward<float, kAdditive> adds to the state, where the processor, the shapes and the numbers
// are such that it is faster and as exact; else nothing is done. Returns whether it was done.
bool add_factored(const Terms<float>& t, int64_t num_rows, const State& state);

}  // namespace pyg_sar::attention
