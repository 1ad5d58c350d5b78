// The tensors that attention is given: their indices are checked before anything is read or written.

#include "attention_tensors.h"

#include "attention_scores.h"

#include <limits>

namespace pyg_sar::attention {
namespace {

constexpr int64_t kGrain = 1 << 16;       // values that a chunk's edges read, at least
constexpr int64_t kLargeChunk = 1 << 22;  // the same where there are many chunks
constexpr int64_t kPerHead = 8;           // what an edge's scalars cost, in values

// Edges' numbers name rows of what edges have.
template <class Index>
void check_numbers(const Given& g, int64_t num_edges, const OptionalTensor& edges) {
  int64_t rows = std::numeric_limits<int64_t>::max();
  if (!g.edge_attr.has_value() && !g.drop_key.has_value()) return;
  if (g.edge_attr.has_value()) rows = std::min(rows, g.edge_attr->size(0));
  if (g.drop_key.has_value()) rows = std::min(rows, g.drop_key->size(0));
  if (!edges.has_value()) {
    TORCH_CHECK_INDEX(num_edges <= rows, "attention: ", num_edges, " edges, and ", rows,
                      " rows of 'edge_attr' or 'drop_key'");
    return;
  }
  TORCH_CHECK_INDEX(all_within(edges->const_data_ptr<Index>(), num_edges, rows),
                    "attention: 'edges' names a row outside [0, ", rows, ")");
}

// 'read' and 'added' are how many rows edges read and add to.
template <class Index>
void check_indices(const Given& g, const SegmentTensors& segments, const OptionalTensor& edges,
                   int64_t read, int64_t added) {
  checked<Index>(kName, segments, read, added);
  check_numbers<Index>(g, segments.source.numel(), edges);
}

}  // namespace

int64_t num_chunks(const Given& g, int64_t most) {
  const int64_t width = g.value.size(1) * (g.value.size(2) + kPerHead);
  const int64_t values = (g.source.numel() + g.offsets.numel()) * width;
  // Small chunks keep threads even, large ones keep rows coming: a chunk starts with none fetched.
  const int64_t even = std::max<int64_t>(8 * at::get_num_threads(), values / kLargeChunk);
  return std::clamp<int64_t>(values / kGrain, 1, std::min(even, most));
}

Dense::Dense(const Given& g, int64_t targets_in_all, bool transposed)
    : num_targets(targets_in_all) {
  const auto dense = [](const OptionalTensor& x) {
    return x.has_value() ? x->contiguous() : Tensor();
  };
  value = with_dense_rows(g.value);
  key = g.key.has_value() ? with_dense_rows(*g.key) : value;
  query = g.query.has_value() ? with_dense_rows(*g.query) : Tensor();
  edge_attr = g.edge_attr.has_value() ? with_dense_rows(*g.edge_attr) : Tensor();
  att = dense(g.att);
  edge_weight = dense(g.edge_weight);
  drop_key = g.p > 0 ? dense(g.drop_key) : Tensor();
  const int64_t read = transposed ? num_targets : value.size(0);
  const int64_t added = transposed ? source_rows(g) : num_targets;
  TORCH_CHECK_VALUE(std::max(read, added) <= std::numeric_limits<int32_t>::max(),
                    "attention: more rows than int32 can name");
  const SegmentTensors segments =
      checked(kName, g.source, g.offsets, g.targets, std::nullopt);
  edges = dense(g.edges);
  const OptionalTensor numbers = edges.defined() ? OptionalTensor(edges) : std::nullopt;
  segments.is_narrow() ? check_indices<int32_t>(g, segments, numbers, read, added)
                       : check_indices<int64_t>(g, segments, numbers, read, added);
  if (g.places.has_value()) {
    places = g.places->to(at::kInt).contiguous();
    TORCH_CHECK_INDEX(all_within(places.const_data_ptr<int32_t>(), places.numel(), value.size(0)),
                      "attention: 'places' names a row outside [0, ", value.size(0), ")");
  }
  targets = segments.targets.value_or(Tensor());
  offsets = segments.offsets.to(at::kLong);
  source = segments.source.to(at::kInt);
  if (edge_attr.defined() && shape_of(g.kind)->term == Term::kInKeyAndValue) {
    query_edges = edge_products(query);
  }
}

Tensor Dense::edge_products(const Tensor& rows) const {
  return at::einsum("nhc,dhc->nhd", {rows, edge_weight}).contiguous();
}

Backward::Backward(const Given& g, const Cotangent& c, bool transposed)
    : dense(g, c.grad_out.size(0), transposed), grad_out(with_dense_rows(c.grad_out)) {
  if (dense.query_edges.defined()) grad_edges = dense.edge_products(grad_out);
}

void Backward::pack(const Given& g, const Cotangent& c) {
  const bool narrow = shape_of(g.kind)->narrow_query && g.query.has_value();
  const Tensor last = narrow ? *g.query : at::zeros_like(c.maximum);
  packed_rows = at::cat({c.maximum, c.normaliser.reciprocal(), c.delta, last}, 1);
}

}  // namespace pyg_sar::attention
