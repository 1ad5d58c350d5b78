// What both passes of factored attention are made of: registers of the widest processors.
#pragma once

#include <utility>

#include "attention_terms.h"
#include "vectors.h"

#ifdef PYG_SAR_LEVELS
#include <immintrin.h>

#define PYG_SAR_512 PYG_SAR_TARGET_512("avx512f,fma")
// Of this target themselves: else vectors are taken apart before functions are inlined.
#define PYG_SAR_INLINE_512 PYG_SAR_INLINE PYG_SAR_512

namespace pyg_sar::attention {

constexpr int kFull = 16;             // values of a register
constexpr int64_t kMostHeads = 8;     // two numbers of each fit into a register
constexpr int64_t kMostVectors = 8;   // of a row
constexpr int64_t kRowsPerTask = 1 << 13;
constexpr float kLargestKey = 12;     // weights of 4e-11, at least

using Lanes = Vector<float, kFull>;
using Places = Vector<int32_t, kFull>;
constexpr auto kAllLanes = std::make_integer_sequence<int, kFull>{};

// Whether factors give the scores, and the processor has the registers.
inline bool is_factored(const Terms<float>& t) {
  const bool bits = t.drop_key == nullptr || t.drop_words == 1;
  const bool plain = t.features == 0 && bits && t.slope >= 0 && t.slope <= 1;
  return plain && __builtin_cpu_supports("avx512f");
}

// Which of kHeads heads of an edge, from the first one on, are not dropped, a bit each.
template <int kHeads>
PYG_SAR_INLINE_512 uint32_t kept_heads(const Terms<float>& t, int64_t e) {
  return static_cast<uint32_t>(t.drop_key[t.number(e)]) >> t.first_head & ((1u << kHeads) - 1);
}

// kCount numbers, over and over.
template <int kCount>
PYG_SAR_INLINE_512 Lanes repeated(const float* from) {
  if constexpr (kCount == 1) {
    const float x = *from;
    return Lanes{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
  } else if constexpr (kCount == 2) {
    double x;
    std::memcpy(&x, from, sizeof(x));
    return reinterpret_cast<Lanes>(Vector<double, 8>{x, x, x, x, x, x, x, x});
  } else if constexpr (kCount == 4) {
    Vector<float, 4> x;
    load<4>(x, from);
    const auto y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3);
    return __builtin_shufflevector(y, y, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
  } else if constexpr (kCount == 8) {
    Vector<float, 8> x;
    load<8>(x, from);
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
  } else {
    Lanes x;
    load<kFull>(x, from);
    return x;
  }
}

// Of n edges from e on, [edge, head]: 0 where dropped, else the factor of what isn't.
template <int kHeads>
PYG_SAR_INLINE_512 Lanes kept_factors(const Terms<float>& t, int64_t e, int n) {
  uint32_t bits = 0;
  for (int i = 0; i < n; ++i) bits |= kept_heads<kHeads>(t, e + i) << (i * kHeads);
  return _mm512_maskz_mov_ps(static_cast<__mmask16>(bits), repeated<1>(&t.kept));
}

// The lanes of x that `from` numbers.
PYG_SAR_INLINE_512 Lanes picked(const Lanes& x, const Places& from) {
#ifdef __clang__
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(from), x);
#else
  return __builtin_shuffle(x, from);
#endif
}

// The lanes from kFirst on, around the end.
template <int kFirst, int... lane>
PYG_SAR_INLINE_512 Lanes turned(const Lanes& x, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, x, (kFirst + lane) % kFull...);
}

// Half a register, and zeros.
template <int... lane>
PYG_SAR_INLINE_512 Lanes with_zeros(const float* from, std::integer_sequence<int, lane...>) {
  Vector<float, kFull / 2> x;
  load<kFull / 2>(x, from);
  return __builtin_shufflevector(x, Vector<float, kFull / 2>{}, lane...);
}

// Lanes of x where kBit of their number is 0, else of y; each plus the one across that bit.
template <int kBit, int... lane>
PYG_SAR_INLINE_512 Lanes folded(const Lanes& x, const Lanes& y,
                                std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, y, ((lane & kBit) != 0 ? lane + kFull : lane)...) +
         __builtin_shufflevector(x, y, (((lane & kBit) != 0 ? lane + kFull : lane) ^ kBit)...);
}

// Lane l: the sum of the lanes of x[l % kCount] that agree with l in the bits above.
template <int kCount>
PYG_SAR_INLINE_512 Lanes sums(const Lanes* x) {
  if constexpr (kCount == 1) {
    return *x;
  } else {
    constexpr int kHalf = kCount / 2;
    return folded<kHalf>(sums<kHalf>(x), sums<kHalf>(x + kHalf), kAllLanes);
  }
}

// From sums of eight registers of two heads each: [edge, head].
template <int... lane>
PYG_SAR_INLINE_512 Lanes in_pairs(const Lanes& x, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, x, (lane % 2 * (kFull / 2) + lane / 2)...);
}

// The halves of two registers that begin with kFirst.
template <int kFirst, int... lane>
PYG_SAR_INLINE_512 Lanes halves(const Lanes& x, const Lanes& y,
                                std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(x, y, (kFirst + lane % 8 + lane / 8 * kFull)...);
}

// Of two registers of rows [edge, part, head]: part kPart of all edges, then the next part.
template <int kHeads, int kPart, int... lane>
PYG_SAR_INLINE_512 Lanes parts(const Lanes& x, const Lanes& y,
                               std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(
      x, y,
      (lane % 8 / 4 * kFull + lane % 4 / kHeads * 4 * kHeads + (kPart + lane / 8) * kHeads +
       lane % kHeads)...);
}

}  // namespace pyg_sar::attention
#endif
