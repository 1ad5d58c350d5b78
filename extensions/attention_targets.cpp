// The backward pass of attention by target.

#include "attention.h"
#include "attention_dispatch.h"
#include "attention_scores.h"
#include "attention_tensors.h"

namespace pyg_sar::attention {
namespace {

// Backward by target: all but additive.
template <class Number, int64_t kKind, int64_t kChannels>
struct Targets {
  using T = Number;
  Terms<T> t;
  Known<T> known;
  T *grad_query, *grad_edge_attr;
  std::vector<T*> grad_att, grad_edge_weight;  // of each chunk

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = t.block(), end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t i = t.target(u);
      const T* packed = known.packed + i * 4 * t.heads;
      fill_tile(b.tile_top, packed, t.heads, b.size);
      fill_tile(b.tile_inverse, packed + t.heads, t.heads, b.size);
      fill_tile(b.tile_delta, packed + 2 * t.heads, t.heads, b.size);
      if constexpr (kKind == kMixed) {
        fix_sum(t, b, t.att + t.width(), t.query.row(i));
        std::fill_n(b.heads, t.heads, T(0));
      }
      std::fill_n(b.row2, t.width(), T(0));
      std::fill_n(b.row3, t.width(), T(0));
      std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
      std::fill_n(b.edges_of_score, t.heads * t.features, T(0));
      for (int64_t e = start; e < stop; e += step) add(b, chunk, i, e, std::min(step, stop - e));
      finish(b, chunk, i);
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t chunk, int64_t i, int64_t first,
                          int64_t n) const {
    const int64_t count = n * t.heads, edges = i * t.heads * t.features;
    const Rows<T> keys = t.rows(t.key, first, n), values = t.rows(t.value, first, n);
    scores<kKind, kChannels>(t, b, t.query.row(i), keys, first, t.att);
    inner_products<kChannels, true>(b.inner, known.grad_out.row(i), values);
    if constexpr (kKind == kDot) {
      for (int64_t e = 0; e < n && t.features > 0; ++e) {
        add_edge_products(t, b.score, t.scale, known.query_edges + edges, e, first);
        add_edge_products(t, b.inner, T(1), known.grad_edges + edges, e, first);
      }
    }
    T* alpha = leaked<kKind>(t, b, count);
    exp_share_lanes(alpha, b.tile_top, b.tile_inverse, count, b.size);
    if (t.drop_key != nullptr) draw(t, b, first, n);
    score_gradients(b, alpha, b.tile_delta, true, t.drop_key != nullptr, count);
    through_leak<kKind>(t, b, count);
    if constexpr (kKind == kMixed) {
      through_gate(t, b, count);
      accumulate(b.row2, b.inner, keys, false);
      if (!grad_att.empty()) accumulate(b.row3, b.weight, keys, false);
    } else if constexpr (kKind == kDot) {
      T* inner = b.inner;
      const T scale = t.scale;
      PYG_SAR_LANES(count, kLanes, (void)o; inner[k] *= scale;)
      if (grad_query != nullptr) accumulate(grad_query + i * t.width(), b.inner, keys, false);
      if (t.features > 0) add_edges(b, i, first, n);
    } else {
      if (t.features == 0) return add_gatv2(b, i, b.inner, keys);
      for (int64_t e = 0; e < n; ++e) {
        const T* ds = b.inner + e * t.heads;
        add_gatv2(b, i, ds, with_edge(t, b, keys, e, first));
        add_gatv2_edge(b, chunk, i, ds, first + e);
      }
    }
  }

