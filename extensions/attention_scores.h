// The scores of attention: a structure for each, which the passes are made with.
//
// A pass goes through the edges of one row after another, its "own": a target in the forward pass and
// by target, a source row by source (kBySource). 'rows' are what a block's edges read at their other
// ends; where these are narrow (a number per head), b.score holds them before scores() is called.
//
//   begin    before the edges of a row
//   clear    the same, where gradients will be asked for
//   scores   b.score = what is scored, but for the leaky ReLU where the score ends with one (kLeaks),
//            and the edge terms where these are part of the value
//   add      adds the gradients of a block, of dL/dscore in b.inner: to those of own, or to sums
//   finish   adds these sums, after the edges of a row
//
// pyg_sar/kernels/scores.py declares the same, and has the equations.
#pragma once

#include "attention_blocks.h"

namespace pyg_sar::attention {

// In the order of scores.py.
enum Kind : int64_t { kAdditive = 0, kGatv2 = 1, kDot = 2, kMixed = 3, kNested = 5 };

// leaky(key + query + edge term)
struct Additive : Plain {
  static constexpr Kind kKind = kAdditive;
  static constexpr Shape kShape{true, true, true, 0, Term::kInKey, true};
  static constexpr bool kLeaks = true;

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void begin(const Terms<T>& t, const Buffers<T>& b, const T* own) {
    fill_tile(b.fixed, own, t.heads, b.size);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void scores(const Terms<T>& t, const Buffers<T>& b, const T*,
                                    const Rows<T>& rows, int64_t first) {
    const int64_t n = rows.n;
    if (t.features > 0) {
      for (int64_t e = 0; e < n; ++e) {
        T* score = b.score + e * t.heads;
        const T* attr = t.attr(first + e);
        for (int64_t d = 0; d < t.features; ++d) {
          add_scaled(score, attr[d], t.edge_weight + d * t.heads, t.heads);
        }
      }
    }
    add_tile(b.score, b.fixed, n * t.heads, b.size);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add(const Terms<T>& t, const Buffers<T>& b, const T*,
                                 const Rows<T>& rows, int64_t first, const Wanted<T>& to) {
    const int64_t n = rows.n, count = n * t.heads;
    T* inner = b.inner;
    through_leak<Additive>(t, b, count);
    if (to.own != nullptr) sum_edges(t, b, to.own, inner, count);
    if (to.others != nullptr) scatter(to.others, static_cast<const T*>(inner), rows);
    for (int64_t e = 0; e < n && to.edge_attr != nullptr; ++e) {
      T* row = to.edge_attr + t.number(first + e) * t.features;
      for (int64_t d = 0; d < t.features; ++d) {
        row[d] = inner_product(inner + e * t.heads, t.edge_weight + d * t.heads, t.heads);
      }
    }
    for (int64_t e = 0; e < n && to.edge_weight != nullptr; ++e) {
      const T* attr = t.attr(first + e);
      for (int64_t d = 0; d < t.features; ++d) {
        add_scaled(to.edge_weight + d * t.heads, attr[d],
                   static_cast<const T*>(inner + e * t.heads), t.heads);
      }
    }
  }
};

// <att, leaky(key + query + edge term)>
struct Gatv2 : Plain {
  static constexpr Kind kKind = kGatv2;
  static constexpr Shape kShape{false, false, true, 1, Term::kInKey, false};
  static constexpr bool kLeaks = false;

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void clear(const Terms<T>& t, const Buffers<T>& b) {
    std::fill_n(b.row2, t.width(), T(0));
    if constexpr (!kBySource) std::fill_n(b.row3, t.width(), T(0));
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void scores(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Rows<T>& rows, int64_t first) {
    gatv2_scores(t, b, own, rows, first);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                 const Rows<T>& rows, int64_t first, const Wanted<T>& to) {
    if (kBySource && to.own == nullptr) return;
    if (t.features == 0) return add_rows<kBySource>(t, b, b.inner, own, rows, to);
    for (int64_t e = 0; e < rows.n; ++e) {
      const T* ds = b.inner + e * t.heads;
      add_rows<kBySource>(t, b, ds, own, with_edge(t, b, rows, e, first), to);
      if constexpr (!kBySource) add_edge(t, b, ds, own, first + e, to);
    }
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void finish(const Terms<T>& t, const Buffers<T>& b, const T*,
                                    const Wanted<T>& to) {
    if (to.own != nullptr) {
      for (int64_t f = 0; f < t.width(); ++f) to.own[f] += t.att[f] * b.row2[f];
    }
    if constexpr (!kBySource) {
      if (to.att != nullptr) add_scaled<T>(to.att, T(1), b.row3, t.width());
    }
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add_rows(const Terms<T>& t, const Buffers<T>& b, const T* ds,
                                      const T* own, const Rows<T>& rows, const Wanted<T>& to) {
    if (kBySource || to.att == nullptr) {
      gatv2_gradients<false>(b.row2, b.row3, ds, own, rows, t.slope);
    } else {
      gatv2_gradients<true>(b.row2, b.row3, ds, own, rows, t.slope);
    }
  }

  // b.row: the edge's key and edge term
  template <class T>
  PYG_SAR_INLINE static void add_edge(const Terms<T>& t, const Buffers<T>& b, const T* ds,
                                      const T* own, int64_t e, const Wanted<T>& to) {
    if (to.edge_attr == nullptr && to.edge_weight == nullptr) return;
    T* row = b.row;
    for (int64_t f = 0; f < t.width(); ++f) {
      const T z = own[f] + row[f], d = ds[f / t.channels] * t.att[f], down = d * t.slope;
      row[f] = z > T(0) ? d : down;
    }
    add_wide_term(t, static_cast<const T*>(row), e, to);
  }
};

// leaky(scale * <query, key + edge term>)
struct Dot : Plain {
  static constexpr Kind kKind = kDot;
  static constexpr Shape kShape{false, false, false, 0, Term::kInKeyAndValue, false};
  static constexpr bool kLeaks = true;

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void scores(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Rows<T>& rows, int64_t) {
    inner_products(b.score, own, rows);
    const T scale = t.scale;
    T* score = b.score;
    PYG_SAR_LANES(rows.n * t.heads, kLanes, (void)o; score[k] *= scale;)
  }

  // Leaves scale * dL/dscore in b.inner.
  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add(const Terms<T>& t, const Buffers<T>& b, const T*,
                                 const Rows<T>& rows, int64_t, const Wanted<T>& to) {
    if (kBySource && to.own == nullptr) return;
    const int64_t count = rows.n * t.heads;
    through_leak<Dot>(t, b, count);
    T* inner = b.inner;
    const T scale = t.scale;
    PYG_SAR_LANES(count, kLanes, (void)o; inner[k] *= scale;)
    if (to.own != nullptr) accumulate(to.own, b.inner, rows, false);
  }
};

// leaky((<att[0], key> + <att[1], query>) * sigmoid(<query, key>))
struct Mixed : Plain {
  static constexpr Kind kKind = kMixed;
  static constexpr Shape kShape{false, false, false, 2, Term::kNone, false};
  static constexpr bool kLeaks = true;

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void begin(const Terms<T>& t, const Buffers<T>& b, const T* own) {
    fix_sum(t, b, att_of_own<kBySource>(t), own);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void clear(const Terms<T>& t, const Buffers<T>& b) {
    std::fill_n(b.heads, t.heads, T(0));
    if constexpr (kBySource) return;
    std::fill_n(b.row2, t.width(), T(0));
    std::fill_n(b.row3, t.width(), T(0));
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void scores(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Rows<T>& rows, int64_t) {
    const int64_t count = rows.n * t.heads;
    T *score = b.score, *sum = b.sum, *gate = b.gate;
    two_inner_products(gate, sum, own, att_of_own<!kBySource>(t), rows);
    add_tile(sum, b.fixed, count, b.size);
    PYG_SAR_LANES(count, kLanes, (void)o; const T open = sigmoid(gate[k]); gate[k] = open;
                  score[k] = sum[k] * open;)
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add(const Terms<T>& t, const Buffers<T>& b, const T*,
                                 const Rows<T>& rows, int64_t, const Wanted<T>& to) {
    if (kBySource && to.own == nullptr) return;
    through_leak<Mixed>(t, b, rows.n * t.heads);
    through_gate(t, b, rows.n * t.heads);
    accumulate(kBySource ? to.own : b.row2, b.inner, rows, false);
    if constexpr (!kBySource) {
      if (to.att != nullptr) accumulate(b.row3, b.weight, rows, false);
    }
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void finish(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Wanted<T>& to) {
    const T* by = b.heads;
    const int64_t width = t.width();
    if (to.own != nullptr) {
      if constexpr (!kBySource) add_scaled<T>(to.own, T(1), b.row2, width);
      add_by_head(t, to.own, by, att_of_own<kBySource>(t));
    }
    if constexpr (kBySource) return;
    if (to.att == nullptr) return;
    add_scaled<T>(to.att, T(1), b.row3, width);
    add_by_head(t, to.att + width, by, own);
  }

  // b.inner = dL/d<query, key>, b.weight = dL/dsum of dL/d(sum * gate), which is in b.inner;
  // b.heads += dL/dsum of all edges
  template <class T>
  PYG_SAR_INLINE static void through_gate(const Terms<T>& t, const Buffers<T>& b, int64_t count) {
    T *inner = b.inner, *weight = b.weight;
    const T *sum = b.sum, *gate = b.gate;
    PYG_SAR_LANES(count, kLanes, (void)o; const T by = inner[k] * gate[k]; weight[k] = by;
                  inner[k] = by * sum[k] * (T(1) - gate[k]);)
    sum_edges(t, b, b.heads, weight, count);
  }
};

// leaky(<att, leaky(key + edge term)> + query)
struct Nested : Plain {
  static constexpr Kind kKind = kNested;
  static constexpr Shape kShape{false, true, false, 1, Term::kInKey, false};
  static constexpr bool kLeaks = true;

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void begin(const Terms<T>& t, const Buffers<T>& b, const T* own) {
    if (!kBySource) return fill_tile(b.fixed, own, t.heads, b.size);
    if (t.features > 0) return;
    const int32_t first = 0;
    const Rows<T> key{own, 0, &first, 1, 0, t.heads, t.channels, 0};
    nested_sums(t, b, b.heads, key, 0);
    fill_tile(b.fixed, static_cast<const T*>(b.heads), t.heads, b.size);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void clear(const Terms<T>& t, const Buffers<T>& b) {
    kBySource ? std::fill_n(b.heads, t.heads, T(0)) : std::fill_n(b.row3, t.width(), T(0));
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void scores(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Rows<T>& rows, int64_t first) {
    const int64_t n = rows.n, count = n * t.heads;
    T* score = b.score;
    if constexpr (!kBySource) {
      nested_sums(t, b, score, rows, first);
    } else if (t.features > 0) {
      T* sums = b.leaked;
      nested_sums(t, b, sums, repeated(t, own, rows), first);
      PYG_SAR_LANES(count, kLanes, (void)o; score[k] += sums[k];)
      return;
    }
    add_tile(score, b.fixed, count, b.size);
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void add(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                 const Rows<T>& rows, int64_t first, const Wanted<T>& to) {
    if (kBySource && to.own == nullptr) return;
    const int64_t n = rows.n, count = n * t.heads;
    through_leak<Nested>(t, b, count);
    if constexpr (kBySource) {
      if (t.features == 0) return sum_edges(t, b, b.heads, b.inner, count);
      const Rows<T> keys = repeated(t, own, rows);
      for (int64_t e = 0; e < n; ++e) {
        add_through(t, to.own, b.inner + e * t.heads, with_edge(t, b, keys, e, first).at(0));
      }
    } else {
      if (to.own != nullptr) sum_edges(t, b, to.own, b.inner, count);
      for (int64_t e = 0; e < n; ++e) add_edge(t, b, b.inner + e * t.heads, rows, e, first, to);
    }
  }

  template <bool kBySource, class T>
  PYG_SAR_INLINE static void finish(const Terms<T>& t, const Buffers<T>& b, const T* own,
                                    const Wanted<T>& to) {
    if constexpr (kBySource) {
      if (to.own != nullptr && t.features == 0) add_through(t, to.own, b.heads, own);
    } else {
      if (to.att != nullptr) add_scaled<T>(to.att, T(1), b.row3, t.width());
    }
  }

  // An edge's gradients of 'att', and of its features and their weight.
  template <class T>
  PYG_SAR_INLINE static void add_edge(const Terms<T>& t, const Buffers<T>& b, const T* ds,
                                      const Rows<T>& rows, int64_t e, int64_t first,
                                      const Wanted<T>& to) {
    const T* key = t.features > 0 ? with_edge(t, b, rows, e, first).at(0) : rows.at(e);
    const T slope = t.slope;
    if (to.att != nullptr) {
      T* sums = b.row3;
      for (int64_t h = 0; h < t.heads; ++h) {
        const int64_t at = h * t.channels;
#pragma omp simd
        for (int64_t f = at; f < at + t.channels; ++f) sums[f] += ds[h] * leaky(key[f], slope);
      }
    }
    if (to.edge_attr == nullptr && to.edge_weight == nullptr) return;
    std::fill_n(b.row2, t.width(), T(0));
    add_through(t, b.row2, ds, key);
    add_wide_term(t, static_cast<const T*>(b.row2), first + e, to);
  }

  // out += ds * att * leaky'(key)
  template <class T>
  PYG_SAR_INLINE static void add_through(const Terms<T>& t, T* out, const T* ds, const T* key) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const T up = ds[h], down = up * t.slope;
      const int64_t at = h * t.channels;
#pragma omp simd
      for (int64_t f = at; f < at + t.channels; ++f) out[f] += (key[f] > T(0) ? up : down) * t.att[f];
    }
  }

  // A key as that of each edge.
  template <class T>
  PYG_SAR_INLINE static Rows<T> repeated(const Terms<T>& t, const T* key, const Rows<T>& rows) {
    return {key, 0, rows.index, rows.n, 0, t.heads, t.channels, 0};
  }
};

template <class... Score>
struct Listed {
  // Calls run.operator()<S>() for each score S.
  template <class Run>
  static void each(const Run& run) {
    (run.template operator()<Score>(), ...);
  }
};

using Scores = Listed<Additive, Gatv2, Dot, Mixed, Nested>;

// What a score reads; null where there is none of this number.
inline const Shape* shape_of(int64_t kind) {
  const Shape* found = nullptr;
  Scores::each([&]<class S>() {
    if (S::kKind == kind) found = &S::kShape;
  });
  return found;
}

}  // namespace pyg_sar::attention
