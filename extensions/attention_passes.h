// The passes of attention: by target forward, by source row and by target backward.
//
// A pass is called with the number of a chunk of segments. What its scores are made of is inlined into it; loops
// over a block of edges are shared by the passes of a file. Files that include this say which processor they
// are for (attention_level.h).
#pragma once

#include "attention_scores.h"

#include <vector>

namespace pyg_sar::attention {

// Whether the edge term is part of the value, too.
template <class Score>
constexpr bool kInBoth = Score::kShape.term == Term::kInKeyAndValue;

// Of a target.
template <class T>
struct TargetState {
  T *acc, *maximum, *normaliser;
};

// Raises the maximum to a block's, and rescales what was summed with the old one.
template <class T>
PYG_SAR_INLINE void raise(const Terms<T>& t, const Buffers<T>& b, const TargetState<T>& state, int64_t count,
                          bool in_both) {
  // At least a finite number: of targets that have had an edge, only NaN gives NaN.
  std::fill_n(b.lanes, b.size, std::numeric_limits<T>::lowest());
  raise_lanes(b.lanes, b.score, count, b.size);
  for (int64_t h = 0; h < t.heads; ++h) {
    T top = b.lanes[h];
    for (int64_t l = h + t.heads; l < b.size; l += t.heads) top = std::max(top, b.lanes[l]);
    T& old = state.maximum[h];
    if (!(top > old)) continue;
    if (old == -std::numeric_limits<T>::infinity()) {  // nothing was added yet
      old = top;
      continue;
    }
    const T factor = exponential(old - top);
    old = top;
    state.normaliser[h] *= factor;
    for (int64_t c = 0; c < t.channels; ++c) state.acc[h * t.channels + c] *= factor;
    for (int64_t d = 0; d < t.features && in_both; ++d) b.edges_of_weight[h * t.features + d] *= factor;
  }
}

// The softmax of a block's scores, and its sum of values: the same for all scores.
template <class T>
PYG_SAR_SHARED void add_scored(const Terms<T>& t, const Buffers<T>& b, const TargetState<T>& state, int64_t first,
                               int64_t n, bool leaks, bool in_both) {
  const int64_t count = n * t.heads;
  if (leaks) leak(b.score, b.score, t.slope, count);
  std::fill(b.score + count, b.score + padded(count), -std::numeric_limits<T>::infinity());
  raise(t, b, state, count, in_both);
  fill_tile(b.tile_top, static_cast<const T*>(state.maximum), t.heads, b.size);
  std::fill_n(b.lanes, b.size, T(0));
  exp_sum(b.score, b.tile_top, b.lanes, count, b.size);
  add_lanes(state.normaliser, b.lanes, t.heads, b.size);
  if (t.drop_key != nullptr) {
    draw(t, b, first, n);
    T* score = b.score;
    const T* keep = b.keep;
    PYG_SAR_LANES(count, kLanes, (void)o; score[k] *= keep[k];)
  }
  accumulate(state.acc, b.score, t.rows(t.value, first, n), true);
}

// Forward: acc, maximum and normaliser of each target.
template <class Number>
struct Forward {
  using T = Number;
  static constexpr bool kOfAll = true;  // scores, also of those whose gradients come by source alone
  Terms<T> t;
  T *acc, *maximum, *normaliser;
  const T* query_edges;  // term in the value: <query_i, edge_weight_d> [N, heads, features]

  template <class Score>
  PYG_SAR_INLINE void run(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = Score::kShape.narrow_key ? kBlock : t.block();
    const int64_t end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t i = t.target(u);
      Score::template begin<false>(t, b, t.query.row(i));
      if constexpr (kInBoth<Score>) std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
      for (int64_t e = start; e < stop; e += step) add<Score>(b, i, e, std::min(step, stop - e));
      if constexpr (kInBoth<Score>) {
        if (t.features > 0) add_edge_rows(t, acc + i * t.width(), T(1), b.edges_of_weight);
      }
    }
  }

  template <class Score>
  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t i, int64_t first, int64_t n) const {
    const Rows<T> keys =
        Score::kShape.narrow_key ? t.narrow_rows(t.key, first, n, 1) : t.rows(t.key, first, n);
    if constexpr (Score::kShape.narrow_key) copy_rows(b.score, keys);
    Score::template scores<false>(t, b, t.query.row(i), keys, first);
    if constexpr (kInBoth<Score>) {
      if (t.features > 0) {
        const T* own = query_edges + i * t.heads * t.features;
        for (int64_t e = 0; e < n; ++e) add_edge_products(t, b.score, t.scale, own, e, first);
      }
    }
    const TargetState<T> state{acc + i * t.width(), maximum + i * t.heads, normaliser + i * t.heads};
    add_scored(t, b, state, first, n, leaks<Score>(t), kInBoth<Score>);
    if constexpr (kInBoth<Score>) {
      if (t.features > 0) sum_edge_attr(t, b.edges_of_weight, b.score, first, n);
    }
  }
};

