// The three passes of attention over a shard's edges; see attention.cpp for what they compute.
//
// A pass is an object that is called with the number of a chunk of segments. Everything that it calls
// in a loop over edges is inlined into it, so that it is compiled as a whole for a processor.
#pragma once

#include "attention_loops.h"

#include <vector>

namespace pyg_sar::attention {

enum Kind : int64_t { kAdditive = 0, kGatv2 = 1, kDot = 2, kMixed = 3 };

constexpr int64_t kBlock = 64;            // edges
constexpr int64_t kBlockBytes = 32768;    // of rows that are read twice

// A matrix whose rows lie in one piece each.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;

  PYG_SAR_INLINE T* row(int64_t i) const { return data == nullptr ? nullptr : data + i * stride; }
};

// What all passes read.
template <class T>
struct Terms {
  int64_t heads, channels, features;
  Matrix<const T> value, key, query, edge_attr;
  const T *att, *edge_weight;  // 'att' of mixed scores: of keys, then of queries
  T slope, scale;
  const int32_t* source;
  const int64_t *offsets, *targets;  // 'targets' may be null: 0, 1, ...
  const int32_t* edges_int;          // each edge's number; both null: 0, 1, ...
  const int64_t* edges_long;
  const int32_t* drop_key;           // null: no dropout
  const int32_t* places;             // transposed: where keys and values lie; null: 0, 1, ...
  uint32_t seed_low, seed_high, threshold;
  T kept;                            // the factor of what isn't dropped
  int64_t num_segments, num_edges, chunks;
  int64_t distance;                  // how many edges ahead rows are fetched

  PYG_SAR_INLINE int64_t width() const { return heads * channels; }
  PYG_SAR_INLINE int64_t target(int64_t u) const { return targets == nullptr ? u : targets[u]; }
  PYG_SAR_INLINE int64_t place(int64_t j) const { return places == nullptr ? j : places[j]; }
  PYG_SAR_INLINE int64_t number(int64_t e) const {
    return edges_int != nullptr ? edges_int[e] : edges_long != nullptr ? edges_long[e] : e;
  }
  PYG_SAR_INLINE const T* attr(int64_t e) const { return edge_attr.row(number(e)); }
  // The first segment of a chunk. A segment counts like an edge: there may be many without one.
  int64_t first_segment(int64_t chunk) const {
    const int64_t total = num_edges + num_segments;
    const int64_t place = static_cast<int64_t>(static_cast<double>(total) * chunk / chunks);
    int64_t low = 0, high = num_segments;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (offsets[middle] + middle < place) ? low = middle + 1 : high = middle;
    }
    return chunk == chunks ? num_segments : low;
  }
  int64_t block() const {
    const int64_t fit = kBlockBytes / (width() * static_cast<int64_t>(sizeof(T)) + 1);
    return std::clamp<int64_t>(fit / 4 * 4, 8, kBlock);
  }
  PYG_SAR_INLINE Rows<T> rows(const Matrix<const T>& of, int64_t e) const {
    return {of.data, of.stride, width(), source + e, num_edges - e, distance};
  }
};

// Room for a block's scalars and for tiles, of one thread.
template <class T>
struct Buffers {
  std::vector<T> room;
  std::vector<uint32_t> hashes;
  int64_t size, used = 0;
  T *score, *leaked, *weight, *inner, *top, *inverse, *delta, *keep, *sum, *gate;
  T *fixed, *lanes, *tile_top, *tile_inverse, *tile_delta, *row, *row2, *row3;
  T *edges_of_weight, *edges_of_score, *heads;
  uint32_t *hash, *head;

  explicit Buffers(const Terms<T>& t) {
    const int64_t scalars = padded(kBlock * t.heads), tile = tile_length(t.heads);
    const int64_t width = padded(t.width()), edge = padded(t.heads * t.features);
    const int64_t per_head = padded(t.heads);
    room.resize(10 * scalars + 5 * tile + 3 * width + 2 * edge + per_head + kLanes);
    hashes.resize(scalars + tile + kLanes);
    size = tile;
    for (T** at : {&score, &leaked, &weight, &inner, &top, &inverse, &delta, &keep, &sum, &gate}) {
      *at = take(scalars);
    }
    heads = take(per_head);
    for (T** at : {&fixed, &lanes, &tile_top, &tile_inverse, &tile_delta}) *at = take(tile);
    for (T** at : {&row, &row2, &row3}) *at = take(width);
    for (T** at : {&edges_of_weight, &edges_of_score}) *at = take(edge);
    hash = aligned(hashes.data());
    head = hash + scalars;
    for (int64_t l = 0; l < tile; ++l) {
      head[l] = t.seed_high + static_cast<uint32_t>(l % t.heads) * 0x9E3779B9u;
    }
  }

 private:
  template <class V>
  static V* aligned(V* at) {
    return reinterpret_cast<V*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
  }
  T* take(int64_t count) {
    T* at = aligned(room.data()) + used;
    used += count;
    return at;
  }
};

