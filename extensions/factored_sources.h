// Gradients by source row of additive scores without an exponential per edge. As in factored.cpp,
//
//   a_ij = max(A_i exp(k_j), B_i exp(slope k_j)),
//   A_i = exp(q_i - m_i) / n_i,   B_i = exp(slope q_i - m_i) / n_i:
//
// once per call, each target gets a row of A, B, delta and q, and each segment exp(k), exp(slope k)
// and k. No factor overflows: m_i is no less than the score of any edge to i, but for rounding, and
// leaky(z) = max(z, slope z), so that q_i - m_i <= -k_j and slope q_i - m_i <= -slope k_j. Keys are
// at most 12 in size, or this isn't done; n_i, which has such an edge's weight, is 4e-11 at least.
// Rows of targets without an edge may hold anything: they are not read.
//
// Which product is larger says what the weight is, but not the slope: near 0 both may round to the
// same. That is asked of the sign of k_j + q_i itself.
//
// Edges are taken in groups whose heads fill a register, [edge, head]: what is done per edge and
// head is done once per group. A group's gradients of outputs are read from memory once, for their
// inner products with the value; they are in the nearest cache when they are summed.
//
// Rows of more than kMostVectors registers, and most numbers of heads that are no power of two, are taken in
// several passes, each over the columns of some heads: each version takes long to compile.
#pragma once

#include "factored.h"
#include "factored_lanes.h"

#include <bit>

