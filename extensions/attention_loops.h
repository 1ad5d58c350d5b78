// Loops over a block of edges of one segment (a target's in-edges, or a source row's out-edges).
//
// Per-edge scalars of a block lie edge by edge, head by head: [edges, heads], padded to whole lanes.
// What depends on the head alone is repeated over a "tile" of lanes whose length is a multiple of
// both the number of heads and that of the lanes, so that loops over scalars are flat.
#pragma once

#include "segments.h"
#include "weighted_rows.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>

namespace pyg_sar::attention {

constexpr int64_t kLanes = 16;
constexpr int64_t kAheadBytes = 8192;  // of rows that are on their way: the latency of memory
constexpr int64_t kAheadMost = 64;     // edges
constexpr int64_t kFetchedBytes = 4096;  // of a row; the processor follows a longer one by itself

PYG_SAR_INLINE int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }
PYG_SAR_INLINE int64_t tile_length(int64_t heads) { return std::lcm(heads, kLanes); }

// exp, within an ulp or two; 0 below the smallest normal number; NaN stays NaN. After Cephes
// (S. Moshier): 2^n e^r with |r| <= log(2) / 2, n read from the last bits of a large sum.
PYG_SAR_INLINE float exponential(float x) {
  constexpr float kLow = -87.0f, kHigh = 88.0f, kShift = 12582912.0f;
  float y = x < kLow ? kLow : x;
  y = y > kHigh ? kHigh : y;
  const float shifted = y * 1.44269504088896341f + kShift;
  const float n = shifted - kShift;
  float r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 127u) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(bits));
  return x < kLow ? 0.0f : p * power;
}

PYG_SAR_INLINE double exponential(double x) {
  constexpr double kLow = -708.0, kHigh = 709.0, kShift = 6755399441055744.0;
  double y = x < kLow ? kLow : x;
  y = y > kHigh ? kHigh : y;
  const double shifted = y * 1.4426950408889634074 + kShift;
  const double n = shifted - kShift;
  double r = y - n * 6.93145751953125e-1;
  r = r - n * 1.42860682030941723212e-6;
  const double rr = r * r;
  const double p =
      r * ((1.26177193074810590878e-4 * rr + 3.02994407707441961300e-2) * rr + 1.0);
  const double q =
      ((3.00198505138664455042e-6 * rr + 2.52448340349684104192e-3) * rr +
       2.27265548208155028766e-1) * rr + 2.0;
  const double e = 1.0 + 2.0 * p / (q - p);
  uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits + 1023u) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof(bits));
  return x < kLow ? 0.0 : e * power;
}

// lowbias32, a bijection of 32 bits (C. Wellons, "Prospecting for hash functions", 2018).
PYG_SAR_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 1 / (1 + exp(-x)), within a few ulps; 0 where exp(-x) has no finite value; NaN stays NaN.
template <class T>
PYG_SAR_INLINE T sigmoid(T x) {
  constexpr T kLow = sizeof(T) == 4 ? T(-87) : T(-708);
  const T y = T(1) / (T(1) + exponential(-x));
  return x < kLow ? T(0) : y;
}

template <class T>
PYG_SAR_INLINE T leaky(T x, T slope) {
  const T y = slope * x;
  return x > T(0) ? x : y;
}

// Loops over scalars #########################################################

// Calls a loop over scalars with a constant number of heads: LOOP<heads>.
#define PYG_SAR_SCALAR_HEADS(LOOP, ARGUMENTS)  \
  switch (heads) {                             \
    case 1: return LOOP<1> ARGUMENTS;          \
    case 2: return LOOP<2> ARGUMENTS;          \
    case 4: return LOOP<4> ARGUMENTS;          \
    case 8: return LOOP<8> ARGUMENTS;          \
    default: return LOOP<0> ARGUMENTS;         \
  }

