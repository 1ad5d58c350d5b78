// What the passes of attention over a shard's edges read, and their room for a block of edges.
#pragma once

#include "attention_arguments.h"
#include "attention_rows.h"
#include "segments.h"

#include <vector>

namespace pyg_sar::attention {

constexpr int64_t kBlock = 64;          // edges
constexpr int64_t kBlockBytes = 32768;  // of rows that are read twice

// A matrix whose rows lie in one piece each.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;

  PYG_SAR_INLINE T* row(int64_t i) const { return data == nullptr ? nullptr : data + i * stride; }
  Matrix columns_from(int64_t first) const { return {data == nullptr ? data : data + first, stride}; }
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
  int64_t drop_words;                // of which each edge has so many, a bit for each head that is
                                     // kept; 0: a number, of which a hash tells
  const int32_t* places;             // transposed: where keys and values lie; null: 0, 1, ...
  uint32_t seed_low, seed_high, threshold;
  T kept;                            // the factor of what isn't dropped
  int64_t num_segments, num_edges, chunks;
  int64_t distance;                  // how many edges ahead rows are fetched
  int64_t first_head = 0;            // of those that bits of drop_key tell of

  PYG_SAR_INLINE int64_t width() const { return heads * channels; }
  PYG_SAR_INLINE int64_t target(int64_t u) const { return targets == nullptr ? u : targets[u]; }
  PYG_SAR_INLINE int64_t place(int64_t j) const { return places == nullptr ? j : places[j]; }
  PYG_SAR_INLINE int64_t number(int64_t e) const {
    return edges_int != nullptr ? edges_int[e] : edges_long != nullptr ? edges_long[e] : e;
  }
  PYG_SAR_INLINE const T* attr(int64_t e) const { return edge_attr.row(number(e)); }
  int64_t first_segment(int64_t chunk) const {
    return first_of_run(offsets, num_segments, chunk, chunks);
  }
  // Of `count` heads from `first` on alone; scores that have a number per head.
  Terms of_heads(int64_t first, int64_t count) const {
    Terms some = *this;
    some.heads = count;
    some.first_head = first;
    some.value = value.columns_from(first * channels);
    some.key = key.columns_from(first);
    some.query = query.columns_from(first);
    return some;
  }
  int64_t block() const {
    const int64_t fit = kBlockBytes / (width() * static_cast<int64_t>(sizeof(T)) + 1);
    return std::clamp<int64_t>(fit / 4 * 4, 8, kBlock);
  }
  // Of n edges from e on.
  PYG_SAR_INLINE Rows<T> rows(const Matrix<const T>& of, int64_t e, int64_t n) const {
    return {of.data, of.stride, source + e, n, num_edges - e, heads, channels, distance};
  }
  // The same of rows of `each` numbers per head.
  PYG_SAR_INLINE Rows<T> narrow_rows(const Matrix<const T>& of, int64_t e, int64_t n,
                                     int64_t each) const {
    return {of.data, of.stride, source + e, n, num_edges - e, heads, each, 2 * kAheadMost};
  }
};

// Room for a block's scalars and for tiles, of one thread.
template <class T>
struct Buffers {
  std::vector<T> room;
  std::vector<uint32_t> hashes;
  int64_t size, used = 0;
  T *score, *leaked, *weight, *inner, *top, *total, *delta, *keep, *sum, *gate;
  T *fixed, *lanes, *tile_top, *tile_total, *tile_delta, *row, *row2, *row3;
  T *edges_of_weight, *edges_of_score, *heads;
  uint32_t *hash, *head;

  explicit Buffers(const Terms<T>& t) {
    const int64_t scalars = padded(kBlock * t.heads), tile = tile_length(t.heads);
    const int64_t width = padded(t.width()), edge = padded(t.heads * t.features);
    const int64_t per_head = padded(t.heads);
    room.resize(10 * scalars + 5 * tile + 3 * width + 2 * edge + per_head + kLanes);
    hashes.resize(scalars + tile + kLanes);
    size = tile;
    for (T** at : {&score, &leaked, &weight, &inner, &top, &total, &delta, &keep, &sum, &gate}) {
      *at = take(scalars);
    }
    heads = take(per_head);
    for (T** at : {&fixed, &lanes, &tile_top, &tile_total, &tile_delta}) *at = take(tile);
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

// What the backward passes know of each target.
template <class T>
struct Known {
  Matrix<const T> grad_out;
  Matrix<const T> packed;  // [N, 4 * heads]: maximum, normaliser, delta, query (additive)
  const T *query_edges, *grad_edges;  // dot: <query_i or grad_out_i, edge_weight_d> [N, H, D]
};

}  // namespace pyg_sar::attention
