// Pieces of a row in registers: the vectors of GCC and Clang, which make them of what the processor has
// (one of 64 bytes is a register of AVX-512, two of AVX2, four of SSE or of ARM's NEON).
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "processors.h"

namespace pyg_sar {

using torch::headeronly::BFloat16;

// What values of a row are added up in.
template <class Row>
using Wide = std::conditional_t<std::is_same_v<Row, BFloat16>, float, Row>;

template <class T, int kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::type;

// Numbers of a vector that a register of kBytes holds. A wider vector is kept in several: GCC spreads a
// factor over one that is wider than a register by way of memory.
template <class Acc, int kLanes, int kBytes>
constexpr int in_a_register = kLanes * sizeof(Acc) <= kBytes ? kLanes : kBytes / sizeof(Acc);

// Numbers in a register of one cache line.
template <class Acc>
constexpr int kFullLanes = static_cast<int>(kLine / sizeof(Acc));

// Whether rows may lie in more lines than as many bytes take that begin with one.
template <class Row>
bool crosses_lines(const Row* rows, int64_t stride, int64_t width) {
  constexpr int64_t kBytes = sizeof(Row);
  const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(rows) % kLine);
  const int64_t latest = kLine - std::gcd(std::gcd(at, stride * kBytes), kLine);
  return latest + width * kBytes > (width * kBytes + kLine - 1) / kLine * kLine;
}

template <int kLanes, class Acc, class = std::enable_if_t<std::is_floating_point_v<Acc>>>
PYG_SAR_INLINE void load(Vector<Acc, kLanes>& to, const Acc* from) {
  std::memcpy(&to, from, sizeof(to));
}

template <int kLanes>
PYG_SAR_INLINE void load(Vector<float, kLanes>& to, const BFloat16* from) {
  Vector<uint16_t, kLanes> half;
  std::memcpy(&half, from, sizeof(half));
  // bfloat16 is the upper half of a float32.
  const auto bits = __builtin_convertvector(half, Vector<uint32_t, kLanes>) << 16;
  std::memcpy(&to, &bits, sizeof(to));
}

// to[k] += from[k] for k in [first, last).
template <class Row>
PYG_SAR_INLINE void add_between(Row* to, const Wide<Row>* from, int first, int last) {
  for (int k = first; k < last; ++k) to[k] = static_cast<Row>(static_cast<Wide<Row>>(to[k]) + from[k]);
}
template <class Row>
__attribute__((noinline)) void add_last(Row* to, const Wide<Row>* from, int first, int last) {
  add_between(to, from, first, last);
}

// to[k] += from[k] for the lanes from `first` on.
template <int kLanes, class Row>
PYG_SAR_INLINE void add_to(Row* to, const Vector<Wide<Row>, kLanes>& from, int first) {
  Wide<Row> lanes[kLanes];
  std::memcpy(lanes, &from, sizeof(from));
  if (first == 0) return add_between(to, lanes, 0, kLanes);  // a whole vector
  // Once, not for each tile, where that is long.
  kLanes >= 8 ? add_last(to, lanes, first, kLanes) : add_between(to, lanes, first, kLanes);
}

}  // namespace pyg_sar