  // dot; b.inner: scale * dL/dscore
  PYG_SAR_INLINE void add_edges(const Buffers<T>& b, int64_t i, int64_t first, int64_t n) const {
    sum_edge_attr(t, b.edges_of_score, b.inner, first, n);
    if (!grad_edge_weight.empty()) sum_edge_attr(t, b.edges_of_weight, b.weight, first, n);
    if (grad_edge_attr == nullptr) return;
    const int64_t at = i * t.heads * t.features;
    for (int64_t e = 0; e < n; ++e) {
      T* row = grad_edge_attr + t.number(first + e) * t.features;
      std::fill_n(row, t.features, T(0));
      for (int64_t h = 0; h < t.heads; ++h) {
        const int64_t own = at + h * t.features;
        add_scaled(row, b.weight[e * t.heads + h], known.grad_edges + own, t.features);
        add_scaled(row, b.inner[e * t.heads + h], known.query_edges + own, t.features);
      }
    }
  }

  PYG_SAR_INLINE void add_gatv2(const Buffers<T>& b, int64_t i, const T* ds,
                                const Rows<T>& rows) const {
    const T* query = t.query.row(i);
    if (grad_att.empty()) {
      gatv2_gradients<kChannels, false>(b.row2, b.row3, ds, query, rows, t.slope);
    } else {
      gatv2_gradients<kChannels, true>(b.row2, b.row3, ds, query, rows, t.slope);
    }
  }

  // b.row: the edge's key and edge term
  PYG_SAR_INLINE void add_gatv2_edge(const Buffers<T>& b, int64_t chunk, int64_t i, const T* ds,
                                     int64_t e) const {
    if (grad_edge_attr == nullptr && grad_edge_weight.empty()) return;
    const T *query = t.query.row(i), *attr = t.attr(e);
    const int64_t width = t.width();
    T* row = b.row;
    for (int64_t f = 0; f < width; ++f) {
      const T z = query[f] + row[f], d = ds[f / t.channels] * t.att[f], down = d * t.slope;
      row[f] = z > T(0) ? d : down;
    }
    for (int64_t d = 0; d < t.features; ++d) {
      if (grad_edge_attr != nullptr) {
        T* out = grad_edge_attr + t.number(e) * t.features;
        out[d] = inner_product<T>(row, t.edge_weight + d * width, width);
      }
      if (!grad_edge_weight.empty()) {
        add_scaled<T>(grad_edge_weight[chunk] + d * width, attr[d], row, width);
      }
    }
  }

  PYG_SAR_INLINE void finish(const Buffers<T>& b, int64_t chunk, int64_t i) const {
    const int64_t width = t.width();
    if constexpr (kKind == kGatv2) {
      for (int64_t f = 0; f < width && grad_query != nullptr; ++f) {
        grad_query[i * width + f] += t.att[f] * b.row2[f];
      }
      if (!grad_att.empty()) add_scaled<T>(grad_att[chunk], T(1), b.row3, width);
      return;
    }
    if constexpr (kKind == kMixed) {
      const T* by = b.heads;
      if (grad_query != nullptr) {
        add_scaled<T>(grad_query + i * width, T(1), b.row2, width);
        add_by_head(t, grad_query + i * width, by, t.att + width);
      }
      if (grad_att.empty()) return;
      add_scaled<T>(grad_att[chunk], T(1), b.row3, width);
      add_by_head(t, grad_att[chunk] + width, by, t.query.row(i));
      return;
    }
    if (t.features == 0) return;
    if (grad_query != nullptr) {
      add_edge_rows(t, grad_query + i * width, T(1), static_cast<const T*>(b.edges_of_score));
    }
    if (grad_edge_weight.empty()) return;
    for (int64_t d = 0; d < t.features; ++d) {
      for (int64_t h = 0; h < t.heads; ++h) {
        const int64_t at = h * t.channels, hd = h * t.features + d;
        T* out = grad_edge_weight[chunk] + d * width + at;
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
  g.value.scalar_type() == at::kFloat ? dispatch<Targets, float, false>(g, make)
                                      : dispatch<Targets, double, false>(g, make);
  att_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&queries, &atts, &attrs, &weights}) w->write();
}

}  // namespace pyg_sar::attention
