// Loops over the edges of one target. See gather_sum.cpp for what they compute.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>

#include "segments.h"

namespace pyg_sar {

constexpr int64_t kAhead = 8;  // edges; about the latency of memory at one row each
constexpr int64_t kPrefetchedBytes = 512;  // the processor follows a longer row by itself

template <class Row, class Index>
PYG_SAR_INLINE void prefetch(const Row* rows, int64_t stride, int64_t width, const Index* source,
                             int64_t edge, int64_t stop) {
  if (edge + kAhead >= stop) return;
  const char* row = reinterpret_cast<const char*>(rows + source[edge + kAhead] * stride);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(Row));
  const int64_t end = bytes < kPrefetchedBytes ? bytes : kPrefetchedBytes;
  for (int64_t at = 0; at < end; at += 64) __builtin_prefetch(row + at);
}

// acc[c] += sum over edges in [start, stop) of w[e] * rows[source[e], c]
template <class Acc, class Row, class Index>
PYG_SAR_INLINE void sum_edges_of(Acc* __restrict__ acc, const Row* rows, int64_t stride,
                                 int64_t width, const Index* source, const Acc* weight,
                                 int64_t start, int64_t stop, int64_t end) {
  int64_t e = start;
  for (; e + 4 <= stop; e += 4) {
    for (int64_t k = 0; k < 4; ++k) prefetch(rows, stride, width, source, e + k, end);
    const Row* a = rows + source[e] * stride;
    const Row* b = rows + source[e + 1] * stride;
    const Row* c = rows + source[e + 2] * stride;
    const Row* d = rows + source[e + 3] * stride;
    if (weight == nullptr) {
      for (int64_t f = 0; f < width; ++f) {
        acc[f] += (static_cast<Acc>(a[f]) + static_cast<Acc>(b[f])) +
                  (static_cast<Acc>(c[f]) + static_cast<Acc>(d[f]));
      }
    } else {
      const Acc p = weight[e], q = weight[e + 1], r = weight[e + 2], s = weight[e + 3];
      for (int64_t f = 0; f < width; ++f) {
        acc[f] += (p * static_cast<Acc>(a[f]) + q * static_cast<Acc>(b[f])) +
                  (r * static_cast<Acc>(c[f]) + s * static_cast<Acc>(d[f]));
      }
    }
  }
  for (; e < stop; ++e) {
    prefetch(rows, stride, width, source, e, end);
    const Row* a = rows + source[e] * stride;
    if (weight == nullptr) {
      for (int64_t f = 0; f < width; ++f) acc[f] += static_cast<Acc>(a[f]);
    } else {
      const Acc p = weight[e];
      for (int64_t f = 0; f < width; ++f) acc[f] += p * static_cast<Acc>(a[f]);
    }
  }
}

#define PYG_SAR_SUM_EDGES(Acc, Row, Index)                                                      \
  PYG_SAR_VERSIONS void sum_edges(Acc* acc, const Row* rows, int64_t stride, int64_t width,     \
                                  const Index* source, const Acc* weight, int64_t start,        \
                                  int64_t stop, int64_t end) {                                  \
    sum_edges_of(acc, rows, stride, width, source, weight, start, stop, end);                   \
  }

PYG_SAR_SUM_EDGES(float, float, int32_t)
PYG_SAR_SUM_EDGES(float, float, int64_t)
PYG_SAR_SUM_EDGES(double, double, int32_t)
PYG_SAR_SUM_EDGES(double, double, int64_t)
PYG_SAR_SUM_EDGES(float, c10::BFloat16, int32_t)
PYG_SAR_SUM_EDGES(float, c10::BFloat16, int64_t)

}  // namespace pyg_sar
