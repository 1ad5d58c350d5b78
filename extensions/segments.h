// Edges grouped by what they add to (compressed sparse rows), as all kernels take them: their checks,
// and the way in which threads share them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

#include "parallel.h"
#include "processors.h"
#include "tensors.h"

namespace pyg_sar {

// Whether all of x is in [0, bound).
template <class Index>
bool within(const Index* x, int64_t size, int64_t bound);
// The same, on all threads.
template <class Index>
bool all_within(const Index* x, int64_t size, int64_t bound) {
  std::atomic<bool> good{true};
  parallel_for(0, size, 1 << 18, [&](int64_t start, int64_t stop) {
    if (!within(x + start, stop - start, bound)) good = false;
  });
  return good;
}
// Whether x ascends; strictly: nothing comes twice.
template <class Index>
bool ascends(const Index* x, int64_t size, bool strictly);

// Target t, row target(t) of what is added to, has the edges [offsets[t], offsets[t + 1]). Edge e
// reads row source[e]; weights and the like are found under its number(e).
template <class Index>
struct Segments {
  const Index* source;
  const Index* offsets;
  const int64_t* targets;  // null: 0, 1, ...
  const Index* edges;      // null: 0, 1, ...
  int64_t num_edges, num_targets;

  PYG_SAR_INLINE int64_t target(int64_t t) const { return targets == nullptr ? t : targets[t]; }
  PYG_SAR_INLINE int64_t number(int64_t e) const { return edges == nullptr ? e : edges[e]; }
};

// The same as tensors.
struct SegmentTensors {
  Tensor source, offsets;
  OptionalTensor targets, edges;

  bool is_narrow() const { return source.scalar_type() == kInt; }
};

// Checks shapes and dtypes, and makes them contiguous.
SegmentTensors checked(const char* op, const Tensor& source, const Tensor& offsets,
                       const OptionalTensor& targets, const OptionalTensor& edges);

// Checks the indices, so that kernels needn't. Rows that are read: num_rows; that are added to: num_out.
template <class Index>
Segments<Index> checked(const char* op, const SegmentTensors& given, int64_t num_rows,
                        int64_t num_out);

// The first target of one of `runs` runs, or how many there are behind the last. Runs have about as many
// edges each; a target counts like an edge, as there may be many with hardly one.
template <class Index>
int64_t first_of_run(const Index* offsets, int64_t num_targets, int64_t run, int64_t runs) {
  if (run == runs) return num_targets;
  const int64_t total = static_cast<int64_t>(offsets[num_targets]) + num_targets;
  const int64_t place = static_cast<int64_t>(static_cast<double>(total) * run / runs);
  int64_t low = 0, high = num_targets;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    (offsets[middle] + middle < place) ? low = middle + 1 : high = middle;
  }
  return low;
}

constexpr int64_t kEdgesPerRun = 1 << 14;

// For runs of targets.
template <class Index>
void for_targets(const Segments<Index>& segments, const Work& work) {
  const int64_t runs =
      std::max<int64_t>((segments.num_edges + segments.num_targets) / kEdgesPerRun, 1);
  for_runs(runs, 1, [&](int64_t run, int64_t) {
    const auto begin = [&](int64_t k) {
      return first_of_run(segments.offsets, segments.num_targets, k, runs);
    };
    const int64_t first = begin(run), last = begin(run + 1);
    if (first < last) work(first, last);
  });
}

}  // namespace pyg_sar
