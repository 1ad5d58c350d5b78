// What scores and passes of attention do with a block of edges.
//
// All of it is inlined into a pass, so that this is compiled as a whole for a processor.
#pragma once

#include "attention_terms.h"

namespace pyg_sar::attention {

// keep[e, h] = 0 where dropped, else the factor of what isn't
template <class T>
PYG_SAR_SHARED void draw(const Terms<T>& t, const Buffers<T>& b, int64_t first, int64_t n) {
  if (t.drop_words > 0) {
    const int64_t last = t.num_edges - 1;
    for (int64_t e = 0; e < n; ++e) {
      __builtin_prefetch(t.drop_key + t.number(std::min(first + e + kBlock, last)) * t.drop_words);
      const int32_t* words = t.drop_key + t.number(first + e) * t.drop_words;
      for (int64_t h = 0; h < t.heads; ++h) {  // No branch on what is random.
        b.keep[e * t.heads + h] = static_cast<T>(static_cast<uint32_t>(words[h / 32]) >> (h % 32) & 1) * t.kept;
      }
    }
    return;
  }
  for (int64_t e = 0; e < n; ++e) {
    const uint32_t key = static_cast<uint32_t>(t.drop_key[t.number(first + e)]);
    for (int64_t h = 0; h < t.heads; ++h) b.hash[e * t.heads + h] = key + t.seed_low;
  }
  const uint32_t *hash = b.hash, *head = b.head, limit = t.threshold;
  T* keep = b.keep;
  const T kept = t.kept;
  PYG_SAR_LANES(n * t.heads, b.size,
                keep[k] = mixed(mixed(hash[k]) ^ head[o]) >= limit ? kept : T(0);)
}

// The row of an edge plus its edge term, in b.row.
template <class T>
PYG_SAR_INLINE Rows<T> with_edge(const Terms<T>& t, const Buffers<T>& b, const Rows<T>& rows,
                                 int64_t e, int64_t first) {
  add_edge_term(b.row, rows.at(e), t.attr(first + e), t.edge_weight, t.features, t.width());
  return {b.row, 0, rows.index, 1, 0, rows.heads, rows.channels, 0};
}

// The same, or the row itself where there are no edge terms; later rows are fetched.
template <class T>
PYG_SAR_HERE const T* key_of(const Terms<T>& t, const Buffers<T>& b, const Rows<T>& rows, int64_t e, int64_t first) {
  rows.ahead(e);
  return t.features > 0 ? with_edge(t, b, rows, e, first).at(0) : rows.at(e);
}

// out[e, h] = sum over c of att[h, c] * leaky(x + key[e])[h, c]
template <class T>
PYG_SAR_SHARED void gatv2_scores(const Terms<T>& t, const Buffers<T>& b, const T* x, const Rows<T>& rows,
                                 int64_t first) {
  const T *att = t.att, slope = t.slope;
  const auto key = [&](int64_t e) PYG_SAR_INLINED PYG_SAR_LEVEL { return key_of(t, b, rows, e, first); };
  sum_heads<1, T>({b.score}, rows, key, [&]<class V>(V* sum, const T* row, int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
    *sum += numbers<V>(att + f) * leaky_lanes<V>(numbers<V>(x + f) + numbers<V>(row + f), slope);
  });
}

// out[e, h] = <att[h], leaky(key[e, h])>
template <class T>
PYG_SAR_SHARED void nested_sums(const Terms<T>& t, const Buffers<T>& b, T* out, const Rows<T>& rows, int64_t first) {
  const T *att = t.att, slope = t.slope;
  const auto key = [&](int64_t e) PYG_SAR_INLINED PYG_SAR_LEVEL { return key_of(t, b, rows, e, first); };
  sum_heads<1, T>({out}, rows, key, [&]<class V>(V* sum, const T* row, int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
    *sum += numbers<V>(att + f) * leaky_lanes<V>(numbers<V>(row + f), slope);
  });
}

// b.fixed = <att, x> by head, for mixed scores
template <class T>
PYG_SAR_INLINE void fix_sum(const Terms<T>& t, const Buffers<T>& b, const T* att, const T* x) {
  for (int64_t h = 0; h < t.heads; ++h) {
    b.heads[h] = inner_product(att + h * t.channels, x + h * t.channels, t.channels);
  }
  fill_tile(b.fixed, static_cast<const T*>(b.heads), t.heads, b.size);
}

// Whether a score goes through a leaky ReLU at last.
template <class Score, class T>
PYG_SAR_INLINE bool leaks(const Terms<T>& t) {
  return Score::kLeaks && t.slope != T(1);
}

// b.inner = dL/dscore before the leaky ReLU, of that behind it
template <class Score, class T>
PYG_SAR_SHARED void through_leak(const Terms<T>& t, const Buffers<T>& b, int64_t count) {
  if (!leaks<Score>(t)) return;
  T* inner = b.inner;
  const T *before = b.score, slope = t.slope;
  PYG_SAR_LANES(count, kLanes, (void)o; const T down = slope * inner[k];
                inner[k] = before[k] > T(0) ? inner[k] : down;)
}

// sums[h] += s of all edges
template <class T>
PYG_SAR_SHARED void sum_edges(const Terms<T>& t, const Buffers<T>& b, T* sums, T* s,
                              int64_t count) {
  T* lanes = b.lanes;
  std::fill(s + count, s + padded(count), T(0));
  std::fill_n(lanes, b.size, T(0));
  PYG_SAR_LANES(count, b.size, lanes[o] += s[k];)
  add_lanes(sums, lanes, t.heads, b.size);
}

// out[h, c] += by[h] * x[h, c]
template <class T>
PYG_SAR_INLINE void add_by_head(const Terms<T>& t, T* out, const T* by, const T* x) {
  for (int64_t h = 0; h < t.heads; ++h) {
    add_scaled(out + h * t.channels, by[h], x + h * t.channels, t.channels);
  }
}

// out[e, h] += by * <attr[e], of[h]>, 'of' [heads, features] of each edge's target
template <class T>
PYG_SAR_SHARED void add_edge_products(const Terms<T>& t, T* out, T by, const T* of, int64_t e,
                                      int64_t first) {
  const T* attr = t.attr(first + e);
  for (int64_t h = 0; h < t.heads; ++h) {
    out[e * t.heads + h] += by * inner_product(attr, of + h * t.features, t.features);
  }
}

// acc[h, d] += sum over edges of w[e, h] * attr[e, d]
template <class T>
PYG_SAR_SHARED void sum_edge_attr(const Terms<T>& t, T* acc, const T* w, int64_t first, int64_t n) {
  for (int64_t e = 0; e < n; ++e) {
    const T* attr = t.attr(first + e);
    for (int64_t h = 0; h < t.heads; ++h) {
      add_scaled(acc + h * t.features, w[e * t.heads + h], attr, t.features);
    }
  }
}

// acc[h, c] += by * sum over d of summed[h, d] * edge_weight[d, h, c]
template <class T>
PYG_SAR_SHARED void add_edge_rows(const Terms<T>& t, T* acc, T by, const T* summed) {
  for (int64_t d = 0; d < t.features; ++d) {
    for (int64_t h = 0; h < t.heads; ++h) {
      const int64_t at = h * t.channels;
      add_scaled(acc + at, by * summed[h * t.features + d], t.edge_weight + d * t.width() + at,
                 t.channels);
    }
  }
}

// inner = keep * <grad_out, value>; weight = alpha * keep; inner = alpha * (inner - delta)
template <class T>
PYG_SAR_INLINE void score_gradients(const Buffers<T>& b, const T* alpha, const T* delta,
                                    bool by_lane, bool drops, int64_t count) {
  T *weight = b.weight, *inner = b.inner;
  const T* keep = b.keep;
  const int64_t length = by_lane ? b.size : kLanes;
  if (drops) {
    if (by_lane) {
      PYG_SAR_LANES(count, length, weight[k] = alpha[k] * keep[k];
                    inner[k] = alpha[k] * (keep[k] * inner[k] - delta[o]);)
    } else {
      PYG_SAR_LANES(count, length, (void)o; weight[k] = alpha[k] * keep[k];
                    inner[k] = alpha[k] * (keep[k] * inner[k] - delta[k]);)
    }
  } else if (by_lane) {
    PYG_SAR_LANES(count, length, weight[k] = alpha[k];
                  inner[k] = alpha[k] * (inner[k] - delta[o]);)
  } else {
    PYG_SAR_LANES(count, length, (void)o; weight[k] = alpha[k];
                  inner[k] = alpha[k] * (inner[k] - delta[k]);)
  }
}

// What scores are made of #######################################################

enum class Term { kNone, kInKey, kInKeyAndValue };

// What a score reads: see Score of pyg_sar/kernels/scores.py.
struct Shape {
  bool narrow_key, narrow_query, joined;
  int64_t att;
  Term term;
  bool by_source;
};

// Gradients to add to; null: not wanted.
template <class T>
struct Wanted {
  T* own;
  T* others;       // narrow rows at the edges' other ends (by source)
  T* att;
  T* edge_attr;    // of all edges: written
  T* edge_weight;
};

// The row of 'att' of own, and of the edges' other ends, where it has two: of keys, of queries.
template <bool kBySource, class T>
PYG_SAR_INLINE const T* att_of_own(const Terms<T>& t) {
  return kBySource ? t.att : t.att + t.width();
}

// The gradients of an edge's features and of their weight, of dL/d(edge term), [heads * channels].
template <class T>
PYG_SAR_SHARED void add_wide_term(const Terms<T>& t, const T* row, int64_t e, const Wanted<T>& to) {
  const T* attr = t.attr(e);
  const int64_t width = t.width();
  for (int64_t d = 0; d < t.features; ++d) {
    if (to.edge_attr != nullptr) {
      T* out = to.edge_attr + t.number(e) * t.features;
      out[d] = inner_product<T>(row, t.edge_weight + d * width, width);
    }
    if (to.edge_weight != nullptr) {
      add_scaled<T>(to.edge_weight + d * width, attr[d], row, width);
    }
  }
}

struct Plain {
  template <bool kBySource, class T>
  PYG_SAR_INLINE static void begin(const Terms<T>&, const Buffers<T>&, const T*) {}
  template <bool kBySource, class T>
  PYG_SAR_INLINE static void clear(const Terms<T>&, const Buffers<T>&) {}
  template <bool kBySource, class T>
  PYG_SAR_INLINE static void finish(const Terms<T>&, const Buffers<T>&, const T*,
                                    const Wanted<T>&) {}
};

}  // namespace pyg_sar::attention
