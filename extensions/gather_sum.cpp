// out[targets[position[e]]] += weight[e] * rows[source[e]], in place, for edges sorted by position.
//
// Each target is summed by one thread, so that there are no atomics and the order of additions,
// hence the result, doesn't depend on the number of threads. The transposed sum is the same kernel on
// the same edges sorted by source. Indices are checked on the way: bad ones raise, and are not read.

#include "gather_sum.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace pyg_sar {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 32768;  // values per thread at least

enum Fault : int { kNone = 0, kSource, kPosition, kOrder, kTarget };

void check(const Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& position,
           const Tensor& targets, const OptionalTensor& weight) {
  TORCH_CHECK_VALUE(out.dim() == 2 && rows.dim() == 2 && out.size(1) == rows.size(1),
                    "gather_sum: expected 'out' and 'rows' of shapes [N, F] and [M, F] (got ",
                    out.sizes(), " and ", rows.sizes(), ")");
  TORCH_CHECK_TYPE(out.scalar_type() == rows.scalar_type(),
                   "gather_sum: expected 'out' and 'rows' of one dtype (got ", out.scalar_type(),
                   " and ", rows.scalar_type(), ")");
  TORCH_CHECK_TYPE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kDouble ||
                       out.scalar_type() == at::kBFloat16,
                   "gather_sum: expected float32, float64 or bfloat16 (got ", out.scalar_type(),
                   ")");
  TORCH_CHECK_VALUE(source.dim() == 1 && position.sizes() == source.sizes() && targets.dim() == 1,
                    "gather_sum: expected 'source' and 'position' of shape [E] and 'targets' of "
                    "shape [U] (got ",
                    source.sizes(), ", ", position.sizes(), " and ", targets.sizes(), ")");
  TORCH_CHECK_TYPE(source.scalar_type() == at::kInt || source.scalar_type() == at::kLong,
                   "gather_sum: expected int32 or int64 'source' (got ", source.scalar_type(), ")");
  TORCH_CHECK_TYPE(position.scalar_type() == source.scalar_type(),
                   "gather_sum: expected 'position' of the dtype of 'source' (got ",
                   position.scalar_type(), " and ", source.scalar_type(), ")");
  TORCH_CHECK_TYPE(targets.scalar_type() == at::kLong, "gather_sum: expected int64 'targets' (got ",
                   targets.scalar_type(), ")");
  if (weight.has_value()) {
    const auto wide = out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    TORCH_CHECK_VALUE(weight->sizes() == source.sizes(),
                      "gather_sum: expected a 'weight' for each of the ", source.size(0),
                      " edges (got shape ", weight->sizes(), ")");
    TORCH_CHECK_TYPE(weight->scalar_type() == wide, "gather_sum: expected 'weight' of dtype ", wide,
                     " (got ", weight->scalar_type(), ")");
  }
}

template <class Row, class Index>
struct Sum {
  using Acc = std::conditional_t<std::is_same_v<Row, c10::BFloat16>, float, Row>;

  Row* out;
  const Row* rows;
  const Index* source;
  const Index* position;
  const int64_t* targets;
  const Acc* weight;
  int64_t out_stride, row_stride, width, num_out, num_rows, num_targets, num_edges;
  std::atomic<int>* fault;

  // Sums the targets whose first edge is in [start, stop).
  void operator()(int64_t start, int64_t stop) const {
    if (!valid(start, stop)) return;
    std::vector<Acc> wide(std::is_same_v<Row, Acc> ? 0 : width);
    int64_t e = start;
    while (e < stop && e > 0 && position[e] == position[e - 1]) ++e;
    while (e < stop) {
      int64_t end = e + 1;
      while (end < num_edges && position[end] == position[e]) ++end;
      // Edges of the last target may be another thread's to check.
      if (end > stop && !valid(stop, end)) return;
      Row* target = out + targets[position[e]] * out_stride;
      const int64_t ahead = std::max(end, stop);
      if constexpr (std::is_same_v<Row, Acc>) {
        sum_edges(target, rows, row_stride, width, source, weight, e, end, ahead);
      } else {
        std::fill(wide.begin(), wide.end(), Acc(0));
        sum_edges(wide.data(), rows, row_stride, width, source, weight, e, end, ahead);
        for (int64_t f = 0; f < width; ++f) target[f] = static_cast<Acc>(target[f]) + wide[f];
      }
      e = end;
    }
  }

  bool valid(int64_t start, int64_t stop) const {
    return start >= stop || in_order(start, stop) || diagnosed(start, stop);
  }

  // Whether nothing is wrong, in loops without branches.
  bool in_order(int64_t start, int64_t stop) const {
    bool bad = false;
    for (int64_t e = start; e < stop; ++e) bad |= (source[e] < 0) | (source[e] >= num_rows);
    for (int64_t e = std::max<int64_t>(start, 1); e < stop; ++e) bad |= position[e] < position[e - 1];
    const int64_t first = position[start == 0 ? 0 : start - 1], last = position[stop - 1];
    if (bad || first < 0 || last >= num_targets) return false;
    for (int64_t k = first + 1; k <= last; ++k) bad |= targets[k] <= targets[k - 1];
    return !bad && targets[first] >= 0 && targets[last] < num_out;
  }

