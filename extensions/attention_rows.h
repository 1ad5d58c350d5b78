// Loops over the rows of a block of edges (see Rows), whose scalars lie as in attention_scalars.h.
#pragma once

#include "attention_scalars.h"
#include "weighted_rows.h"

namespace pyg_sar::attention {

constexpr int64_t kAheadBytes = 8192;  // of rows that are on their way: the latency of memory
constexpr int64_t kAheadMost = 64;     // edges

template <class T>
PYG_SAR_INLINE int64_t distance_of(int64_t width) {
  const int64_t fit = kAheadBytes / (width * static_cast<int64_t>(sizeof(T)) + 1);
  return fit < 4 ? 4 : fit < kAheadMost ? fit : kAheadMost;
}

// Calls a loop with a constant number of heads where rows are narrow: LOOP<heads, channels, ...>.
#define PYG_SAR_HEADS(LOOP, ARGUMENTS, kChannels, ...)                      \
  if constexpr (kChannels > 0 && kChannels <= 16) {                         \
    if (rows.heads == 1) return LOOP<1, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (rows.heads == 2) return LOOP<2, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (rows.heads == 4) return LOOP<4, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (rows.heads == 8) return LOOP<8, kChannels, __VA_ARGS__> ARGUMENTS;  \
  }                                                                         \
  return LOOP<0, kChannels, __VA_ARGS__> ARGUMENTS;

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
PYG_SAR_INLINE void copy_rows(T* out, const Rows<T>& rows) {
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
PYG_SAR_INLINE void split_rows(T* a, T* b, T* c, T* d, const Rows<T>& rows) {
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
PYG_SAR_INLINE void scatter(T* out, const T* s, const Rows<T>& rows) {
  PYG_SAR_SCALAR_HEADS(scatter_of, rows.heads, (out, s, rows))
}

// out[e, h] = <x[h], rows[e, h]>
template <int64_t kHeads, int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void inner_products_of(T* out, const T* x, const Rows<T>& rows) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  const int64_t channels = kChannels > 0 ? kChannels : rows.channels;
  for (int64_t e = 0; e < rows.n; ++e) {
    if constexpr (kFetch) rows.ahead(e, heads * channels);
    const T* row = rows.at(e);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = h * channels;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t f = first; f < first + channels; ++f) sum += x[f] * row[f];
      out[e * heads + h] = sum;
    }
  }
}

template <int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void inner_products(T* out, const T* x, const Rows<T>& rows) {
  PYG_SAR_HEADS(inner_products_of, (out, x, rows), kChannels, kFetch)
}

template <int64_t kHeads, int64_t kChannels, class T>
PYG_SAR_INLINE void two_inner_products_of(T* out_x, T* out_y, const T* x, const T* y,
                                          const Rows<T>& rows) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  const int64_t channels = kChannels > 0 ? kChannels : rows.channels;
  for (int64_t e = 0; e < rows.n; ++e) {
    rows.ahead(e, heads * channels);
    const T* row = rows.at(e);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = h * channels;
      T sum_x = 0, sum_y = 0;
#pragma omp simd reduction(+ : sum_x, sum_y)
      for (int64_t f = first; f < first + channels; ++f) {
        sum_x += x[f] * row[f];
        sum_y += y[f] * row[f];
      }
      out_x[e * heads + h] = sum_x;
      out_y[e * heads + h] = sum_y;
    }
  }
}

// out_x[e, h] = <x[h], rows[e, h]> and out_y[e, h] = <y[h], rows[e, h]>
template <int64_t kChannels, class T>
PYG_SAR_INLINE void two_inner_products(T* out_x, T* out_y, const T* x, const T* y,
                                       const Rows<T>& rows) {
  PYG_SAR_HEADS(two_inner_products_of, (out_x, out_y, x, y, rows), kChannels, T)
}

// out[e, h] = sum over c of att[h, c] * leaky(x + rows[e])[h, c]
template <int64_t kHeads, int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void gatv2_scores_of(T* out, const T* x, const Rows<T>& rows, const T* att,
                                    T slope) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  const int64_t channels = kChannels > 0 ? kChannels : rows.channels;
  for (int64_t e = 0; e < rows.n; ++e) {
    if constexpr (kFetch) rows.ahead(e, heads * channels);
    const T* row = rows.at(e);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t first = h * channels;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t f = first; f < first + channels; ++f) {
        sum += att[f] * leaky(x[f] + row[f], slope);
      }
      out[e * heads + h] = sum;
    }
  }
}

template <int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void gatv2_scores(T* out, const T* x, const Rows<T>& rows, const T* att, T slope) {
  PYG_SAR_HEADS(gatv2_scores_of, (out, x, rows, att, slope), kChannels, kFetch)
}

// d = ds[e] * leaky'(x + rows[e]): grad += d; with kAtt: grad_att += d * (x + rows[e])
template <int64_t kHeads, int64_t kChannels, bool kAtt, class T>
PYG_SAR_INLINE void gatv2_gradients_of(T* grad, T* grad_att, const T* ds, const T* x,
                                       const Rows<T>& rows, T slope) {
  const int64_t heads = kHeads > 0 ? kHeads : rows.heads;
  const int64_t channels = kChannels > 0 ? kChannels : rows.channels;
  int64_t e = 0;
  for (; e + 2 <= rows.n; e += 2) {
    const T *a = rows.at(e), *b = rows.at(e + 1);
    for (int64_t h = 0; h < heads; ++h) {
      const T up_a = ds[e * heads + h], up_b = ds[(e + 1) * heads + h];
      const T down_a = up_a * slope, down_b = up_b * slope;
      const int64_t first = h * channels;
#pragma omp simd
      for (int64_t f = first; f < first + channels; ++f) {
        const T z = x[f] + a[f], y = x[f] + b[f];
        const T p = z > T(0) ? up_a : down_a, q = y > T(0) ? up_b : down_b;
        grad[f] += p + q;
        if constexpr (kAtt) grad_att[f] += p * z + q * y;
      }
    }
  }
  for (; e < rows.n; ++e) {
    const T* a = rows.at(e);
    for (int64_t h = 0; h < heads; ++h) {
      const T up = ds[e * heads + h], down = up * slope;
      const int64_t first = h * channels;
#pragma omp simd
      for (int64_t f = first; f < first + channels; ++f) {
        const T z = x[f] + a[f];
        const T p = z > T(0) ? up : down;
        grad[f] += p;
        if constexpr (kAtt) grad_att[f] += p * z;
      }
    }
  }
}

template <int64_t kChannels, bool kAtt, class T>
PYG_SAR_INLINE void gatv2_gradients(T* grad, T* grad_att, const T* ds, const T* x,
                                    const Rows<T>& rows, T slope) {
  PYG_SAR_HEADS(gatv2_gradients_of, (grad, grad_att, ds, x, rows, slope), kChannels, kAtt)
}

// out = row + sum over d of attr[d] * weight[d, :]
template <class T>
PYG_SAR_INLINE void add_edge_term(T* out, const T* row, const T* attr, const T* weight,
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
