// Attention by additive scores without an exponential per edge.
#pragma once

#include "attention_terms.h"

#include <vector>

namespace pyg_sar::attention {

// Of each target: rows as in Forward.
struct State {
  float *acc, *maximum, *normaliser;
};

// The rows that edges name, in order; where edges are many, all. Which rows lie beside them is chance, in a
// table that other parts read, too, and must not change a bit.
struct NamedRows {
  static constexpr int64_t kMany = 2;  // for each row

  std::vector<int32_t> numbers;
  int64_t count;

  NamedRows(const Terms<float>& t, int64_t num_rows, bool alone = false) : count(num_rows) {
    if (!alone && t.num_edges >= kMany * num_rows) return;
    std::vector<uint8_t> named(num_rows);
    for (int64_t e = 0; e < t.num_edges; ++e) named[t.source[e]] = 1;
    numbers.reserve(num_rows);
    for (int64_t i = 0; i < num_rows; ++i) {
      if (named[i] != 0) numbers.push_back(static_cast<int32_t>(i));
    }
    count = static_cast<int64_t>(numbers.size());
  }
  bool have_many(int64_t num_edges) const { return num_edges >= kMany * count; }
  PYG_SAR_INLINE int64_t operator[](int64_t k) const { return numbers.empty() ? k : numbers[k]; }
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
