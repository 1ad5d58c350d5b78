// Edges grouped by what they add to (compressed sparse rows), as all kernels take them: their checks,
// and the way in which threads share them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>

namespace pyg_sar {

// One build runs on any x86-64: the loader picks the version that the processor at hand can run. Named
// by feature: by architecture (arch=haswell) another maker's processor would get the default.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(PYG_SAR_ONE_VERSION)
#define PYG_SAR_LEVELS 1
#define PYG_SAR_VERSIONS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PYG_SAR_VERSIONS
#endif
#define PYG_SAR_INLINE inline __attribute__((always_inline))

constexpr int64_t kLine = 64;  // bytes of a cache line

// Whether all of x is in [0, bound).
bool within(const int32_t* x, int64_t size, int64_t bound);
bool within(const int64_t* x, int64_t size, int64_t bound);
// Whether x ascends; strictly: nothing comes twice.
bool ascends(const int32_t* x, int64_t size, bool strictly);
bool ascends(const int64_t* x, int64_t size, bool strictly);

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
  at::Tensor source, offsets;
  std::optional<at::Tensor> targets, edges;

  bool is_narrow() const { return source.scalar_type() == at::kInt; }
};

// Checks shapes and dtypes, and makes them contiguous.
SegmentTensors checked(const char* op, const at::Tensor& source, const at::Tensor& offsets,
                       const std::optional<at::Tensor>& targets,
                       const std::optional<at::Tensor>& edges);

// Checks the indices, so that kernels needn't. Rows that are read: num_rows; that are added to: num_out.
template <class Index>
Segments<Index> checked(const char* op, const SegmentTensors& given, int64_t num_rows,
                        int64_t num_out);

// Calls work(chunk) for all chunks: one thread takes one after the other, since hubs and other
// processes make some slower.
template <class Work>
void for_chunks(int64_t chunks, const Work& work) {
  const int64_t threads =
      std::min<int64_t>(at::in_parallel_region() ? 1 : at::get_num_threads(), chunks);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t chunk = next++; chunk < chunks; chunk = next++) work(chunk);
  });
}

// Calls work(first, last) for runs of targets, with about as many edges each.
template <class Index, class Work>
void for_targets(const Segments<Index>& segments, int64_t edges_per_run, const Work& work) {
  // An edge and a target count alike: there may be many targets with hardly an edge.
  const int64_t total = segments.num_edges + segments.num_targets;
  const int64_t runs = std::max<int64_t>(total / std::max<int64_t>(edges_per_run, 1), 1);
  const auto begin = [&](int64_t run) {
    const int64_t place = static_cast<int64_t>(static_cast<double>(total) * run / runs);
    int64_t low = 0, high = segments.num_targets;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (segments.offsets[middle] + middle < place) ? low = middle + 1 : high = middle;
    }
    return low;
  };
  for_chunks(runs, [&](int64_t run) {
    const int64_t first = begin(run);
    const int64_t last = run + 1 == runs ? segments.num_targets : begin(run + 1);
    if (first < last) work(first, last);
  });
}

}  // namespace pyg_sar
