// Sums of rows for a run of targets. See gather_sum.cpp for what they compute.
//
// [Note: tiles] Columns are taken in tiles of at most kMostVectors cache lines. A target's sums of a
// tile stay in registers over all its edges, and a row's lines are asked for some edges ahead: about
// twenty lines are in flight, which hides most of the latency of memory. The last vector of a
// tile begins where a whole one fits, so that it overlaps the one before it: no lane is masked, and
// lanes that another vector has added are left out at the end.
#pragma once

#include <cstdint>

#include "segments.h"
#include "vectors.h"

namespace pyg_sar {

constexpr int kMostVectors = 8;

template <class Row, class Index>
struct SumTile {
  Segments<Index> segments;
  Row* out;         // the tile's first column
  const Row* rows;  // the same
  int64_t out_stride, row_stride;
  const Wide<Row>* weight;  // in the order of the edges; null: 1
  int width;

  template <int kLanes, int kVectors, bool kWeighted>
  PYG_SAR_INLINE void run(int64_t first, int64_t last) const {
    using Acc = Wide<Row>;
    // Sums that don't wait for each other; distances that keep about as many lines in flight.
    constexpr int kApart = kVectors == 1 ? 4 : kVectors <= 4 ? 2 : 1;
    constexpr int64_t kAhead = kVectors <= 2 ? 64 : kVectors <= 4 ? 32 : 16;
    const int64_t tail = width - kLanes, final = segments.num_edges - 1;
    const Index* const source = segments.source;
    for (int64_t t = first; t < last; ++t) {
      Vector<Acc, kLanes> sum[kVectors][kApart] = {};
      const auto add = [&](int64_t e, int part) __attribute__((always_inline)) {
        const int64_t later = e + kAhead < final ? e + kAhead : final;
        const char* next = reinterpret_cast<const char*>(rows + source[later] * row_stride);
        const Row* row = rows + source[e] * row_stride;
        constexpr int64_t kBytes = kLanes * sizeof(Row);
        for (int64_t at = 0; at < kVectors * kBytes; at += kLine) __builtin_prefetch(next + at);
        for (int v = 0; v < kVectors; ++v) {
          Vector<Acc, kLanes> x;
          load<kLanes>(x, row + (v + 1 < kVectors ? v * kLanes : tail));
          if constexpr (kWeighted) {
            sum[v][part] += x * weight[e];
          } else {
            sum[v][part] += x;
          }
        }
      };
      int64_t e = segments.offsets[t];
      const int64_t stop = segments.offsets[t + 1];
      for (; e + kApart <= stop; e += kApart) {
        for (int part = 0; part < kApart; ++part) add(e + part, part);
      }
      for (; e < stop; ++e) add(e, 0);
      Row* target = out + segments.target(t) * out_stride;
      for (int v = 0; v < kVectors; ++v) {
        for (int part = 1; part < kApart; ++part) sum[v][0] += sum[v][part];
        const bool tails = v + 1 == kVectors;
        add_to<kLanes>(target + (tails ? tail : v * kLanes), sum[v][0],
                       tails ? kVectors * kLanes - width : 0);
      }
    }
  }

  template <int kLanes, int kVectors>
  PYG_SAR_INLINE void run(int64_t first, int64_t last) const {
    weight == nullptr ? run<kLanes, kVectors, false>(first, last)
                      : run<kLanes, kVectors, true>(first, last);
  }

  // Narrow rows: one or two vectors of fewer lanes.
  template <int kLanes>
  PYG_SAR_INLINE void run_narrow(int64_t first, int64_t last) const {
    if constexpr (kLanes > 0) {
      if (width < kLanes) return run_narrow<kLanes / 2>(first, last);
      width == kLanes ? run<kLanes, 1>(first, last) : run<kLanes, 2>(first, last);
    }
  }

  PYG_SAR_INLINE void operator()(int64_t first, int64_t last) const {
    constexpr int kLanes = kFullLanes<Wide<Row>>;
    switch ((width + kLanes - 1) / kLanes) {
      case 1:
        return width == kLanes ? run<kLanes, 1>(first, last) : run_narrow<kLanes / 2>(first, last);
      case 2:
        return run<kLanes, 2>(first, last);
      case 3:
        return run<kLanes, 3>(first, last);
      case 4:
        return run<kLanes, 4>(first, last);
      case 5:
        return run<kLanes, 5>(first, last);
      case 6:
        return run<kLanes, 6>(first, last);
      case 7:
        return run<kLanes, 7>(first, last);
      default:
        return run<kLanes, kMostVectors>(first, last);
    }
  }
};

// One function for each kind of processor, of each type of rows and indices.
#define PYG_SAR_SUM_TILE(Row, Index)                                                          \
  PYG_SAR_VERSIONS void sum_tile(const SumTile<Row, Index>& tile, int64_t first, int64_t last) { \
    tile(first, last);                                                                        \
  }

PYG_SAR_SUM_TILE(float, int32_t)
PYG_SAR_SUM_TILE(float, int64_t)
PYG_SAR_SUM_TILE(double, int32_t)
PYG_SAR_SUM_TILE(double, int64_t)
PYG_SAR_SUM_TILE(c10::BFloat16, int32_t)
PYG_SAR_SUM_TILE(c10::BFloat16, int64_t)

}  // namespace pyg_sar
