// The backward pass of attention by source row.

#include "attention.h"
#include "attention_dispatch.h"
#include "attention_scores.h"
#include "attention_tensors.h"
#include "factored.h"

namespace pyg_sar::attention {
namespace {

// Backward by source row, over the transposed shard.
template <class Number, class Score, int64_t kChannels>
struct Sources {
  using T = Number;
  static constexpr bool kByChannels = true;
  static constexpr Shape kShape = Score::kShape;
  Terms<T> t;
  Known<T> known;
  Matrix<T> grad_value, grad_key;                // 'grad_key' may be 'grad_value'
  T* grad_edge_attr;                             // by source alone, as all that follows
  std::vector<T*> grad_query, grad_edge_weight;  // of each chunk

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = t.block(), end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t j = t.target(u);
      const T* key = t.key.row(t.place(j));
      const Wanted<T> to{grad_key.row(j), grad_query.empty() ? nullptr : grad_query[chunk], nullptr,
                         grad_edge_attr, grad_edge_weight.empty() ? nullptr : grad_edge_weight[chunk]};
      Score::template begin<true>(t, b, key);
      Score::template clear<true>(t, b);
      for (int64_t e = start; e < stop; e += step) add(b, j, e, std::min(step, stop - e), to);
      Score::template finish<true>(t, b, key, to);
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t j, int64_t first, int64_t n,
                          const Wanted<T>& to) const {
    const int64_t count = n * t.heads;
    const Rows<T> grads = t.rows(known.grad_out, first, n);
    const Rows<T> packed = t.narrow_rows(known.packed, first, n, 4);
    const Rows<T> queries = kShape.narrow_query ? packed : t.rows(t.query, first, n);
    const T *key = t.key.row(t.place(j)), *value = t.value.row(t.place(j));
    split_rows(b.top, b.total, b.delta, kShape.narrow_query ? b.score : b.keep, packed);
    Score::template scores<true, kChannels>(t, b, key, queries, first);
    inner_products<kChannels, true>(b.inner, value, grads);
    if constexpr (kShape.term == Term::kInKeyAndValue) {
      if (t.features > 0) {
        for (int64_t e = 0; e < n; ++e) {
          const int64_t at = t.source[first + e] * t.heads * t.features;
          add_edge_products(t, b.score, t.scale, known.query_edges + at, e, first);
          add_edge_products(t, b.inner, T(1), known.grad_edges + at, e, first);
        }
      }
    }
    T* alpha = leaked<Score>(t, b, count);
    exp_share(alpha, b.top, b.total, count);
    if (t.drop_key != nullptr) draw(t, b, first, n);
    score_gradients(b, alpha, b.delta, false, t.drop_key != nullptr, count);
    if (grad_value.data != nullptr) accumulate(grad_value.row(j), b.weight, grads, false);
    Score::template add<true, kChannels>(t, b, key, queries, first, to);
  }
};

}  // namespace

void backward_sources(const SourcesArguments& a) {
  const Given& g = a.given;
  const Cotangent& c = a.cotangent;
  Backward all(g, c, true);
  if (nothing(g)) return;
  const Written values(a.grad_value, true), keys(a.grad_key, true), queries(a.grad_query);
  const Written attrs(a.grad_edge_attr), weights(a.grad_edge_weight);
  int64_t most = a.grad_edge_weight.has_value() ? kChunksOfParameters : kMostChunks;
  if (a.grad_query.has_value()) most = get_num_threads();
  const int64_t chunks = num_chunks(g, most);
  const PerChunk query_sums(queries.dense, chunks), weight_sums(weights.dense, chunks);
  const auto factored = [&] {
    const Tensor top = with_dense_rows(c.maximum), total = with_dense_rows(c.normaliser);
    const Tensor mean = with_dense_rows(c.delta);
    const auto of_queries = query_sums.pointers<float>();
    return add_factored_sources(
        terms<float>(g, all.dense, chunks), c.grad_out.size(0),
        {matrix<float>(all.grad_out), matrix<float>(top), matrix<float>(total), matrix<float>(mean),
         values.matrix<float>(), keys.matrix<float>(), of_queries});
  };
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    const auto of_values = values.matrix<T>();
    return Pass{terms<T>(g, all.dense, chunks),
                all.known<T>(),
                of_values,
                g.key.has_value() ? keys.matrix<T>() : of_values,
                attrs.data<T>(),
                query_sums.pointers<T>(),
                weight_sums.pointers<T>()};
  };
  const bool is_float = g.value.scalar_type() == kFloat;
  if (!is_float || g.kind != Additive::kKind || !factored()) {
    all.pack(g, c);
    is_float ? dispatch<Sources, float, true>(g, make) : dispatch<Sources, double, true>(g, make);
  }
  query_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&values, &keys, &queries, &attrs, &weights}) w->write();
}

}  // namespace pyg_sar::attention
