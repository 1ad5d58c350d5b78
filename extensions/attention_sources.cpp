// The backward pass of attention by source row.

#include "attention.h"
#include "attention_dispatch.h"
#include "attention_scores.h"
#include "attention_tensors.h"
#include "factored.h"

namespace pyg_sar::attention {
namespace {

// Backward by source row, over the transposed shard.
template <class Number, int64_t kKind, int64_t kChannels>
struct Sources {
  using T = Number;
  Terms<T> t;
  Known<T> known;
  Matrix<T> grad_value, grad_key;         // 'grad_key' may be 'grad_value'
  T* grad_edge_attr;                      // additive
  std::vector<T*> grad_query, grad_edge_weight;  // additive: of each chunk

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = t.block(), end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t j = t.target(u);
      const T* key = t.key.row(t.place(j));
      if constexpr (kKind == kAdditive) fill_tile(b.fixed, key, t.heads, b.size);
      if constexpr (kKind == kMixed) {
        fix_sum(t, b, t.att, key);
        std::fill_n(b.heads, t.heads, T(0));
      }
      if constexpr (kKind == kGatv2) std::fill_n(b.row2, t.width(), T(0));
      for (int64_t e = start; e < stop; e += step) add(b, chunk, j, e, std::min(step, stop - e));
      if constexpr (kKind == kGatv2) {
        if (grad_key.data != nullptr) {
          T* out = grad_key.row(j);
          for (int64_t f = 0; f < t.width(); ++f) out[f] += t.att[f] * b.row2[f];
        }
      }
      if constexpr (kKind == kMixed) {
        const T* by = b.heads;
        if (grad_key.data != nullptr) add_by_head(t, grad_key.row(j), by, t.att);
      }
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t chunk, int64_t j, int64_t first,
                          int64_t n) const {
    const int64_t count = n * t.heads;
    const Rows<T> grads = t.rows(known.grad_out, first, n), queries = t.rows(t.query, first, n);
    const Rows<T> packed = t.narrow_rows({known.packed, 4 * t.heads}, first, n, 4);
    T* last = kKind == kAdditive ? b.score : b.keep;
    split_rows(b.top, b.inverse, b.delta, last, packed);
    if constexpr (kKind == kAdditive) {
      scores<kKind, kChannels>(t, b, static_cast<const T*>(nullptr), packed, first);
    } else {
      const T* att = kKind == kMixed ? t.att + t.width() : nullptr;
      scores<kKind, kChannels>(t, b, t.key.row(t.place(j)), queries, first, att);
    }
    const T* value = t.value.row(t.place(j));
    inner_products<kChannels, true>(b.inner, value, grads);
    if constexpr (kKind == kDot) {
      if (t.features > 0) {
        for (int64_t e = 0; e < n; ++e) {
          const int64_t at = t.source[first + e] * t.heads * t.features;
          add_edge_products(t, b.score, t.scale, known.query_edges + at, e, first);
          add_edge_products(t, b.inner, T(1), known.grad_edges + at, e, first);
        }
      }
    }
    T* alpha = leaked<kKind>(t, b, count);
    exp_share(alpha, b.top, b.inverse, count);
    if (t.drop_key != nullptr) draw(t, b, first, n);
    score_gradients(b, alpha, b.delta, false, t.drop_key != nullptr, count);
    if (grad_value.data != nullptr) {
      accumulate(grad_value.row(j), b.weight, grads, false);
    }
    if constexpr (kKind == kAdditive) {
      add_additive(b, chunk, j, packed, first);
    } else if (grad_key.data != nullptr) {
      add_key(b, j, queries, first);
    }
  }

  // b.inner: dL/dscore; b.score: before the leaky ReLU
  PYG_SAR_INLINE void add_additive(const Buffers<T>& b, int64_t chunk, int64_t j,
                                   const Rows<T>& packed, int64_t first) const {
    const int64_t n = packed.n, count = n * t.heads;
    T *inner = b.inner, *lanes = b.lanes;
    through_leak<kKind>(t, b, count);
    std::fill(inner + count, inner + padded(count), T(0));
    if (grad_key.data != nullptr) {
      std::fill_n(lanes, b.size, T(0));
      PYG_SAR_LANES(count, b.size, lanes[o] += inner[k];)
      add_lanes(grad_key.row(j), lanes, t.heads, b.size);
    }
    if (!grad_query.empty()) {
      scatter(grad_query[chunk], static_cast<const T*>(inner), packed);
    }
    for (int64_t e = 0; e < n && grad_edge_attr != nullptr; ++e) {
      T* row = grad_edge_attr + t.number(first + e) * t.features;
      for (int64_t d = 0; d < t.features; ++d) {
        row[d] = inner_product(inner + e * t.heads, t.edge_weight + d * t.heads, t.heads);
      }
    }
    for (int64_t e = 0; e < n && !grad_edge_weight.empty(); ++e) {
      const T* attr = t.attr(first + e);
      for (int64_t d = 0; d < t.features; ++d) {
        add_scaled(grad_edge_weight[chunk] + d * t.heads, attr[d],
                   static_cast<const T*>(inner + e * t.heads), t.heads);
      }
    }
  }

  PYG_SAR_INLINE void add_key(const Buffers<T>& b, int64_t j, const Rows<T>& queries,
                              int64_t first) const {
    const int64_t n = queries.n;
    if constexpr (kKind == kDot) {
      T* inner = b.inner;
      const T scale = t.scale;
      through_leak<kKind>(t, b, n * t.heads);
      PYG_SAR_LANES(n * t.heads, kLanes, (void)o; inner[k] *= scale;)
      accumulate(grad_key.row(j), b.inner, queries, false);
    } else if constexpr (kKind == kMixed) {
      through_leak<kKind>(t, b, n * t.heads);
      through_gate(t, b, n * t.heads);
      accumulate(grad_key.row(j), b.inner, queries, false);
    } else {
      T* none = nullptr;
      const T* key = t.key.row(t.place(j));
      if (t.features == 0) {
        return gatv2_gradients<kChannels, false>(b.row2, none, b.inner, key, queries, t.slope);
      }
      for (int64_t e = 0; e < n; ++e) {
        gatv2_gradients<kChannels, false>(b.row2, none, b.inner + e * t.heads, key,
                                          with_edge(t, b, queries, e, first), t.slope);
      }
    }
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
  if (a.grad_query.has_value()) most = at::get_num_threads();
  const int64_t chunks = num_chunks(g, most);
  const PerChunk query_sums(queries.dense, chunks), weight_sums(weights.dense, chunks);
  const auto factored = [&] {
    const Tensor top = c.maximum.contiguous(), total = c.normaliser.contiguous();
    const Tensor mean = c.delta.contiguous();
    const auto of_queries = query_sums.pointers<float>();
    return add_factored_sources(
        terms<float>(g, all.dense, chunks), c.grad_out.size(0),
        {matrix<float>(all.grad_out), data<float>(top), data<float>(total), data<float>(mean),
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
  const bool is_float = g.value.scalar_type() == at::kFloat;
  if (!is_float || g.kind != kAdditive || !factored()) {
    all.pack(g, c);
    is_float ? dispatch<Sources, float, true>(g, make) : dispatch<Sources, double, true>(g, make);
  }
  query_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&values, &keys, &queries, &attrs, &weights}) w->write();
}

}  // namespace pyg_sar::attention
