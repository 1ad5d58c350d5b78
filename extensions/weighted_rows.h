// Weighted sums of the rows that a block of edges names: the loop in which attention spends most time.
#pragma once

#include <cstdint>

namespace pyg_sar::attention {

// acc[h, c] += sum over e < n of w[e, h] * base[index[e] * stride + h * channels + c]. Rows are asked for
// some edges ahead where `fetches`, up to the `left` edges that follow. Up to a line behind the weights
// may be read (and is not used).
struct Block {
  const int32_t* index;
  int64_t n, left, stride, heads, channels;
  bool fetches;
};

void accumulate(float* acc, const float* w, const float* base, const Block& block);
void accumulate(double* acc, const double* w, const double* base, const Block& block);

}  // namespace pyg_sar::attention