#ifdef PYG_SAR_LEVELS
namespace pyg_sar::attention {
namespace {

constexpr int64_t kRows = 32;          // that are made at a time
constexpr int64_t kLeastWidth = 8;     // of a row
constexpr int64_t kSegmentsAhead = 3;  // whose rows are fetched
constexpr Places kLane{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// How a head lies in registers: fills its own, or half of one, or leaves lanes of its last one or two.
enum class Layout { kWhole, kHalf, kMasked };

// Rows that are made once per call; of kPadded numbers per part.
template <int kHeads>
struct Factors {
  static constexpr int kPadded = std::bit_ceil(static_cast<unsigned>(kHeads));
  static constexpr int kOfTarget = 4 * kPadded, kOfSource = 3 * kPadded;
  static constexpr int kSize = kRows * kPadded;
  const Terms<float>& t;
  const SourceGradients& g;
  const NamedRows* targets = nullptr;

  static PYG_SAR_INLINE_512 void copy(float* to, const float* from) {
    std::memcpy(to, from, kHeads * sizeof(float));
  }
  // Numbers of n rows, part by part.
  template <class... Part>
  static PYG_SAR_INLINE_512 void write(float* to, int64_t n, const Part*... part) {
    for (int64_t r = 0; r < n; ++r) {
      ((std::memcpy(to, part + r * kPadded, kPadded * sizeof(float)), to += kPadded), ...);
    }
  }

  // out[i] = A, B, delta, query
  PYG_SAR_INLINE_512 void of_targets(float* out, int64_t first, int64_t last) const {
    float top[kSize] = {}, normal[kSize], delta[kSize] = {}, query[kSize] = {};
    float large[kSize], small[kSize];
    std::fill_n(normal, kSize, 1.0f);  // of heads that are none
    for (int64_t k = first; k < last; k += kRows) {
      const int64_t n = std::min(kRows, last - k);
      for (int64_t r = 0; r < n; ++r) {
        const int64_t i = (*targets)[k + r];
        copy(top + r * kPadded, g.maximum.row(i));
        copy(normal + r * kPadded, g.normaliser.row(i));
        copy(delta + r * kPadded, g.delta.row(i));
        if (t.query.data != nullptr) copy(query + r * kPadded, t.query.row(i));
      }
#pragma omp simd
      for (int64_t x = 0; x < n * kPadded; ++x) {
        const float inverse = 1 / normal[x];
        large[x] = exponential(query[x] - top[x]) * inverse;
        small[x] = exponential(t.slope * query[x] - top[x]) * inverse;
      }
      for (int64_t r = 0; r < n; ++r) {
        const int64_t at = r * kPadded;
        write(out + (*targets)[k + r] * kOfTarget, 1, large + at, small + at, delta + at, query + at);
      }
    }
  }

  // out[u] = exp(key), exp(slope * key), key; whether all keys are small
  PYG_SAR_INLINE_512 bool of_sources(float* out, int64_t first, int64_t last) const {
    float key[kSize] = {}, large[kSize], small[kSize];
    int beyond = 0;
    for (int64_t u = first; u < last; u += kRows) {
      const int64_t n = std::min(kRows, last - u);
      for (int64_t r = 0; r < n; ++r) {
        if (t.offsets[u + r] == t.offsets[u + r + 1]) continue;  // it may hold anything
        copy(key + r * kPadded, t.key.row(t.place(t.target(u + r))));
      }
#pragma omp simd reduction(| : beyond)
      for (int64_t k = 0; k < n * kPadded; ++k) {
        beyond |= !(std::abs(key[k]) <= kLargestKey);
        large[k] = exponential(key[k]);
        small[k] = exponential(t.slope * key[k]);
      }
      write(out + u * kOfSource, n, large, small, key);
    }
    return beyond == 0;
  }
};

// Rows of kHeads heads in kEach registers each.
template <int kHeads, int kEach, Layout kLayout>
struct FactoredSources {
  static constexpr int kPadded = Factors<kHeads>::kPadded;
  static constexpr int kOfTarget = Factors<kHeads>::kOfTarget;
  static constexpr bool kIsHalf = kLayout == Layout::kHalf;
  static constexpr int kVectors = kIsHalf ? (kHeads + 1) / 2 : kHeads * kEach;  // of a row
  static constexpr int kProducts = kIsHalf ? kPadded / 2 : kPadded;             // of an edge
  static constexpr int kEdges = kFull / kPadded;                                // of a group
  static constexpr int64_t kAhead = kVectors <= 2 ? 48 : kVectors <= 4 ? 24 : 20;
  Terms<float> t;
  Matrix<const float> grad_out;
  Matrix<float> grad_value, grad_key;
  const float *targets, *sources;  // rows of factors
  int64_t channels;
  int64_t query_stride;  // of the gradients of queries
  __mmask16 masks[2];    // of a head's last registers
  int64_t last_line;     // of a gradient's row, where it lies in one more than there are registers

  // What a segment keeps.
  struct Segment {
    Lanes value[kVectors], sum[kVectors] = {};
    Lanes large, small, key, grad_key = {};
  };

  PYG_SAR_INLINE_512 int64_t column(int v) const {
    if constexpr (kLayout != Layout::kMasked) return v * kFull;
    return v / kEach * channels + v % kEach * kFull;
  }
  // Of a register that has lanes beyond its heads: its mask's number, else -1.
  static constexpr int mask_of(int v) {
    if (kIsHalf) return 2 * v + 1 == kHeads ? 1 : -1;
    if (kLayout != Layout::kMasked) return -1;
    return v % kEach == kEach - 1 ? 1 : kEach > 4 && v % kEach == kEach - 2 ? 0 : -1;
  }

  PYG_SAR_INLINE_512 Lanes read(const float* row, int v) const {
    const float* from = row + column(v);
    if (kIsHalf && mask_of(v) >= 0) return with_zeros(from, kAllLanes);  // faster than by a mask
    if (mask_of(v) >= 0) return _mm512_maskz_loadu_ps(masks[mask_of(v)], from);
    return repeated<kFull>(from);
  }
  PYG_SAR_INLINE_512 void write(float* row, int v, const Lanes& x) const {
    float* to = row + column(v);
    if (mask_of(v) >= 0) return _mm512_mask_storeu_ps(to, masks[mask_of(v)], x);
    std::memcpy(to, &x, sizeof(x));
  }

  PYG_SAR_INLINE_512 void operator()(int64_t chunk, float* queries) const {
    const int64_t end = t.first_segment(chunk + 1);
    Lanes products[kFull] = {};  // of a group
    for (int64_t u = t.first_segment(chunk); u < end; ++u) {
      fetch_segment(std::min(u + kSegmentsAhead, end - 1));
      if (t.offsets[u] < t.offsets[u + 1]) add(products, queries, u);
    }
  }

  PYG_SAR_INLINE_512 void fetch_segment(int64_t u) const {
    const int64_t j = t.target(u);
    const float *value = t.value.row(t.place(j)), *written = grad_value.row(j);
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(value + column(v));
    if (written == nullptr) return;
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(written + column(v), 1);
  }

  // Of an edge, or of the last one behind it.
  PYG_SAR_INLINE_512 int64_t target_of(int64_t e) const {
    return t.source[e < t.num_edges ? e : t.num_edges - 1];
  }
  PYG_SAR_INLINE_512 const float* gradient_of(int64_t e) const {
    return grad_out.data + t.source[e] * grad_out.stride;
  }
  PYG_SAR_INLINE_512 const float* factors_of(int64_t e) const {
    return targets + target_of(e) * kOfTarget;
  }

  PYG_SAR_INLINE_512 void fetch_edge(float* queries, int64_t e) const {
    const int64_t i = target_of(e);
    const float *row = grad_out.data + i * grad_out.stride, *factors = targets + i * kOfTarget;
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(row + column(v));
    __builtin_prefetch(row + last_line);
    __builtin_prefetch(factors);
    if constexpr (kOfTarget > kFull) __builtin_prefetch(factors + kFull);
    if (queries != nullptr) __builtin_prefetch(queries + i * query_stride, 1);
    if (t.drop_key != nullptr) __builtin_prefetch(t.drop_key + t.number(std::min(e, t.num_edges - 1)));
  }

  PYG_SAR_INLINE_512 void add(Lanes* products, float* queries, int64_t u) const {
    const int64_t j = t.target(u), stop = t.offsets[u + 1];
    const float *value = t.value.row(t.place(j)), *own = sources + u * Factors<kHeads>::kOfSource;
    Segment s;
    PYG_SAR_UNROLLED
    for (int v = 0; v < kVectors; ++v) s.value[v] = read(value, v);
    s.large = repeated<kPadded>(own);
    s.small = repeated<kPadded>(own + kPadded);
    s.key = repeated<kPadded>(own + 2 * kPadded);
    for (int64_t e = t.offsets[u]; e < stop; e += kEdges) {
      add_group(products, s, queries, e, static_cast<int>(std::min<int64_t>(kEdges, stop - e)));
    }
    if (float* out = grad_value.row(j)) {
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; ++v) write(out, v, read(out, v) + s.sum[v]);
    }
    if (float* out = grad_key.row(j)) {
      if constexpr (kPadded <= 1) s.grad_key += turned<1>(s.grad_key, kAllLanes);
      if constexpr (kPadded <= 2) s.grad_key += turned<2>(s.grad_key, kAllLanes);
      if constexpr (kPadded <= 4) s.grad_key += turned<4>(s.grad_key, kAllLanes);
      s.grad_key += turned<8>(s.grad_key, kAllLanes);
      float total[kFull];
      std::memcpy(total, &s.grad_key, sizeof(total));
      for (int h = 0; h < kHeads; ++h) out[h] += total[h];
    }
  }

  // The n edges from e on.
  PYG_SAR_INLINE_512 void add_group(Lanes* products, Segment& s, float* queries, int64_t e,
                                    int n) const {
    for (int i = 0; i < n; ++i) {
      fetch_edge(queries, e + kAhead + i);
      const float* row = gradient_of(e + i);
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; v += kEach) {
        Lanes product = read(row, v) * s.value[v];
        PYG_SAR_UNROLLED
        for (int r = 1; r < kEach; ++r) product += read(row, v + r) * s.value[v + r];
        products[i * kProducts + v / kEach] = product;
      }
    }
    Lanes part[4];
    gather(part, e);
    Lanes inner = sums<kEdges * kProducts>(products);
    if constexpr (kIsHalf) inner = in_pairs(inner, kAllLanes);
    const Lanes x = part[0] * s.large, y = part[1] * s.small;
    Lanes weight = x > y ? x : y, up = weight * (inner - part[2]);
    if (t.drop_key != nullptr) {
      const Lanes factor = kept_factors<kPadded>(t, e, n);
      up = weight * (factor * inner - part[2]);
      weight *= factor;
    }
    Lanes down = part[3] + s.key > 0.0f ? up : t.slope * up;
    down = kLane < n * kPadded ? down : Lanes{};
    s.grad_key += down;
    if (queries != nullptr) scatter(down, queries, e, n);
    if (grad_value.data != nullptr) accumulate(s, weight, e, n);
  }

