// Sums of rows for a run of targets. See gather_sum.cpp for what they compute.
//
// [Note: tiles] Columns are taken in tiles of at most kMostVectors registers. A target's sums of a
// tile stay in registers over all its edges, and a row's lines are asked for some edges ahead: about
// twenty lines are in flight, which hides most of the latency of memory. So are the lines of a later
// target, which matters where targets have few edges. The last vector of a tile begins where a whole
// one fits, so that it overlaps the one before it: no lane is masked, and lanes that another vector
// has added are left out at the end.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "segments.h"
#include "vectors.h"

namespace pyg_sar {

constexpr int64_t kTargetsAhead = 3;

// Fewer of half precision, whose sums are wider: each width is compiled for each kind of processor.
template <class Row>
constexpr int kMostVectors = std::is_same_v<Row, Wide<Row>> ? 8 : 4;

template <class Row>
struct SumTile {
  Segments<int32_t> segments;
  const int64_t* wide_offsets;  // in place of the segments', where there are so many edges
  Row* out;         // the tile's first column
  const Row* rows;  // the same
  int64_t out_stride, row_stride;
  const Wide<Row>* weight;  // in the order of the edges, or one number for all
  int64_t weight_stride;    // 1, or 0
  int width;
  bool crosses;  // see crosses_lines()

  PYG_SAR_INLINE int64_t offset(int64_t t) const {
    return wide_offsets == nullptr ? segments.offsets[t] : wide_offsets[t];
  }

  PYG_SAR_INLINE void ask_for(const Row* target) const {
    const char* const at = reinterpret_cast<const char*>(target);
    PYG_SAR_ROLLED
    for (int64_t b = 0; b < width * int64_t{sizeof(Row)}; b += kLine) __builtin_prefetch(at + b, 1);
  }

  template <int kBytes, int kLanes, int kVectors, bool kWeighted>
  PYG_SAR_INLINE void add(int64_t first, int64_t last) const {
    using Acc = Wide<Row>;
    // Sums that don't wait for each other; distances that keep about as many lines in flight.
    constexpr int kOnes = in_a_register<Acc, kLanes, kBytes>, kParts = kLanes / kOnes;
    constexpr int kApart = kVectors == 1 ? 4 : kVectors <= 4 ? 2 : 1;
    constexpr int64_t kAhead = kVectors <= 2 ? 64 : kVectors <= 4 ? 32 : 16;
    const int64_t tail = width - kLanes, final = segments.num_edges - 1;
    const int32_t* const source = segments.source;
    const int64_t over = crosses ? (width - 1) * int64_t{sizeof(Row)} : 0;
    for (int64_t t = first; t < last; ++t) {
      if (t + kTargetsAhead < last) ask_for(out + segments.target(t + kTargetsAhead) * out_stride);
      Vector<Acc, kOnes> sum[kVectors][kApart][kParts] = {};
      const auto add_edge = [&](int64_t e, int part) PYG_SAR_INLINED {
        const int64_t later = e + kAhead < final ? e + kAhead : final;
        const char* next = reinterpret_cast<const char*>(rows + source[later] * row_stride);
        const Row* row = rows + source[e] * row_stride;
        [[maybe_unused]] const Acc by = kWeighted ? weight[e * weight_stride] : 1;
        constexpr int64_t kRead = kVectors * kLanes * sizeof(Row);
        PYG_SAR_UNROLLED
        for (int64_t at = 0; at < kRead; at += kLine) __builtin_prefetch(next + at);
        if (over != 0) __builtin_prefetch(next + over);
        PYG_SAR_UNROLLED
        for (int v = 0; v < kVectors; ++v) {
          const Row* const from = row + (v + 1 < kVectors ? v * kLanes : tail);
          PYG_SAR_UNROLLED
          for (int p = 0; p < kParts; ++p) {
            Vector<Acc, kOnes> x;
            load<kOnes>(x, from + p * kOnes);
            if constexpr (kWeighted) {
              sum[v][part][p] += x * by;
            } else {
              sum[v][part][p] += x;
            }
          }
        }
      };
      int64_t e = offset(t);
      const int64_t stop = offset(t + 1);
      for (; e + kApart <= stop; e += kApart) {
        PYG_SAR_UNROLLED
        for (int part = 0; part < kApart; ++part) add_edge(e + part, part);
      }
      PYG_SAR_ROLLED
      for (; e < stop; ++e) add_edge(e, 0);
      Row* target = out + segments.target(t) * out_stride;
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; ++v) {
        PYG_SAR_UNROLLED
        for (int part = 1; part < kApart; ++part) {
          PYG_SAR_UNROLLED
          for (int p = 0; p < kParts; ++p) sum[v][0][p] += sum[v][part][p];
        }
        Vector<Acc, kLanes> found;
        std::memcpy(&found, sum[v][0], sizeof(found));
        const bool tails = v + 1 == kVectors;
        add_to<kLanes>(target + (tails ? tail : v * kLanes), found,
                       tails ? kVectors * kLanes - width : 0);
      }
    }
  }

  // Only float32 has a version without weights; others multiply by 1, which takes a little longer where rows are
  // in a cache.
  template <int kBytes, int kLanes, int kVectors>
  PYG_SAR_INLINE void run(int64_t first, int64_t last) const {
    if constexpr (std::is_same_v<Row, float>) {
      if (weight_stride == 0) return add<kBytes, kLanes, kVectors, false>(first, last);
    }
    add<kBytes, kLanes, kVectors, true>(first, last);
  }

  // Narrow rows: one or two vectors of fewer lanes.
  template <int kBytes, int kLanes>
  PYG_SAR_INLINE void run_narrow(int64_t first, int64_t last) const {
    if constexpr (kLanes > 0) {
      if (width < kLanes) return run_narrow<kBytes, kLanes / 2>(first, last);
      if (width == kLanes) return run<kBytes, kLanes, 1>(first, last);
      if constexpr (kLanes > 1) run<kBytes, kLanes, 2>(first, last);
    }
  }

  // Registers of kBytes.
  template <int kBytes>
  PYG_SAR_INLINE void go(int64_t first, int64_t last) const {
    constexpr int kLanes = kFullLanes<Wide<Row>>;
    const int vectors = (width + kLanes - 1) / kLanes;
    if (width < kLanes) return run_narrow<kBytes, kLanes / 2>(first, last);
    if (vectors == 1) return run<kBytes, kLanes, 1>(first, last);
    if (vectors == 2) return run<kBytes, kLanes, 2>(first, last);
    if (vectors == 3) return run<kBytes, kLanes, 3>(first, last);
    if constexpr (kMostVectors<Row> > 4) {
      if (vectors == 5) return run<kBytes, kLanes, 5>(first, last);
      if (vectors == 6) return run<kBytes, kLanes, 6>(first, last);
      if (vectors == 7) return run<kBytes, kLanes, 7>(first, last);
      if (vectors == 8) return run<kBytes, kLanes, 8>(first, last);
    }
    run<kBytes, kLanes, 4>(first, last);
  }
};

template <class Row>
void sum_tile(const SumTile<Row>& tile, int64_t first, int64_t last) {
  on_best([&](auto registers) PYG_SAR_INLINED {
    tile.template go<decltype(registers)::kBytes>(first, last);
  });
}

}  // namespace pyg_sar
