// out[target(t)] += weight[number(e)] * rows[source[e]], in place, over the edges e of each target t.
//
// Each target is summed by one thread, so that there are no atomics and the order of additions,
// hence the result, doesn't depend on the number of threads. The transposed sum is the same kernel on
// the same edges grouped by source.

#include "gather_sum.h"

#include <algorithm>
#include <type_traits>

#include "segments.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

constexpr char kName[] = "gather_sum";

SegmentTensors checked(const Tensor& out, const Tensor& rows, const Tensor& source,
                       const Tensor& offsets, const OptionalTensor& targets,
                       const OptionalTensor& weight, const OptionalTensor& edges) {
  CHECK_VALUE(out.dim() == 2 && rows.dim() == 2 && out.size(1) == rows.size(1),
              "gather_sum: expected 'out' and 'rows' of shapes [N, F] and [M, F] (got ",
              out.sizes(), " and ", rows.sizes(), ")");
  CHECK_DTYPE(out.scalar_type() == rows.scalar_type(),
              "gather_sum: expected 'out' and 'rows' of one dtype (got ", out.scalar_type(),
              " and ", rows.scalar_type(), ")");
  check_floating(kName, out);
  if (weight.has_value()) {
    const auto wide = wide_dtype(out.scalar_type());
    CHECK_VALUE(same(weight->sizes(), source.sizes()),
                "gather_sum: expected a 'weight' for each of the ", source.size(0),
                " edges (got shape ", weight->sizes(), ")");
    CHECK_DTYPE(weight->scalar_type() == wide, "gather_sum: expected 'weight' of dtype ", wide,
                " (got ", weight->scalar_type(), ")");
  }
  return pyg_sar::checked(kName, source, offsets, targets, edges);
}

// Weights in the order in which the edges are read.
template <class Acc, class Index>
Tensor ordered(const Tensor& weight, const Segments<Index>& segments) {
  const Tensor dense = as_contiguous(weight);
  if (segments.edges == nullptr) return dense;
  const Tensor out = empty({dense.numel()}, dense.scalar_type());
  Acc* to = out.mutable_data_ptr<Acc>();
  const Acc* from = dense.const_data_ptr<Acc>();
  parallel_for(0, segments.num_edges, kEdgesPerRun, [&](int64_t start, int64_t stop) {
    for (int64_t e = start; e < stop; ++e) to[e] = from[segments.edges[e]];
  });
  return out;
}

template <class Row, class Index>
void run(const Tensor& out, const Tensor& rows, const SegmentTensors& given,
         const OptionalTensor& weight) {
  const auto segments = pyg_sar::checked<Index>(kName, given, rows.size(0), out.size(0));
  CHECK_VALUE(rows.size(0) < int64_t{1} << 31, "gather_sum: more than 2^31 'rows'");
  Tensor source = given.source, by;
  SumTile<Row> tile{};
  tile.segments.targets = segments.targets;
  tile.segments.num_edges = segments.num_edges;
  tile.segments.num_targets = segments.num_targets;
  if constexpr (std::is_same_v<Index, int64_t>) {
    source = as_dtype(source, kInt);
    tile.wide_offsets = segments.offsets;
  } else {
    tile.segments.offsets = segments.offsets;
  }
  tile.segments.source = source.const_data_ptr<int32_t>();
  const Wide<Row> one = 1;
  tile.weight = &one;
  if (weight.has_value()) {
    by = ordered<Wide<Row>>(*weight, segments);
    tile.weight = by.const_data_ptr<Wide<Row>>();
    tile.weight_stride = 1;
  }
  tile.out_stride = out.stride(0);
  tile.row_stride = rows.stride(0);
  const int64_t width = out.size(1), lanes = kFullLanes<Wide<Row>>;
  const int64_t vectors = (width + lanes - 1) / lanes;
  const int64_t tiles = (vectors + kMostVectors<Row> - 1) / kMostVectors<Row>;
  for (int64_t n = 0; n < tiles; ++n) {  // of about the same width
    const int64_t start = vectors * n / tiles * lanes;
    const int64_t stop = std::min(vectors * (n + 1) / tiles * lanes, width);
    tile.out = out.mutable_data_ptr<Row>() + start;
    tile.rows = rows.const_data_ptr<Row>() + start;
    tile.width = static_cast<int>(stop - start);
    tile.crosses = crosses_lines(tile.rows, tile.row_stride, tile.width);
    for_targets(segments, [&](int64_t first, int64_t last) { sum_tile(tile, first, last); });
  }
}

void gather_sum_cpu(Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& offsets,
                    const OptionalTensor& targets, const OptionalTensor& weight,
                    const OptionalTensor& edges) {
  const SegmentTensors segments = checked(out, rows, source, offsets, targets, weight, edges);
  check_written(kName, "out", out);
  check_no_overlap(out, rows);
  if (source.numel() == 0 || out.numel() == 0) {
    CHECK_INDEX(source.numel() == 0 || out.size(0) > 0,
                "gather_sum: edges into 'out' without rows");
    return;
  }
  const Tensor dense = with_dense_rows(rows);
  for_dtype(out.scalar_type(), [&](auto row) {
    using Row = decltype(row);
    segments.is_narrow() ? run<Row, int32_t>(out, dense, segments, weight)
                         : run<Row, int64_t>(out, dense, segments, weight);
  });
}

// The same from zeros.
Tensor gather_sum_of_all(const Tensor& rows, const Tensor& source, const Tensor& offsets,
                         const OptionalTensor& targets, const OptionalTensor& weight,
                         const OptionalTensor& edges, int64_t num_targets) {
  CHECK_VALUE(rows.dim() == 2, "gather_sum: expected 'rows' of shape [M, F] (got ", rows.sizes(), ")");
  Tensor out = torch::stable::new_zeros(rows, {num_targets, rows.size(1)});
  gather_sum_cpu(out, rows, source, offsets, targets, weight, edges);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "gather_sum_(Tensor(a!) out, Tensor rows, Tensor source, Tensor offsets, "
      "Tensor? targets=None, Tensor? weight=None, Tensor? edges=None) -> ()");
  m.def(
      "gather_sum(Tensor rows, Tensor source, Tensor offsets, Tensor? targets, Tensor? weight, "
      "Tensor? edges, SymInt num_targets) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("gather_sum_", TORCH_BOX(&gather_sum_cpu));
  m.impl("gather_sum", TORCH_BOX(&gather_sum_of_all));
}

}  // namespace pyg_sar