// keep[e, h] = 0 where dropped, else the factor of what isn't
template <class T>
PYG_SAR_INLINE void draw(const Terms<T>& t, const Buffers<T>& b, int64_t first, int64_t n) {
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
  return {b.row, 0, t.width(), rows.index, 0, 0};
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
                           int64_t first, int64_t n, const T* att = nullptr) {
  const int64_t count = n * t.heads;
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
      return gatv2_scores<kChannels, true>(b.score, x, rows, t.att, t.slope, n, t.heads,
                                           t.channels);
    }
    for (int64_t e = 0; e < n; ++e) {
      rows.ahead(e);
      gatv2_scores<kChannels, false>(b.score + e * t.heads, x, with_edge(t, b, rows, e, first),
                                     t.att, t.slope, 1, t.heads, t.channels);
    }
  } else if constexpr (kKind == kMixed) {
    T *score = b.score, *sum = b.sum, *gate = b.gate;
    two_inner_products<kChannels>(gate, sum, x, att, rows, n, t.heads, t.channels);
    add_tile(sum, b.fixed, count, b.size);
    PYG_SAR_LANES(count, kLanes, (void)o; const T open = sigmoid(gate[k]); gate[k] = open;
                  score[k] = sum[k] * open;)
  } else {
    inner_products<kChannels, true>(b.score, x, rows, n, t.heads, t.channels);
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

// Forward: acc, maximum and normaliser of each target.
template <class Number, int64_t kKind, int64_t kChannels>
struct Forward {
  using T = Number;
  static constexpr int64_t kKindOf = kKind;
  Terms<T> t;
  T *acc, *maximum, *normaliser;
  const T* query_edges;  // dot: <query_i, edge_weight_d> [N, heads, features]

  PYG_SAR_INLINE void operator()(int64_t chunk) const {
    Buffers<T> b(t);
    const int64_t step = kKind == kAdditive ? kBlock : t.block();
    const int64_t end = t.first_segment(chunk + 1);
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      const int64_t start = t.offsets[u], stop = t.offsets[u + 1];
      if (start == stop) continue;
      const int64_t i = t.target(u);
      if constexpr (kKind == kAdditive) fill_tile(b.fixed, t.query.row(i), t.heads, b.size);
      if constexpr (kKind == kMixed) fix_sum(t, b, t.att + t.width(), t.query.row(i));
      if constexpr (kKind == kDot) std::fill_n(b.edges_of_weight, t.heads * t.features, T(0));
      for (int64_t e = start; e < stop; e += step) add(b, i, e, std::min(step, stop - e));
      if constexpr (kKind == kDot) {
        if (t.features > 0) add_edge_rows(t, acc + i * t.width(), T(1), b.edges_of_weight);
      }
    }
  }

  PYG_SAR_INLINE void add(const Buffers<T>& b, int64_t i, int64_t first, int64_t n) const {
    const int64_t count = n * t.heads, end = padded(count);
    T* out = acc + i * t.width();
    Rows<T> keys = t.rows(t.key, first);
    if constexpr (kKind == kAdditive) {
      keys.width = t.heads;
      keys.distance = 2 * kAheadMost;
    }
    if constexpr (kKind == kAdditive) copy_rows(b.score, keys, n, t.heads);
    scores<kKind, kChannels>(t, b, t.query.row(i), keys, first, n, t.att);
    if constexpr (kKind == kDot) {
      if (t.features > 0) {
        const T* own = query_edges + i * t.heads * t.features;
        for (int64_t e = 0; e < n; ++e) add_edge_products(t, b.score, t.scale, own, e, first);
      }
    }
    if (leaks<kKind>(t)) leak(b.score, b.score, t.slope, count);
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
    accumulate<true>(out, b.score, t.rows(t.value, first), n, t.heads, t.channels);
    if constexpr (kKind == kDot) {
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
      if constexpr (kKind == kDot) {
        for (int64_t d = 0; d < t.features; ++d) b.edges_of_weight[h * t.features + d] *= factor;
      }
    }
  }
};

// What the backward passes know of each target.
template <class T>
struct Known {
  Matrix<const T> grad_out;
  const T* packed;  // [N, 4 * heads]: maximum, 1 / normaliser, delta, query (additive)
  const T *query_edges, *grad_edges;  // dot: <query_i or grad_out_i, edge_weight_d> [N, H, D]
};

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

