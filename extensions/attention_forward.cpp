// The forward pass of attention, by target.

#include "attention.h"
#include "attention_dispatch.h"
#include "attention_scores.h"
#include "attention_tensors.h"
#include "factored.h"

namespace pyg_sar::attention {
namespace {

// Forward: acc, maximum and normaliser of each target.
template <class Number, class Score, int64_t kChannels>
struct Forward {
  using T = Number;
  static constexpr Shape kShape = Score::kShape;
  static constexpr bool kByChannels = !kShape.narrow_key;  // whether their number matters
  static constexpr bool kTermInValue = kShape.term == Term::kInKeyAndValue;
  Terms<T> t;
  T *acc, *maximum, *normaliser;
  const T* query_edges;  // term in the value: <query_i, edge_weight_d> [N, heads, features]

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = kShape.narrow_key ? kBlock : t.block();
    const int64_t end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t i = t.target(u);
      Score::template begin<false>(t, b, t.query.row(i));
      if constexpr (kTermInValue) std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
      for (int64_t e = start; e < stop; e += step) add(b, i, e, std::min(step, stop - e));
      if constexpr (kTermInValue) {
        if (t.features > 0) add_edge_rows(t, acc + i * t.width(), T(1), b.edges_of_weight);
      }
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t i, int64_t first, int64_t n) const {
    const int64_t count = n * t.heads, end = padded(count);
    T* out = acc + i * t.width();
    const Rows<T> keys =
        kShape.narrow_key ? t.narrow_rows(t.key, first, n, 1) : t.rows(t.key, first, n);
    if constexpr (kShape.narrow_key) copy_rows(b.score, keys);
    Score::template scores<false, kChannels>(t, b, t.query.row(i), keys, first);
    if constexpr (kTermInValue) {
      if (t.features > 0) {
        const T* own = query_edges + i * t.heads * t.features;
        for (int64_t e = 0; e < n; ++e) add_edge_products(t, b.score, t.scale, own, e, first);
      }
    }
    if (leaks<Score>(t)) leak(b.score, b.score, t.slope, count);
    std::fill(b.score + count, b.score + end, -std::numeric_limits<T>::infinity());
    raise(b, i, out, count);
    fill_tile(b.tile_top, static_cast<const T*>(maximum + i * t.heads), t.heads, b.size);
    std::fill_n(b.lanes, b.size, T(0));
    exp_sum(b.score, b.tile_top, b.lanes, count, b.size);
    add_lanes(normaliser + i * t.heads, b.lanes, t.heads, b.size);
    if (t.drop_key != nullptr) {
      draw(t, b, first, n);
      T* score = b.score;
      const T* keep = b.keep;
      PYG_SAR_LANES(count, kLanes, (void)o; score[k] *= keep[k];)
    }
    accumulate(out, b.score, t.rows(t.value, first, n), true);
    if constexpr (kTermInValue) {
      if (t.features > 0) sum_edge_attr(t, b.edges_of_weight, b.score, first, n);
    }
  }

  // Raises the maximum to a block's, and rescales what was summed with the old one.
  PYG_SAR_INLINE void raise(const Buffers<T>& b, int64_t i, T* out, int64_t count) const {
    // At least a finite number: of targets that have had an edge, only NaN gives NaN.
    std::fill_n(b.lanes, b.size, std::numeric_limits<T>::lowest());
    raise_lanes(b.lanes, b.score, count, b.size);
    for (int64_t h = 0; h < t.heads; ++h) {
      T top = b.lanes[h];
      for (int64_t l = h + t.heads; l < b.size; l += t.heads) top = std::max(top, b.lanes[l]);
      T& old = maximum[i * t.heads + h];
      if (!(top > old)) continue;
      if (old == -std::numeric_limits<T>::infinity()) {  // nothing was added yet
        old = top;
        continue;
      }
      const T factor = exponential(old - top);
      old = top;
      normaliser[i * t.heads + h] *= factor;
      for (int64_t c = 0; c < t.channels; ++c) out[h * t.channels + c] *= factor;
      if constexpr (kTermInValue) {
        for (int64_t d = 0; d < t.features; ++d) b.edges_of_weight[h * t.features + d] *= factor;
      }
    }
  }
};

}  // namespace

void forward(const ForwardArguments& a) {
  const Given& g = a.given;
  const Dense dense(g, a.acc.size(0), false);
  if (nothing(g)) return;
  const Written sums(a.acc), top(a.maximum), total(a.normaliser);
  const int64_t chunks = num_chunks(g, kMostChunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, dense, chunks), sums.data<T>(), top.data<T>(), total.data<T>(),
                data<T>(dense.query_edges)};
  };
  if (g.value.scalar_type() == kDouble) {
    dispatch<Forward, double, true>(g, make);
  } else if (g.kind != Additive::kKind ||
             !add_factored(terms<float>(g, dense, chunks), g.value.size(0),
                           {sums.data<float>(), top.data<float>(), total.data<float>()})) {
    dispatch<Forward, float, true>(g, make);
  }
  for (const Written* written : {&sums, &top, &total}) written->write();
}

}  // namespace pyg_sar::attention
