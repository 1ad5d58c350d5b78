// Rows that a block of edges names, and their weighted sums: the loop in which attention spends most time.
#pragma once

#include <cstdint>

#include "processors.h"

namespace pyg_sar::attention {

constexpr int64_t kFetchedBytes = 4096;  // of a row; the processor follows a longer one by itself

template <class T>
PYG_SAR_INLINE void fetch(const T* row, int64_t width) {
  const char* at = reinterpret_cast<const char*>(row);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t end = bytes < kFetchedBytes ? bytes : kFetchedBytes;
  for (int64_t b = 0; b < end; b += kLine) __builtin_prefetch(at + b);
}

// rows[e, h, c] = base[index[e] * stride + h * channels + c] of the n edges of a block.
template <class T>
struct Rows {
  const T* base;
  int64_t stride;
  const int32_t* index;
  int64_t n, left;  // edges of the block; all that there are from its first one on
  int64_t heads, channels;
  int64_t distance;  // how many edges ahead rows are fetched

  PYG_SAR_INLINE const T* at(int64_t e) const {
    return base + static_cast<int64_t>(index[e]) * stride;
  }
  PYG_SAR_INLINE void ahead(int64_t e) const { ahead(e, heads * channels); }
  PYG_SAR_INLINE const T* fetched(int64_t e) const {
    ahead(e);
    return at(e);
  }
  PYG_SAR_INLINE void ahead(int64_t e, int64_t values) const {
    if (e + distance < left) fetch(at(e + distance), values);
  }
};

// acc[h, c] += sum over e of w[e, h] * rows[e, h, c]. Up to a line behind the weights may be read (and is
// not used).
void accumulate(float* acc, const float* w, const Rows<float>& rows, bool fetches);
void accumulate(double* acc, const double* w, const Rows<double>& rows, bool fetches);

}  // namespace pyg_sar::attention
