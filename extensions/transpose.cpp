// Edges grouped by target, grouped by source instead: the structure of the backward pass.

#include <ATen/ops/empty.h>
#include <torch/library.h>

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

Result empty_result(const Tensor& source, const c10::SymInt& num_rows, bool numbered) {
  return {at::empty_symint({source.sym_numel()}, source.options()),
          at::empty_symint({num_rows + 1}, source.options()),
          at::empty_symint({numbered ? source.sym_numel() : c10::SymInt(0)}, source.options())};
}

Result transpose_cpu(const Tensor& source, const Tensor& offsets, const OptionalTensor& targets,
                     const OptionalTensor& edges, int64_t num_rows, int64_t num_targets,
                     bool numbered) {
  const SegmentTensors given = checked("transpose", source, offsets, targets, edges);
  auto result = empty_result(given.source, num_rows, numbered);
  const auto run = [&](auto type) {
    using Index = decltype(type);
    const auto segments = checked<Index>("transpose", given, num_rows, num_targets);
    transpose<Index>(segments, num_rows, std::get<0>(result).mutable_data_ptr<Index>(),
                     std::get<1>(result).mutable_data_ptr<Index>(),
                     numbered ? std::get<2>(result).mutable_data_ptr<Index>() : nullptr);
  };
  given.is_narrow() ? run(int32_t{}) : run(int64_t{});
  return result;
}

Result transpose_meta(const Tensor& source, const Tensor& offsets, const OptionalTensor& targets,
                      const OptionalTensor& edges, c10::SymInt num_rows, c10::SymInt num_targets,
                      bool numbered) {
  return empty_result(source, num_rows, numbered);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "transpose(Tensor source, Tensor offsets, Tensor? targets, Tensor? edges, SymInt num_rows, "
      "SymInt num_targets, bool numbered) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("transpose", &transpose_cpu); }
TORCH_LIBRARY_IMPL(pyg_sar, Meta, m) { m.impl("transpose", &transpose_meta); }

}  // namespace pyg_sar
