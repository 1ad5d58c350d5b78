// What the passes of attention do with a block of edges: scores, and gradients of scores.
//
// All of it is inlined into a pass, so that this is compiled as a whole for a processor.
#pragma once

#include "attention_terms.h"

namespace pyg_sar::attention {

// keep[e, h] = 0 where dropped, else the factor of what isn't
template <class T>
PYG_SAR_INLINE void draw(const Terms<T>& t, const Buffers<T>& b, int64_t first, int64_t n) {
  if (t.drop_words > 0) {
    for (int64_t e = 0; e < n; ++e) {
      const int32_t* words = t.drop_key + t.number(first + e) * t.drop_words;
      for (int64_t h = 0; h < t.heads; ++h) {
        const uint32_t word = static_cast<uint32_t>(words[h / 32]);
        b.keep[e * t.heads + h] = (word >> (h % 32) & 1) != 0 ? t.kept : T(0);
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

// b.fixed = <att, x> by head, for mixed scores
template <class T>
PYG_SAR_INLINE void fix_sum(const Terms<T>& t, const Buffers<T>& b, const T* att, const T* x) {
  for (int64_t h = 0; h < t.heads; ++h) {
    b.heads[h] = inner_product(att + h * t.channels, x + h * t.channels, t.channels);
  }
  fill_tile(b.fixed, static_cast<const T*>(b.heads), t.heads, b.size);
}

// score = what the kind's score function makes of a fixed row x and the rows of a block's edges,
// but for the leaky ReLU of all but gatv2, and the edge terms of dot. What x adds to a sum of
// scalars is in b.fixed (additive, mixed). 'att' is what the rows are multiplied by (mixed).
template <int64_t kKind, int64_t kChannels, class T>
PYG_SAR_INLINE void scores(const Terms<T>& t, const Buffers<T>& b, const T* x, const Rows<T>& rows,
                           int64_t first, const T* att = nullptr) {
  const int64_t n = rows.n, count = n * t.heads;
  if constexpr (kKind == kAdditive) {
    // b.score holds the rows.
    if (t.features > 0) {
      for (int64_t e = 0; e < n; ++e) {
        T* score = b.score + e * t.heads;
        const T* attr = t.attr(first + e);
        for (int64_t d = 0; d < t.features; ++d) {
          add_scaled(score, attr[d], t.edge_weight + d * t.heads, t.heads);
        }
      }
    }
    add_tile(b.score, b.fixed, count, b.size);
  } else if constexpr (kKind == kGatv2) {
    if (t.features == 0) {
      return gatv2_scores<kChannels, true>(b.score, x, rows, t.att, t.slope);
    }
    for (int64_t e = 0; e < n; ++e) {
      rows.ahead(e);
      gatv2_scores<kChannels, false>(b.score + e * t.heads, x, with_edge(t, b, rows, e, first),
                                     t.att, t.slope);
    }
  } else if constexpr (kKind == kMixed) {
    T *score = b.score, *sum = b.sum, *gate = b.gate;
    two_inner_products<kChannels>(gate, sum, x, att, rows);
    add_tile(sum, b.fixed, count, b.size);
    PYG_SAR_LANES(count, kLanes, (void)o; const T open = sigmoid(gate[k]); gate[k] = open;
                  score[k] = sum[k] * open;)
  } else {
    inner_products<kChannels, true>(b.score, x, rows);
    const T scale = t.scale;
    T* score = b.score;
    PYG_SAR_LANES(count, kLanes, (void)o; score[k] *= scale;)
  }
}

// Whether scores go through a leaky ReLU at last.
template <int64_t kKind, class T>
PYG_SAR_INLINE bool leaks(const Terms<T>& t) {
  return kKind != kGatv2 && (kKind != kDot || t.slope != T(1));
}

// Where exp() may overwrite the scores: beside them where their signs are asked for later.
template <int64_t kKind, class T>
PYG_SAR_INLINE T* leaked(const Terms<T>& t, const Buffers<T>& b, int64_t count) {
  if (!leaks<kKind>(t)) return b.score;
  leak(b.leaked, b.score, t.slope, count);
  return b.leaked;
}

// b.inner = dL/dscore before the leaky ReLU, of that behind it
template <int64_t kKind, class T>
PYG_SAR_INLINE void through_leak(const Terms<T>& t, const Buffers<T>& b, int64_t count) {
  if (!leaks<kKind>(t)) return;
  T* inner = b.inner;
  const T *before = b.score, slope = t.slope;
  PYG_SAR_LANES(count, kLanes, (void)o; const T down = slope * inner[k];
                inner[k] = before[k] > T(0) ? inner[k] : down;)
}

// mixed: b.inner = dL/d<query, key>, b.weight = dL/dsum of dL/d(sum * gate), which is in b.inner;
// b.heads += dL/dsum of all edges
template <class T>
PYG_SAR_INLINE void through_gate(const Terms<T>& t, const Buffers<T>& b, int64_t count) {
  T *inner = b.inner, *weight = b.weight, *lanes = b.lanes;
  const T *sum = b.sum, *gate = b.gate;
  PYG_SAR_LANES(count, kLanes, (void)o; const T by = inner[k] * gate[k]; weight[k] = by;
                inner[k] = by * sum[k] * (T(1) - gate[k]);)
  std::fill(weight + count, weight + padded(count), T(0));
  std::fill_n(lanes, b.size, T(0));
  PYG_SAR_LANES(count, b.size, lanes[o] += weight[k];)
  add_lanes(b.heads, lanes, t.heads, b.size);
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
PYG_SAR_INLINE void add_edge_products(const Terms<T>& t, T* out, T by, const T* of, int64_t e,
                                      int64_t first) {
  const T* attr = t.attr(first + e);
  for (int64_t h = 0; h < t.heads; ++h) {
    out[e * t.heads + h] += by * inner_product(attr, of + h * t.features, t.features);
  }
}

// acc[h, d] += sum over edges of w[e, h] * attr[e, d]
template <class T>
PYG_SAR_INLINE void sum_edge_attr(const Terms<T>& t, T* acc, const T* w, int64_t first, int64_t n) {
  for (int64_t e = 0; e < n; ++e) {
    const T* attr = t.attr(first + e);
    for (int64_t h = 0; h < t.heads; ++h) {
      add_scaled(acc + h * t.features, w[e * t.heads + h], attr, t.features);
    }
  }
}

// acc[h, c] += by * sum over d of summed[h, d] * edge_weight[d, h, c]
template <class T>
PYG_SAR_INLINE void add_edge_rows(const Terms<T>& t, T* acc, T by, const T* summed) {
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

}  // namespace pyg_sar::attention
