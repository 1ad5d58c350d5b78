// Loops over the rows of a block of edges (see Rows), whose scalars lie as in attention_scalars.h.
#pragma once

#include <array>
#include <utility>

#include "attention_scalars.h"
#include "vectors.h"
#include "weighted_rows.h"

namespace pyg_sar::attention {

constexpr int64_t kAheadBytes = 8192;  // of rows that are on their way: the latency of memory
constexpr int64_t kAheadMost = 64;     // edges

template <class T>
PYG_SAR_INLINE int64_t distance_of(int64_t width) {
  const int64_t fit = kAheadBytes / (width * static_cast<int64_t>(sizeof(T)) + 1);
  return fit < 4 ? 4 : fit < kAheadMost ? fit : kAheadMost;
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void copy_rows_of(T* out, const Rows<T>& rows) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  for (int64_t e = 0; e < rows.n; ++e) {
    rows.ahead(e);
    const T* row = rows.at(e);
    if constexpr (kHeads > 0) {
      std::memcpy(out + e * kHeads, row, kHeads * sizeof(T));
    } else {
      for (int64_t h = 0; h < heads; ++h) out[e * heads + h] = row[h];
    }
  }
}

// out[e, :] = rows[e, :], one scalar per head
template <class T>
PYG_SAR_SHARED void copy_rows(T* out, const Rows<T>& rows) {
  PYG_SAR_SCALAR_HEADS(copy_rows_of, rows.heads, (out, rows))
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void split_rows_of(T* a, T* b, T* c, T* d, const Rows<T>& rows) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  for (int64_t e = 0; e < rows.n; ++e) {
    rows.ahead(e, 4 * heads);
    const T* row = rows.at(e);
    const int64_t at = e * heads;
    if constexpr (kHeads > 0) {
      constexpr size_t kBytes = kHeads * sizeof(T);
      std::memcpy(a + at, row, kBytes);
      std::memcpy(b + at, row + kHeads, kBytes);
      std::memcpy(c + at, row + 2 * kHeads, kBytes);
      std::memcpy(d + at, row + 3 * kHeads, kBytes);
      continue;
    }
    for (int64_t h = 0; h < heads; ++h) a[at + h] = row[h];
    for (int64_t h = 0; h < heads; ++h) b[at + h] = row[heads + h];
    for (int64_t h = 0; h < heads; ++h) c[at + h] = row[2 * heads + h];
    for (int64_t h = 0; h < heads; ++h) d[at + h] = row[3 * heads + h];
  }
}

// a, b, c, d [e, :] = the four parts of rows[e, :], each of one scalar per head
template <class T>
PYG_SAR_SHARED void split_rows(T* a, T* b, T* c, T* d, const Rows<T>& rows) {
  PYG_SAR_SCALAR_HEADS(split_rows_of, rows.heads, (a, b, c, d, rows))
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void scatter_of(T* out, const T* s, const Rows<T>& rows) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  for (int64_t e = 0; e < rows.n; ++e) {
    if (e + kAheadMost < rows.left) {
      __builtin_prefetch(out + static_cast<int64_t>(rows.index[e + kAheadMost]) * heads, 1);
    }
    T* row = out + static_cast<int64_t>(rows.index[e]) * heads;
    for (int64_t h = 0; h < heads; ++h) row[h] += s[e * heads + h];
  }
}

// out[i, :] += s[e, :] for the row i that each edge names, one scalar per head
template <class T>
PYG_SAR_SHARED void scatter(T* out, const T* s, const Rows<T>& rows) {
  PYG_SAR_SCALAR_HEADS(scatter_of, rows.heads, (out, s, rows))
}

// Sums over the channels of a head #############################################

// A register of the processor that the file is compiled for.
template <class T>
constexpr int kWide = PYG_SAR_REGISTER / sizeof(T);

// The lanes of two registers with kBit of their number exchanged for that of the register: of x, or of y (kUpper).
template <int kBit, bool kUpper, class V, int... lane>
PYG_SAR_HERE V exchanged(const V& x, const V& y, std::integer_sequence<int, lane...>) {
  constexpr int kLanes = sizeof...(lane);
  return __builtin_shufflevector(
      x, y, ((lane & kBit) != 0 ? kLanes : 0) + (((lane & kBit) != 0) == kUpper ? lane : lane ^ kBit)...);
}

// x[i][l] = x[l][i]
template <class T, int kLanes, int kBit = kLanes / 2>
PYG_SAR_HERE void transpose(Vector<T, kLanes>* x) {
  if constexpr (kBit > 0) {
    constexpr auto kAll = std::make_integer_sequence<int, kLanes>{};
    PYG_SAR_UNROLLED
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kBit) != 0) continue;
      const Vector<T, kLanes> lower = x[i], upper = x[i + kBit];
      x[i] = exchanged<kBit, false>(lower, upper, kAll);
      x[i + kBit] = exchanged<kBit, true>(lower, upper, kAll);
    }
    transpose<T, kLanes, kBit / 2>(x);
  }
}

