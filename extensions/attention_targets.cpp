// The backward pass of attention by target.

#include "attention.h"
#include "attention_dispatch.h"
#include "attention_scores.h"
#include "attention_tensors.h"

namespace pyg_sar::attention {
namespace {

// Backward by target: scores whose gradients don't come by source alone.
template <class Number, class Score, int64_t kChannels>
struct Targets {
  using T = Number;
  static constexpr bool kByChannels = true;
  static constexpr bool kTermInValue = Score::kShape.term == Term::kInKeyAndValue;
  Terms<T> t;
  Known<T> known;
  T *grad_query, *grad_edge_attr;
  std::vector<T*> grad_att, grad_edge_weight;  // of each chunk

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = t.block(), end = t.first_segment(chunk + 1);
    const int64_t width = Score::kShape.narrow_query ? t.heads : t.width();
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t i = t.target(u);
      const T *packed = known.packed.row(i), *query = t.query.row(i);
      const Wanted<T> to{grad_query == nullptr ? nullptr : grad_query + i * width, nullptr,
                         grad_att.empty() ? nullptr : grad_att[chunk], grad_edge_attr,
                         grad_edge_weight.empty() ? nullptr : grad_edge_weight[chunk]};
      fill_tile(b.tile_top, packed, t.heads, b.size);
      fill_tile(b.tile_total, packed + t.heads, t.heads, b.size);
      fill_tile(b.tile_delta, packed + 2 * t.heads, t.heads, b.size);
      Score::template begin<false>(t, b, query);
      Score::template clear<false>(t, b);
      if constexpr (kTermInValue) {
        std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
        std::fill_n(b.edges_of_score, t.heads * t.features, T(0));
      }
      for (int64_t e = start; e < stop; e += step) add(b, i, e, std::min(step, stop - e), to);
      Score::template finish<false>(t, b, query, to);
      if constexpr (kTermInValue) {
        if (t.features > 0) finish_edges(b, i, to);
      }
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t i, int64_t first, int64_t n,
                          const Wanted<T>& to) const {
    const int64_t count = n * t.heads, edges = i * t.heads * t.features;
    const Rows<T> keys = t.rows(t.key, first, n), values = t.rows(t.value, first, n);
    Score::template scores<false, kChannels>(t, b, t.query.row(i), keys, first);
    inner_products<kChannels, true>(b.inner, known.grad_out.row(i), values);
    if constexpr (kTermInValue) {
      for (int64_t e = 0; e < n && t.features > 0; ++e) {
        add_edge_products(t, b.score, t.scale, known.query_edges + edges, e, first);
        add_edge_products(t, b.inner, T(1), known.grad_edges + edges, e, first);
      }
    }
    T* alpha = leaked<Score>(t, b, count);
    exp_share_lanes(alpha, b.tile_top, b.tile_total, count, b.size);
    if (t.drop_key != nullptr) draw(t, b, first, n);
    score_gradients(b, alpha, b.tile_delta, true, t.drop_key != nullptr, count);
    Score::template add<false, kChannels>(t, b, t.query.row(i), keys, first, to);
    if constexpr (kTermInValue) {
      if (t.features > 0) add_edges(b, i, first, n, to);
    }
  }

  // The edge term is in key and value; b.inner: scale * dL/dscore
  PYG_SAR_INLINE void add_edges(const Buffers<T>& b, int64_t i, int64_t first, int64_t n,
                                const Wanted<T>& to) const {
    sum_edge_attr(t, b.edges_of_score, b.inner, first, n);
    if (to.edge_weight != nullptr) sum_edge_attr(t, b.edges_of_weight, b.weight, first, n);
    if (to.edge_attr == nullptr) return;
    const int64_t at = i * t.heads * t.features;
    for (int64_t e = 0; e < n; ++e) {
      T* row = to.edge_attr + t.number(first + e) * t.features;
      std::fill_n(row, t.features, T(0));
      for (int64_t h = 0; h < t.heads; ++h) {
        const int64_t own = at + h * t.features;
        add_scaled(row, b.weight[e * t.heads + h], known.grad_edges + own, t.features);
        add_scaled(row, b.inner[e * t.heads + h], known.query_edges + own, t.features);
      }
    }
  }

  PYG_SAR_INLINE void finish_edges(const Buffers<T>& b, int64_t i, const Wanted<T>& to) const {
    if (to.own != nullptr) {
      add_edge_rows(t, to.own, T(1), static_cast<const T*>(b.edges_of_score));
    }
    if (to.edge_weight == nullptr) return;
    for (int64_t d = 0; d < t.features; ++d) {
      for (int64_t h = 0; h < t.heads; ++h) {
        const int64_t at = h * t.channels, hd = h * t.features + d;
        T* out = to.edge_weight + d * t.width() + at;
        add_scaled(out, b.edges_of_weight[hd], known.grad_out.row(i) + at, t.channels);
        add_scaled(out, b.edges_of_score[hd], t.query.row(i) + at, t.channels);
      }
    }
  }
};

}  // namespace

void backward_targets(const TargetsArguments& a) {
  const Given& g = a.given;
  Backward all(g, a.cotangent, false);
  if (nothing(g)) return;
  all.pack(g, a.cotangent);
  const Written queries(a.grad_query), atts(a.grad_att), attrs(a.grad_edge_attr);
  const Written weights(a.grad_edge_weight);
  const bool shared = a.grad_att.has_value() || a.grad_edge_weight.has_value();
  const int64_t chunks = num_chunks(g, shared ? kChunksOfParameters : kMostChunks);
  const PerChunk att_sums(atts.dense, chunks), weight_sums(weights.dense, chunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, all.dense, chunks), all.known<T>(),         queries.data<T>(),
                attrs.data<T>(),                att_sums.pointers<T>(), weight_sums.pointers<T>()};
  };
  g.value.scalar_type() == kFloat ? dispatch<Targets, float, false>(g, make)
                                      : dispatch<Targets, double, false>(g, make);
  att_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&queries, &atts, &attrs, &weights}) w->write();
}

}  // namespace pyg_sar::attention