  // Whether nothing is wrong after all; else notes what.
  bool diagnosed(int64_t start, int64_t stop) const {
    int found = kNone;
    for (int64_t e = start; e < stop && found == kNone; ++e) {
      const int64_t here = position[e];
      if (source[e] < 0 || source[e] >= num_rows) found = kSource;
      if (here < 0 || here >= num_targets) {
        found = kPosition;
        continue;
      }
      if (targets[here] < 0 || targets[here] >= num_out) found = kTarget;
      if (e == 0) continue;
      const int64_t before = position[e - 1];
      if (here < before) found = kOrder;
      // Two targets at one row would be summed by two threads at a time.
      const bool next = here > before && before >= 0;
      if (next && targets[here] <= targets[before]) found = kTarget;
    }
    if (found != kNone) fault->store(found);
    return found == kNone;
  }
};

template <class Row, class Index>
void run(const Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& position,
         const Tensor& targets, const OptionalTensor& weight) {
  using Acc = typename Sum<Row, Index>::Acc;
  std::atomic<int> fault{kNone};
  const Sum<Row, Index> sum{out.mutable_data_ptr<Row>(),
                            rows.const_data_ptr<Row>(),
                            source.const_data_ptr<Index>(),
                            position.const_data_ptr<Index>(),
                            targets.const_data_ptr<int64_t>(),
                            weight.has_value() ? weight->const_data_ptr<Acc>() : nullptr,
                            out.stride(0),
                            rows.stride(0),
                            out.size(1),
                            out.size(0),
                            rows.size(0),
                            targets.size(0),
                            source.size(0),
                            &fault};
  const int64_t grain = std::max<int64_t>(kGrain / std::max<int64_t>(sum.width, 1), 1);
  at::parallel_for(0, sum.num_edges, grain, sum);
  const int found = fault.load();
  TORCH_CHECK_INDEX(found != kSource, "gather_sum: 'source' names a row outside [0, ", sum.num_rows,
                    ")");
  TORCH_CHECK_INDEX(found != kPosition, "gather_sum: 'position' is outside [0, ", sum.num_targets,
                    ")");
  TORCH_CHECK_VALUE(found != kOrder, "gather_sum: expected edges sorted by 'position'");
  TORCH_CHECK_INDEX(found != kTarget, "gather_sum: expected ascending 'targets' in [0, ",
                    sum.num_out, ")");
}

// Rows whose values lie side by side; a copy where they don't.
Tensor with_dense_rows(const Tensor& x) {
  return x.size(1) <= 1 || x.stride(1) == 1 ? x : x.contiguous();
}

void gather_sum_cpu(Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& position,
                    const Tensor& targets, const OptionalTensor& weight) {
  check(out, rows, source, position, targets, weight);
  TORCH_CHECK_VALUE(out.size(1) <= 1 || out.stride(1) == 1,
                    "gather_sum: expected rows of 'out' that lie in one piece (got strides ",
                    out.strides(), ")");
  at::assert_no_internal_overlap(out);
  at::assert_no_overlap(out, rows);
  if (source.numel() == 0 || out.numel() == 0) {
    TORCH_CHECK_INDEX(source.numel() == 0 || out.size(0) > 0,
                      "gather_sum: edges into 'out' without rows");
    return;
  }
  const Tensor dense = with_dense_rows(rows);
  const Tensor from = source.contiguous(), to = position.contiguous(), ids = targets.contiguous();
  OptionalTensor by;
  if (weight.has_value()) by = weight->contiguous();
  const auto sum = [&](auto row) {
    using Row = decltype(row);
    from.scalar_type() == at::kInt ? run<Row, int32_t>(out, dense, from, to, ids, by)
                                   : run<Row, int64_t>(out, dense, from, to, ids, by);
  };
  switch (out.scalar_type()) {
    case at::kFloat:
      return sum(float{});
    case at::kDouble:
      return sum(double{});
    default:
      return sum(c10::BFloat16{});
  }
}

void gather_sum_meta(Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& position,
                     const Tensor& targets, const OptionalTensor& weight) {
  check(out, rows, source, position, targets, weight);
}

std::string built_with() { return TORCH_VERSION; }

}  // namespace

TORCH_LIBRARY(pyg_sar, m) {
  m.def(
      "gather_sum_(Tensor(a!) out, Tensor rows, Tensor source, Tensor position, Tensor targets, "
      "Tensor? weight=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def("built_with() -> str", &built_with);
}

TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("gather_sum_", &gather_sum_cpu); }
TORCH_LIBRARY_IMPL(pyg_sar, Meta, m) { m.impl("gather_sum_", &gather_sum_meta); }

}  // namespace pyg_sar
