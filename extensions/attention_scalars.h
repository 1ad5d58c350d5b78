// Loops over the scalars of a block of edges of one segment (a target's in-edges, or a source row's
// out-edges). They lie edge by edge, head by head: [edges, heads], padded to whole lanes.
//
// What depends on the head alone is repeated over a "tile" of lanes whose length is a multiple of
// both the number of heads and that of the lanes, so that loops over scalars are flat.
#pragma once

#include "processors.h"

// A file that is compiled for a processor says which one: by a function's attribute, and by the bytes of a
// register. Vectors want the attribute also where they are inlined: else they are taken apart before.
#ifndef PYG_SAR_LEVEL
#define PYG_SAR_LEVEL
#define PYG_SAR_REGISTER 16
#endif
#define PYG_SAR_HERE PYG_SAR_INLINE PYG_SAR_LEVEL
#define PYG_SAR_SHARED static PYG_SAR_LEVEL  // by the passes of a file

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>

namespace pyg_sar::attention {

constexpr int64_t kLanes = 16;

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
#define PYG_SAR_SCALAR_HEADS(LOOP, heads, ARGUMENTS) \
  switch (heads) {                                   \
    case 1: return LOOP<1> ARGUMENTS;                \
    case 2: return LOOP<2> ARGUMENTS;                \
    case 4: return LOOP<4> ARGUMENTS;                \
    case 8: return LOOP<8> ARGUMENTS;                \
    default: return LOOP<0> ARGUMENTS;               \
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
PYG_SAR_SHARED void fill_tile(T* tile, const T* of, int64_t heads, int64_t length) {
  PYG_SAR_SCALAR_HEADS(fill_tile_of, heads, (tile, of, heads, length))
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
PYG_SAR_SHARED void add_lanes(T* sums, const T* lanes, int64_t heads, int64_t length) {
  PYG_SAR_SCALAR_HEADS(add_lanes_of, heads, (sums, lanes, heads, length))
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
PYG_SAR_SHARED void add_tile(T* s, const T* tile, int64_t count, int64_t length) {
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

// s = exp(s - top) / total, scalar by scalar
template <class T>
PYG_SAR_INLINE void exp_share(T* s, const T* top, const T* total, int64_t count) {
  PYG_SAR_LANES(count, kLanes, (void)o; s[k] = exponential(s[k] - top[k]) / total[k];)
}

// The same by lane.
template <class T>
PYG_SAR_INLINE void exp_share_lanes(T* s, const T* top, const T* total, int64_t count,
                                    int64_t length) {
  PYG_SAR_LANES(count, length, s[k] = exponential(s[k] - top[o]) / total[o];)
}

}  // namespace pyg_sar::attention