// Backward by source row, over the transposed shard.
template <class Number, int64_t kKind, int64_t kChannels>
struct Sources {
  using T = Number;
  static constexpr int64_t kKindOf = kKind;
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
    const Rows<T> grads = t.rows(known.grad_out, first), queries = t.rows(t.query, first);
    Rows<T> packed = t.rows({known.packed, 4 * t.heads}, first);
    packed.distance = 2 * kAheadMost;
    T* last = kKind == kAdditive ? b.score : b.keep;
    split_rows(b.top, b.inverse, b.delta, last, packed, n, t.heads);
    if constexpr (kKind == kAdditive) {
      scores<kKind, kChannels>(t, b, static_cast<const T*>(nullptr), packed, first, n);
    } else {
      const T* att = kKind == kMixed ? t.att + t.width() : nullptr;
      scores<kKind, kChannels>(t, b, t.key.row(t.place(j)), queries, first, n, att);
    }
    const T* value = t.value.row(t.place(j));
    inner_products<kChannels, true>(b.inner, value, grads, n, t.heads, t.channels);
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
      accumulate<false>(grad_value.row(j), b.weight, grads, n, t.heads, t.channels);
    }
    if constexpr (kKind == kAdditive) {
      add_additive(b, chunk, j, first, n);
    } else if (grad_key.data != nullptr) {
      add_key(b, j, queries, first, n);
    }
  }

  // b.inner: dL/dscore; b.score: before the leaky ReLU
  PYG_SAR_INLINE void add_additive(const Buffers<T>& b, int64_t chunk, int64_t j, int64_t first,
                                   int64_t n) const {
    const int64_t count = n * t.heads;
    T *inner = b.inner, *lanes = b.lanes;
    through_leak<kKind>(t, b, count);
    std::fill(inner + count, inner + padded(count), T(0));
    if (grad_key.data != nullptr) {
      std::fill_n(lanes, b.size, T(0));
      PYG_SAR_LANES(count, b.size, lanes[o] += inner[k];)
      add_lanes(grad_key.row(j), lanes, t.heads, b.size);
    }
    if (!grad_query.empty()) {
      scatter(grad_query[chunk], inner, t.source + first, n, t.num_edges - first, t.heads);
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
                              int64_t first, int64_t n) const {
    if constexpr (kKind == kDot) {
      T* inner = b.inner;
      const T scale = t.scale;
      through_leak<kKind>(t, b, n * t.heads);
      PYG_SAR_LANES(n * t.heads, kLanes, (void)o; inner[k] *= scale;)
      accumulate<false>(grad_key.row(j), b.inner, queries, n, t.heads, t.channels);
    } else if constexpr (kKind == kMixed) {
      through_leak<kKind>(t, b, n * t.heads);
      through_gate(t, b, n * t.heads);
      accumulate<false>(grad_key.row(j), b.inner, queries, n, t.heads, t.channels);
    } else {
      T* none = nullptr;
      const T* key = t.key.row(t.place(j));
      if (t.features == 0) {
        return gatv2_gradients<kChannels, false>(b.row2, none, b.inner, key, queries, t.slope, n,
                                                 t.heads, t.channels);
      }
      for (int64_t e = 0; e < n; ++e) {
        gatv2_gradients<kChannels, false>(b.row2, none, b.inner + e * t.heads, key,
                                          with_edge(t, b, queries, e, first), t.slope, 1, t.heads,
                                          t.channels);
      }
    }
  }
};

// Backward by target: all but additive.
template <class Number, int64_t kKind, int64_t kChannels>
struct Targets {
  using T = Number;
  static constexpr int64_t kKindOf = kKind;
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
    const Rows<T> keys = t.rows(t.key, first), values = t.rows(t.value, first);
    scores<kKind, kChannels>(t, b, t.query.row(i), keys, first, n, t.att);
    inner_products<kChannels, true>(b.inner, known.grad_out.row(i), values, n, t.heads, t.channels);
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
      accumulate<false>(b.row2, b.inner, keys, n, t.heads, t.channels);
      if (!grad_att.empty()) {
        accumulate<false>(b.row3, b.weight, keys, n, t.heads, t.channels);
      }
    } else if constexpr (kKind == kDot) {
      T* inner = b.inner;
      const T scale = t.scale;
      PYG_SAR_LANES(count, kLanes, (void)o; inner[k] *= scale;)
      if (grad_query != nullptr) {
        accumulate<false>(grad_query + i * t.width(), b.inner, keys, n, t.heads,
                                     t.channels);
      }
      if (t.features > 0) add_edges(b, i, first, n);
    } else {
      if (t.features == 0) return add_gatv2(b, i, b.inner, keys, n);
      for (int64_t e = 0; e < n; ++e) {
        const T* ds = b.inner + e * t.heads;
        add_gatv2(b, i, ds, with_edge(t, b, keys, e, first), 1);
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

  PYG_SAR_INLINE void add_gatv2(const Buffers<T>& b, int64_t i, const T* ds, const Rows<T>& rows,
                                int64_t n) const {
    const T* query = t.query.row(i);
    if (grad_att.empty()) {
      gatv2_gradients<kChannels, false>(b.row2, b.row3, ds, query, rows, t.slope, n, t.heads,
                                        t.channels);
    } else {
      gatv2_gradients<kChannels, true>(b.row2, b.row3, ds, query, rows, t.slope, n, t.heads,
                                       t.channels);
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

}  // namespace pyg_sar::attention