template <int64_t kHeads, class T>
PYG_SAR_INLINE void fill_tile_of(T* tile, const T* of, int64_t given, int64_t some) {
  const int64_t heads = kHeads > 0 ? kHeads : given, length = kHeads > 0 ? kLanes : some;
  for (int64_t l = 0; l < length; l += heads) {
    for (int64_t h = 0; h < heads; ++h) tile[l + h] = of == nullptr ? T(0) : of[h];
  }
}

// tile[l] = of[l % heads]; zeros without 'of'
template <class T>
PYG_SAR_INLINE void fill_tile(T* tile, const T* of, int64_t heads, int64_t length) {
  PYG_SAR_SCALAR_HEADS(fill_tile_of, (tile, of, heads, length))
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void add_lanes_of(T* sums, const T* lanes, int64_t given, int64_t some) {
  const int64_t heads = kHeads > 0 ? kHeads : given, length = kHeads > 0 ? kLanes : some;
  for (int64_t l = 0; l < length; l += heads) {
    for (int64_t h = 0; h < heads; ++h) sums[h] += lanes[l + h];
  }
}

// sums[h] += lanes of head h
template <class T>
PYG_SAR_INLINE void add_lanes(T* sums, const T* lanes, int64_t heads, int64_t length) {
  PYG_SAR_SCALAR_HEADS(add_lanes_of, (sums, lanes, heads, length))
}

// Walks through flat scalars and the tile together: BODY sees 'k' (a scalar) and 'o' (its lane).
#define PYG_SAR_LANES(count, length, ...)                                    \
  for (int64_t k0 = 0, o0 = 0; k0 < (count); k0 += kLanes) {                \
    _Pragma("omp simd") for (int64_t l = 0; l < kLanes; ++l) {              \
      const int64_t k = k0 + l, o = o0 + l;                                 \
      __VA_ARGS__                                                            \
    }                                                                       \
    o0 = o0 + kLanes == (length) ? 0 : o0 + kLanes;                         \
  }

template <class T>
PYG_SAR_INLINE void add_tile(T* s, const T* tile, int64_t count, int64_t length) {
  PYG_SAR_LANES(count, length, s[k] += tile[o];)
}

// out = leaky(s)
template <class T>
PYG_SAR_INLINE void leak(T* out, const T* s, T slope, int64_t count) {
  PYG_SAR_LANES(count, kLanes, (void)o; out[k] = leaky(s[k], slope);)
}

// lanes = max(lanes, s), where NaN is passed over. A tile of a register's lanes stays in one.
template <class T>
PYG_SAR_INLINE void raise_lanes(T* lanes, const T* s, int64_t count, int64_t length) {
  if (length == kLanes) {
    T most[kLanes];
    std::memcpy(most, lanes, sizeof(most));
    PYG_SAR_LANES(count, kLanes, (void)o; most[l] = s[k] > most[l] ? s[k] : most[l];)
    std::memcpy(lanes, most, sizeof(most));
    return;
  }
  PYG_SAR_LANES(count, length, lanes[o] = s[k] > lanes[o] ? s[k] : lanes[o];)
}

// s = exp(s - top), summed by lane
template <class T>
PYG_SAR_INLINE void exp_sum(T* s, const T* top, T* lanes, int64_t count, int64_t length) {
  if (length == kLanes) {
    T sum[kLanes], highest[kLanes];
    std::memcpy(sum, lanes, sizeof(sum));
    std::memcpy(highest, top, sizeof(highest));
    PYG_SAR_LANES(count, kLanes, (void)o; const T x = exponential(s[k] - highest[l]); s[k] = x;
                  sum[l] += x;)
    std::memcpy(lanes, sum, sizeof(sum));
    return;
  }
  PYG_SAR_LANES(count, length, const T x = exponential(s[k] - top[o]); s[k] = x; lanes[o] += x;)
}

// s = exp(s - top) * inverse, scalar by scalar
template <class T>
PYG_SAR_INLINE void exp_share(T* s, const T* top, const T* inverse, int64_t count) {
  PYG_SAR_LANES(count, kLanes, (void)o; s[k] = exponential(s[k] - top[k]) * inverse[k];)
}

// The same by lane.
template <class T>
PYG_SAR_INLINE void exp_share_lanes(T* s, const T* top, const T* inverse, int64_t count,
                                    int64_t length) {
  PYG_SAR_LANES(count, length, s[k] = exponential(s[k] - top[o]) * inverse[o];)
}

// Loops over rows ############################################################

template <class T>
PYG_SAR_INLINE void fetch(const T* row, int64_t width) {
  const char* at = reinterpret_cast<const char*>(row);
  const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t end = bytes < kFetchedBytes ? bytes : kFetchedBytes;
  for (int64_t b = 0; b < end; b += 64) __builtin_prefetch(at + b);
}

// Rows that edges name. 'left' is how many edges there are from the first of the block on.
template <class T>
struct Rows {
  const T* base;
  int64_t stride, width;
  const int32_t* index;
  int64_t left, distance;

  PYG_SAR_INLINE const T* at(int64_t e) const {
    return base + static_cast<int64_t>(index[e]) * stride;
  }
  PYG_SAR_INLINE void ahead(int64_t e) const { ahead(e, width); }
  PYG_SAR_INLINE void ahead(int64_t e, int64_t values) const {
    if (e + distance < left) fetch(at(e + distance), values);
  }
};

template <class T>
PYG_SAR_INLINE int64_t distance_of(int64_t width) {
  const int64_t fit = kAheadBytes / (width * static_cast<int64_t>(sizeof(T)) + 1);
  return fit < 4 ? 4 : fit < kAheadMost ? fit : kAheadMost;
}

// Calls a loop with a constant number of heads where rows are narrow: LOOP<heads, channels, ...>.
#define PYG_SAR_HEADS(LOOP, ARGUMENTS, kChannels, ...)                 \
  if constexpr (kChannels > 0 && kChannels <= 16) {                    \
    if (heads == 1) return LOOP<1, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (heads == 2) return LOOP<2, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (heads == 4) return LOOP<4, kChannels, __VA_ARGS__> ARGUMENTS;  \
    if (heads == 8) return LOOP<8, kChannels, __VA_ARGS__> ARGUMENTS;  \
  }                                                                    \
  return LOOP<0, kChannels, __VA_ARGS__> ARGUMENTS;

template <int64_t kHeads, class T>
PYG_SAR_INLINE void copy_rows_of(T* out, const Rows<T>& rows, int64_t n, int64_t given) {
  const int64_t heads = kHeads > 0 ? kHeads : given;
  for (int64_t e = 0; e < n; ++e) {
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
PYG_SAR_INLINE void copy_rows(T* out, const Rows<T>& rows, int64_t n, int64_t heads) {
  PYG_SAR_SCALAR_HEADS(copy_rows_of, (out, rows, n, heads))
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void split_rows_of(T* a, T* b, T* c, T* d, const Rows<T>& rows, int64_t n,
                                  int64_t given) {
  const int64_t heads = kHeads > 0 ? kHeads : given;
  for (int64_t e = 0; e < n; ++e) {
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
PYG_SAR_INLINE void split_rows(T* a, T* b, T* c, T* d, const Rows<T>& rows, int64_t n,
                               int64_t heads) {
  PYG_SAR_SCALAR_HEADS(split_rows_of, (a, b, c, d, rows, n, heads))
}

template <int64_t kHeads, class T>
PYG_SAR_INLINE void scatter_of(T* out, const T* s, const int32_t* index, int64_t n, int64_t left,
                               int64_t given) {
  const int64_t heads = kHeads > 0 ? kHeads : given;
  for (int64_t e = 0; e < n; ++e) {
    if (e + kAheadMost < left) {
      __builtin_prefetch(out + static_cast<int64_t>(index[e + kAheadMost]) * heads, 1);
    }
    T* row = out + static_cast<int64_t>(index[e]) * heads;
    for (int64_t h = 0; h < heads; ++h) row[h] += s[e * heads + h];
  }
}

// out[index[e], :] += s[e, :], one scalar per head; 'left' is how many edges there are in all.
template <class T>
PYG_SAR_INLINE void scatter(T* out, const T* s, const int32_t* index, int64_t n, int64_t left,
                            int64_t heads) {
  PYG_SAR_SCALAR_HEADS(scatter_of, (out, s, index, n, left, heads))
}

// acc[h, c] += sum over edges of w[e, h] * rows[e, h, c]
template <bool kFetch, class T>
PYG_SAR_INLINE void accumulate(T* acc, const T* w, const Rows<T>& rows, int64_t n, int64_t heads,
                               int64_t channels) {
  accumulate(acc, w, rows.base, Block{rows.index, n, rows.left, rows.stride, heads, channels, kFetch});
}

// out[e, h] = <x[h], rows[e, h]>
template <int64_t kHeads, int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void inner_products_of(T* out, const T* x, const Rows<T>& rows, int64_t n,
                                      int64_t some_heads, int64_t some_channels) {
  const int64_t heads = kHeads > 0 ? kHeads : some_heads;
  const int64_t channels = kChannels > 0 ? kChannels : some_channels;
  for (int64_t e = 0; e < n; ++e) {
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
PYG_SAR_INLINE void inner_products(T* out, const T* x, const Rows<T>& rows, int64_t n,
                                   int64_t heads, int64_t channels) {
  PYG_SAR_HEADS(inner_products_of, (out, x, rows, n, heads, channels), kChannels, kFetch)
}

template <int64_t kHeads, int64_t kChannels, class T>
PYG_SAR_INLINE void two_inner_products_of(T* out_x, T* out_y, const T* x, const T* y,
                                          const Rows<T>& rows, int64_t n, int64_t some_heads,
                                          int64_t some_channels) {
  const int64_t heads = kHeads > 0 ? kHeads : some_heads;
  const int64_t channels = kChannels > 0 ? kChannels : some_channels;
  for (int64_t e = 0; e < n; ++e) {
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
                                       const Rows<T>& rows, int64_t n, int64_t heads,
                                       int64_t channels) {
  PYG_SAR_HEADS(two_inner_products_of, (out_x, out_y, x, y, rows, n, heads, channels), kChannels,
                T)
}

// out[e, h] = sum over c of att[h, c] * leaky(x + rows[e])[h, c]
template <int64_t kHeads, int64_t kChannels, bool kFetch, class T>
PYG_SAR_INLINE void gatv2_scores_of(T* out, const T* x, const Rows<T>& rows, const T* att, T slope,
                                    int64_t n, int64_t some_heads, int64_t some_channels) {
  const int64_t heads = kHeads > 0 ? kHeads : some_heads;
  const int64_t channels = kChannels > 0 ? kChannels : some_channels;
  for (int64_t e = 0; e < n; ++e) {
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
PYG_SAR_INLINE void gatv2_scores(T* out, const T* x, const Rows<T>& rows, const T* att, T slope,
                                 int64_t n, int64_t heads, int64_t channels) {
  PYG_SAR_HEADS(gatv2_scores_of, (out, x, rows, att, slope, n, heads, channels), kChannels, kFetch)
}

// d = ds[e] * leaky'(x + rows[e]): grad += d; with kAtt: grad_att += d * (x + rows[e])
template <int64_t kHeads, int64_t kChannels, bool kAtt, class T>
PYG_SAR_INLINE void gatv2_gradients_of(T* grad, T* grad_att, const T* ds, const T* x,
                                       const Rows<T>& rows, T slope, int64_t n, int64_t some_heads,
                                       int64_t some_channels) {
  const int64_t heads = kHeads > 0 ? kHeads : some_heads;
  const int64_t channels = kChannels > 0 ? kChannels : some_channels;
  int64_t e = 0;
  for (; e + 2 <= n; e += 2) {
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
  for (; e < n; ++e) {
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
                                    const Rows<T>& rows, T slope, int64_t n, int64_t heads,
                                    int64_t channels) {
  PYG_SAR_HEADS(gatv2_gradients_of, (grad, grad_att, ds, x, rows, slope, n, heads, channels),
                kChannels, kAtt)
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
