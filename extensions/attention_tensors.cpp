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
    CHECK_INDEX(num_edges <= rows, "attention: ", num_edges, " edges, and ", rows,
                " rows of 'edge_attr' or 'drop_key'");
    return;
  }
  CHECK_INDEX(all_within(edges->const_data_ptr<Index>(), num_edges, rows),
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
  const int64_t even = std::max<int64_t>(8 * get_num_threads(), values / kLargeChunk);
  return std::clamp<int64_t>(values / kGrain, 1, std::min(even, most));
}

Dense::Dense(const Given& g, int64_t targets_in_all, bool transposed)
    : num_targets(targets_in_all) {
  const auto rows = [](const OptionalTensor& x) {
    return x.has_value() ? OptionalTensor(with_dense_rows(*x)) : std::nullopt;
  };
  const auto dense = [](const OptionalTensor& x) {
    return x.has_value() ? OptionalTensor(as_contiguous(*x)) : std::nullopt;
  };
  value = with_dense_rows(g.value);
  key = g.key.has_value() ? with_dense_rows(*g.key) : value;
  query = rows(g.query);
  edge_attr = rows(g.edge_attr);
  att = dense(g.att);
  edge_weight = dense(g.edge_weight);
  if (g.p > 0) drop_key = dense(g.drop_key);
  const int64_t read = transposed ? num_targets : value.size(0);
  const int64_t added = transposed ? source_rows(g) : num_targets;
  CHECK_VALUE(std::max(read, added) <= std::numeric_limits<int32_t>::max(),
              "attention: more rows than int32 can name");
  const SegmentTensors segments =
      checked(kName, g.source, g.offsets, g.targets, std::nullopt);
  edges = dense(g.edges);
  segments.is_narrow() ? check_indices<int32_t>(g, segments, edges, read, added)
                       : check_indices<int64_t>(g, segments, edges, read, added);
  if (g.places.has_value()) {
    places = as_contiguous(as_dtype(*g.places, kInt));
    CHECK_INDEX(all_within(places->const_data_ptr<int32_t>(), places->numel(), value.size(0)),
                "attention: 'places' names a row outside [0, ", value.size(0), ")");
  }
  targets = segments.targets;
  offsets = as_dtype(segments.offsets, kLong);
  source = as_dtype(segments.source, kInt);
  if (edge_attr.has_value() && shape_of(g.kind)->term == Term::kInKeyAndValue) {
    query_edges = edge_products(*query);
  }
}

Tensor Dense::edge_products(const Tensor& rows) const {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(std::string("nhc,dhc->nhd")),
                                    from(std::vector<Tensor>{rows, *edge_weight}),
                                    from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::einsum", "", stack.data(), TORCH_ABI_VERSION));
  return as_contiguous(torch::stable::detail::to<Tensor>(stack[0]));
}

Backward::Backward(const Given& g, const Cotangent& c, bool transposed)
    : dense(g, c.grad_out.size(0), transposed), grad_out(with_dense_rows(c.grad_out)) {
  if (dense.query_edges.has_value()) grad_edges = dense.edge_products(grad_out);
}

namespace {

// Whether the rows of 'right' begin where those of 'left' end, which have a number per head.
template <class T>
bool are_beside(const Tensor& left, const Tensor& right) {
  const int64_t heads = left.size(1);
  const auto in_one_piece = [&](const Tensor& x) { return heads == 1 || x.stride(1) == 1; };
  return in_one_piece(left) && in_one_piece(right) && left.stride(0) == right.stride(0) &&
         left.const_data_ptr<T>() + heads == right.const_data_ptr<T>();
}

}  // namespace

template <class T>
Tensor Backward::packed(const Cotangent& c, const OptionalTensor& query) const {
  const int64_t rows = c.grad_out.size(0), heads = c.grad_out.size(1);
  if (query.has_value() && are_beside<T>(c.maximum, c.normaliser) &&
      are_beside<T>(c.normaliser, c.delta) && are_beside<T>(c.delta, *query)) {
    return c.maximum;
  }
  const Tensor found = empty({rows, 4 * heads}, c.grad_out.scalar_type());
  const Tensor maximum = with_dense_rows(c.maximum), normaliser = with_dense_rows(c.normaliser);
  const Tensor delta = with_dense_rows(c.delta);
  const OptionalTensor last = query.has_value() ? OptionalTensor(with_dense_rows(*query)) : query;
  const std::array<Matrix<const T>, 3> parts{matrix<T>(maximum), matrix<T>(normaliser), matrix<T>(delta)};
  const auto queries = matrix<T>(last);
  T* out = found.mutable_data_ptr<T>();
  parallel_for(0, rows, kSummedAtOnce / std::max<int64_t>(heads, 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = out + i * 4 * heads;
      for (const auto& part : parts) row = std::copy_n(part.row(i), heads, row);
      if (const T* at = queries.row(i)) {
        std::copy_n(at, heads, row);
      } else {
        std::fill_n(row, heads, T(0));
      }
    }
  });
  return found;
}

void Backward::pack(const Given& g, const Cotangent& c) {
  const OptionalTensor query = shape_of(g.kind)->narrow_query ? g.query : std::nullopt;
  packed_rows = g.value.scalar_type() == kFloat ? packed<float>(c, query) : packed<double>(c, query);
}

}  // namespace pyg_sar::attention