// out[i] = the sum of the lanes of x[i], one after the other, of up to as many registers as one has lanes
template <class T, int kLanes>
PYG_SAR_SHARED void sum_lanes(T* out, Vector<T, kLanes>* x, int count) {
  if (count == 1) {
    T lanes[kLanes], sum = 0;
    std::memcpy(lanes, x, sizeof(lanes));
    for (int l = 0; l < kLanes; ++l) sum += lanes[l];
    *out = sum;
    return;
  }
  for (int i = count; i < kLanes; ++i) x[i] = Vector<T, kLanes>{};
  transpose<T, kLanes>(x);
  Vector<T, kLanes> sums{};
  PYG_SAR_UNROLLED
  for (int i = 0; i < kLanes; ++i) sums += x[i];
  if (count == kLanes) {
    std::memcpy(out, &sums, sizeof(sums));
    return;
  }
  T lanes[kLanes];
  std::memcpy(lanes, &sums, sizeof(sums));
  for (int i = 0; i < count; ++i) out[i] = lanes[i];
}

// out[k][e, h] = sum over the channels f of a head of what add(sums, row, f) adds to sums[k]: of as many columns
// as they have lanes. row_of(e) is the row of an edge.
template <int kLanes, int kSums, class T, class RowOf, class Add>
PYG_SAR_HERE void sum_heads_by(std::array<T*, kSums> out, const Rows<T>& rows, const RowOf& row_of, const Add& add) {
  using V = Vector<T, kLanes>;
  V sums[kSums][kLanes];
  int count = 0;
  for (int64_t e = 0; e < rows.n; ++e) {
    const T* row = row_of(e);
    for (int64_t h = 0, f = 0; h < rows.heads; ++h) {
      const int64_t end = f + rows.channels;
      if (rows.channels < kLanes) {
        T sum[kSums] = {};
        for (; f < end; ++f) add(sum, row, f);
        for (int k = 0; k < kSums; ++k) *out[k]++ = sum[k];
        continue;
      }
      V sum[kSums] = {};
      for (; f + kLanes <= end; f += kLanes) add(sum, row, f);
      if (f < end) {  // what is left goes to the first lane, a number at a time
        T first[kSums];
        for (int k = 0; k < kSums; ++k) first[k] = sum[k][0];
        for (; f < end; ++f) add(first, row, f);
        for (int k = 0; k < kSums; ++k) sum[k][0] = first[k];
      }
      for (int k = 0; k < kSums; ++k) sums[k][count] = sum[k];
      if (++count < kLanes) continue;
      for (int k = 0; k < kSums; ++k) sum_lanes<T, kLanes>(out[k], sums[k], kLanes);
      for (int k = 0; k < kSums; ++k) out[k] += kLanes;
      count = 0;
    }
  }
  for (int k = 0; k < kSums && count > 0; ++k) sum_lanes<T, kLanes>(out[k], sums[k], count);
}

template <int kSums, class T, class RowOf, class Add>
PYG_SAR_HERE void sum_heads(std::array<T*, kSums> out, const Rows<T>& rows, const RowOf& row_of, const Add& add) {
  if constexpr (kWide<T> == 16) {
    if (rows.channels == 8) return sum_heads_by<8, kSums>(out, rows, row_of, add);
  }
  sum_heads_by<kWide<T>, kSums>(out, rows, row_of, add);
}

