// Attention by additive scores without an exponential per edge.
#pragma once

#include "attention_terms.h"

#include <vector>

namespace pyg_sar::attention {

// Of each target: rows as in Forward.
struct State {
  float *acc, *maximum, *normaliser;
};

// What Forward<float, kAdditive> adds to the state, where the processor, the shapes and the numbers
// are such that it is faster and as exact; else nothing is done. Returns whether it was done.
bool add_factored(const Terms<float>& t, int64_t num_rows, const State& state);

// What Sources<float, kAdditive> reads of targets, rows of heads but for grad_out, and adds to: what
// is null or empty isn't wanted.
struct SourceGradients {
  Matrix<const float> grad_out, maximum, normaliser, delta;
  Matrix<float> grad_value, grad_key;
  const std::vector<float*>& grad_query;  // of each chunk
};

// The same for gradients by source row: what Sources<float, kAdditive> adds.
bool add_factored_sources(const Terms<float>& t, int64_t num_targets, const SourceGradients& g);

}  // namespace pyg_sar::attention