// weight = alpha * keep and inner = dL/dscore of a block, of the scores and of <grad_out, value> in b.inner. What a
// target has lies in tiles (by_lane), or beside the scores.
template <class T>
PYG_SAR_SHARED void weigh(const Terms<T>& t, const Buffers<T>& b, bool leaks, bool by_lane, int64_t first, int64_t n) {
  const int64_t count = n * t.heads;
  T* alpha = b.score;
  if (leaks) {  // exp() must not overwrite scores whose signs are asked for later
    alpha = b.leaked;
    leak(alpha, b.score, t.slope, count);
  }
  by_lane ? exp_share_lanes(alpha, b.tile_top, b.tile_total, count, b.size) : exp_share(alpha, b.top, b.total, count);
  if (t.drop_key != nullptr) draw(t, b, first, n);
  score_gradients(b, alpha, by_lane ? b.tile_delta : b.delta, by_lane, t.drop_key != nullptr, count);
}

// Backward by source row, over the transposed shard.
template <class Number>
struct Sources {
  using T = Number;
  static constexpr bool kOfAll = true;
  Terms<T> t;
  Known<T> known;
  Matrix<T> grad_value, grad_key;                // 'grad_key' may be 'grad_value'
  T* grad_edge_attr;                             // by source alone, as all that follows
  std::vector<T*> grad_query, grad_edge_weight;  // of each chunk

  template <class Score>
  PYG_SAR_INLINE void run(int64_t chunk) const {
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
      for (int64_t e = start; e < stop; e += step) add<Score>(b, j, e, std::min(step, stop - e), to);
      Score::template finish<true>(t, b, key, to);
    }
  }

  template <class Score>
  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t j, int64_t first, int64_t n,
                          const Wanted<T>& to) const {
    const Rows<T> grads = t.rows(known.grad_out, first, n);
    const Rows<T> packed = t.narrow_rows(known.packed, first, n, 4);
    const Rows<T> queries = Score::kShape.narrow_query ? packed : t.rows(t.query, first, n);
    const T *key = t.key.row(t.place(j)), *value = t.value.row(t.place(j));
    split_rows(b.top, b.total, b.delta, Score::kShape.narrow_query ? b.score : b.keep, packed);
    Score::template scores<true>(t, b, key, queries, first);
    inner_products(b.inner, value, grads);
    if constexpr (kInBoth<Score>) {
      if (t.features > 0) {
        for (int64_t e = 0; e < n; ++e) {
          const int64_t at = t.source[first + e] * t.heads * t.features;
          add_edge_products(t, b.score, t.scale, known.query_edges + at, e, first);
          add_edge_products(t, b.inner, T(1), known.grad_edges + at, e, first);
        }
      }
    }
    weigh(t, b, leaks<Score>(t), false, first, n);
    if (grad_value.data != nullptr) accumulate(grad_value.row(j), b.weight, grads, false);
    Score::template add<true>(t, b, key, queries, first, to);
  }
};

// Backward by target: scores whose gradients don't come by source alone.
template <class Number>
struct Targets {
  using T = Number;
  static constexpr bool kOfAll = false;
  Terms<T> t;
  Known<T> known;
  T *grad_query, *grad_edge_attr;
  std::vector<T*> grad_att, grad_edge_weight;  // of each chunk

  template <class Score>
  PYG_SAR_INLINE void run(int64_t chunk) const {
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
      if constexpr (kInBoth<Score>) {
        std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
        std::fill_n(b.edges_of_score, t.heads * t.features, T(0));
      }
      for (int64_t e = start; e < stop; e += step) add<Score>(b, i, e, std::min(step, stop - e), to);
      Score::template finish<false>(t, b, query, to);
      if constexpr (kInBoth<Score>) {
        if (t.features > 0) finish_edges(b, i, to);
      }
    }
  }

  template <class Score>
  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t i, int64_t first, int64_t n,
                          const Wanted<T>& to) const {
    [[maybe_unused]] const int64_t edges = i * t.heads * t.features;
    const Rows<T> keys = t.rows(t.key, first, n), values = t.rows(t.value, first, n);
    Score::template scores<false>(t, b, t.query.row(i), keys, first);
    inner_products(b.inner, known.grad_out.row(i), values);
    if constexpr (kInBoth<Score>) {
      for (int64_t e = 0; e < n && t.features > 0; ++e) {
        add_edge_products(t, b.score, t.scale, known.query_edges + edges, e, first);
        add_edge_products(t, b.inner, T(1), known.grad_edges + edges, e, first);
      }
    }
    weigh(t, b, leaks<Score>(t), true, first, n);
    Score::template add<false>(t, b, t.query.row(i), keys, first, to);
    if constexpr (kInBoth<Score>) {
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

// Runs a pass on a chunk, with the scores of a kind: compiled for registers of so many bytes.
template <int kRegister, class Pass>
void run_chunk(const Pass& pass, int64_t kind, int64_t chunk);

}  // namespace pyg_sar::attention