// As many numbers as x has lanes, or one.
template <class V, class T>
PYG_SAR_HERE V numbers(const T* from) {
  V x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class V, class T>
PYG_SAR_HERE V leaky_lanes(V x, T slope) {
  const V y = slope * x;
  return x > T(0) ? x : y;
}

// out[e, h] = <x[h], rows[e, h]>
template <class T>
PYG_SAR_SHARED void inner_products(T* out, const T* x, const Rows<T>& rows) {
  const auto row_of = [&](int64_t e) PYG_SAR_INLINED PYG_SAR_LEVEL { return rows.fetched(e); };
  sum_heads<1, T>({out}, rows, row_of, [&]<class V>(V* sum, const T* row, int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
    *sum += numbers<V>(x + f) * numbers<V>(row + f);
  });
}

// out_x[e, h] = <x[h], rows[e, h]> and out_y[e, h] = <y[h], rows[e, h]>
template <class T>
PYG_SAR_SHARED void two_inner_products(T* out_x, T* out_y, const T* x, const T* y, const Rows<T>& rows) {
  const auto row_of = [&](int64_t e) PYG_SAR_INLINED PYG_SAR_LEVEL { return rows.fetched(e); };
  sum_heads<2, T>({out_x, out_y}, rows, row_of,
                  [&]<class V>(V* sums, const T* row, int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
                    const V z = numbers<V>(row + f);
                    sums[0] += numbers<V>(x + f) * z;
                    sums[1] += numbers<V>(y + f) * z;
                  });
}

// Calls body<V>(f) for the columns [f, end): by registers, then by half as many lanes, at last one by one.
template <class T, int kLanes, class Body>
PYG_SAR_HERE void for_columns(int64_t f, int64_t end, const Body& body) {
  for (; f + kLanes <= end; f += kLanes) body.template operator()<Vector<T, kLanes>>(f);
  if constexpr (kLanes * sizeof(T) > 16) return for_columns<T, kLanes / 2>(f, end, body);
  for (; f < end; ++f) body.template operator()<T>(f);
}

// to[f] += x, of as many numbers as x has
template <class V, class T>
PYG_SAR_HERE void add_numbers(T* to, const V& x) {
  const V sum = numbers<V>(to) + x;
  std::memcpy(to, &sum, sizeof(sum));
}

// d = ds[e] * leaky'(x + rows[e]): grad += d; with kAtt: grad_att += d * (x + rows[e])
template <bool kAtt, class T>
PYG_SAR_SHARED void gatv2_gradients(T* grad, T* grad_att, const T* ds, const T* x, const Rows<T>& rows, T slope) {
  const int64_t heads = rows.heads, channels = rows.channels;
  int64_t e = 0;
  for (; e + 2 <= rows.n; e += 2) {
    const T *a = rows.at(e), *b = rows.at(e + 1);
    for (int64_t h = 0; h < heads; ++h) {
      const T up_a = ds[e * heads + h], up_b = ds[(e + 1) * heads + h];
      const T down_a = up_a * slope, down_b = up_b * slope;
      const auto add = [&]<class V>(int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
        const V z = numbers<V>(x + f) + numbers<V>(a + f), y = numbers<V>(x + f) + numbers<V>(b + f);
        const V p = z > T(0) ? up_a - V{} : down_a - V{}, q = y > T(0) ? up_b - V{} : down_b - V{};
        add_numbers<V>(grad + f, p + q);
        if constexpr (kAtt) add_numbers<V>(grad_att + f, p * z + q * y);
      };
      for_columns<T, kWide<T>>(h * channels, (h + 1) * channels, add);
    }
  }
  if (e == rows.n) return;
  const T* a = rows.at(e);
  for (int64_t h = 0; h < heads; ++h) {
    const T up = ds[e * heads + h], down = up * slope;
    const auto add = [&]<class V>(int64_t f) PYG_SAR_INLINED PYG_SAR_LEVEL {
      const V z = numbers<V>(x + f) + numbers<V>(a + f), p = z > T(0) ? up - V{} : down - V{};
      add_numbers<V>(grad + f, p);
      if constexpr (kAtt) add_numbers<V>(grad_att + f, p * z);
    };
    for_columns<T, kWide<T>>(h * channels, (h + 1) * channels, add);
  }
}

// out = row + sum over d of attr[d] * weight[d, :]
template <class T>
PYG_SAR_SHARED void add_edge_term(T* out, const T* row, const T* attr, const T* weight,
                                  int64_t features, int64_t width) {
#pragma omp simd
  for (int64_t f = 0; f < width; ++f) out[f] = row[f];
  for (int64_t d = 0; d < features; ++d) {
    const T a = attr[d];
#pragma omp simd
    for (int64_t f = 0; f < width; ++f) out[f] += a * weight[d * width + f];
  }
}

template <class T>
PYG_SAR_INLINE void add_scaled(T* out, T by, const T* x, int64_t width) {
#pragma omp simd
  for (int64_t f = 0; f < width; ++f) out[f] += by * x[f];
}

template <class T>
PYG_SAR_INLINE T inner_product(const T* x, const T* y, int64_t width) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t f = 0; f < width; ++f) sum += x[f] * y[f];
  return sum;
}

}  // namespace pyg_sar::attention
