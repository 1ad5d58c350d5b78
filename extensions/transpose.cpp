// Edges grouped by target, grouped by source instead: the structure of the backward pass.


#include <algorithm>
#include <tuple>

#include "counting_sort.h"
#include "segments.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

template <class Index>
void transpose(const Segments<Index>& s, int64_t num_rows, Index* source, Index* offsets,
               Index* edges) {
  CountingSort<Index> sort(s.num_edges, num_rows, s.num_edges / std::max<int64_t>(num_rows, 1));
  sort.count(offsets, [&](int64_t e) { return s.source[e]; });
  sort.for_runs([&](int64_t start, int64_t stop, int64_t run) {
    Index* place = sort.places(run);
    int64_t t = std::upper_bound(s.offsets, s.offsets + s.num_targets + 1,
                                 static_cast<Index>(start)) - s.offsets - 1;
    for (int64_t e = start; e < stop; ++e) {
      while (s.offsets[t + 1] <= e) ++t;
      const Index at = place[s.source[e]]++;
      source[at] = static_cast<Index>(s.target(t));
      if (edges != nullptr) edges[at] = static_cast<Index>(s.number(e));
    }
  });
}

using Result = std::tuple<Tensor, Tensor, Tensor>;

Result transpose_cpu(const Tensor& source, const Tensor& offsets, const OptionalTensor& targets,
                     const OptionalTensor& edges, int64_t num_rows, int64_t num_targets,
                     bool numbered) {
  const SegmentTensors given = checked("transpose", source, offsets, targets, edges);
  const auto dtype = given.source.scalar_type();
  const Tensor rows = empty({source.numel()}, dtype), first = empty({num_rows + 1}, dtype);
  const Tensor numbers = empty({numbered ? source.numel() : 0}, dtype);
  const auto run = [&](auto type) {
    using Index = decltype(type);
    const auto segments = checked<Index>("transpose", given, num_rows, num_targets);
    transpose<Index>(segments, num_rows, rows.mutable_data_ptr<Index>(),
                     first.mutable_data_ptr<Index>(),
                     numbered ? numbers.mutable_data_ptr<Index>() : nullptr);
  };
  given.is_narrow() ? run(int32_t{}) : run(int64_t{});
  return {rows, first, numbers};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "transpose(Tensor source, Tensor offsets, Tensor? targets, Tensor? edges, SymInt num_rows, "
      "SymInt num_targets, bool numbered) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("transpose", TORCH_BOX(&transpose_cpu)); }

}  // namespace pyg_sar