  // The four parts of the group's targets; of a group with less edges, also of others.
  PYG_SAR_INLINE_512 void gather(Lanes* part, int64_t e) const {
    if constexpr (kPadded == 8) {
      const float *a = factors_of(e), *b = factors_of(e + 1);
      PYG_SAR_UNROLLED
      for (int p = 0; p < 4; p += 2) {
        const Lanes x = repeated<kFull>(a + p * 8), y = repeated<kFull>(b + p * 8);
        part[p] = halves<0>(x, y, kAllLanes);
        part[p + 1] = halves<8>(x, y, kAllLanes);
      }
    } else {
      Lanes x[4];
      PYG_SAR_UNROLLED
      for (int r = 0; r < 4; ++r) {
        float rows[kFull];
        for (int i = 0; i < kEdges / 4; ++i) {
          const float* row = factors_of(e + r * (kEdges / 4) + i);
          std::memcpy(rows + i * kOfTarget, row, kOfTarget * sizeof(float));
        }
        std::memcpy(&x[r], rows, sizeof(rows));
      }
      const Lanes a = parts<kPadded, 0>(x[0], x[1], kAllLanes);
      const Lanes b = parts<kPadded, 0>(x[2], x[3], kAllLanes);
      const Lanes c = parts<kPadded, 2>(x[0], x[1], kAllLanes);
      const Lanes d = parts<kPadded, 2>(x[2], x[3], kAllLanes);
      part[0] = halves<0>(a, b, kAllLanes);
      part[1] = halves<8>(a, b, kAllLanes);
      part[2] = halves<0>(c, d, kAllLanes);
      part[3] = halves<8>(c, d, kAllLanes);
    }
  }

  // to[h] += by[h] for kCount heads
  template <int kCount>
  static PYG_SAR_INLINE_512 void add_heads(float* to, const float* by) {
    constexpr int kFirst = std::bit_floor(static_cast<unsigned>(kCount));
    Vector<float, kFirst> x, y;
    std::memcpy(&x, to, sizeof(x));
    std::memcpy(&y, by, sizeof(y));
    x += y;
    std::memcpy(to, &x, sizeof(x));
    if constexpr (kCount > kFirst) add_heads<kCount - kFirst>(to + kFirst, by + kFirst);
  }

  PYG_SAR_INLINE_512 void scatter(const Lanes& down, float* queries, int64_t e, int n) const {
    float by[kFull];
    std::memcpy(by, &down, sizeof(by));
    for (int i = 0; i < n; ++i) {
      float* to = queries + t.source[e + i] * query_stride;
      add_heads<kHeads>(to, by + i * kPadded);
    }
  }

  PYG_SAR_INLINE_512 void accumulate(Segment& s, const Lanes& weight, int64_t e, int n) const {
    float by[kFull];
    std::memcpy(by, &weight, sizeof(by));
    for (int i = 0; i < n; ++i) {
      const float* row = gradient_of(e + i);
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kIsHalf) {
          s.sum[v] += read(row, v) * picked(weight, i * kPadded + 2 * v + kLane / 8);
        } else {
          s.sum[v] += read(row, v) * by[i * kPadded + v / kEach];
        }
      }
    }
  }
};

}  // namespace
}  // namespace pyg_sar::attention
#endif
