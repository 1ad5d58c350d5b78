// Columns are taken in tiles of at most kVectors registers. The sums of a tile stay in registers over a
// block's edges, as those of a target do in gather_sum.h; a vector belongs to one head. Heads of one,
// two, four or eight whole vectors share a tile. The last vector of another head begins where a whole
// one fits, so that it overlaps the one before it; what that has added is left out at the end.

#include "weighted_rows.h"

#include <utility>

#include "vectors.h"

namespace pyg_sar::attention {
namespace {

constexpr int kVectors = 8;  // of a tile

template <class T, int kRegister>  // bytes of a register
struct Weighted {
  Rows<T> rows;
  T* acc;
  const T* w;
  bool fetches;

  // `kHeads` heads from `head` on, of `kEach` vectors each, of which the last begins at column `tail`;
  // `kWhole`: the vectors of these heads follow each other.
  template <int kLanes, int kHeads, int kEach, bool kWhole = false>
  PYG_SAR_INLINE void tile(int64_t head, int64_t column, int64_t tail) const {
    const auto place = [&](int h, int v) PYG_SAR_INLINED -> int64_t {
      if constexpr (kWhole) return (h * kEach + v) * kLanes;
      return h * rows.channels + (v + 1 < kEach ? v * kLanes : tail);
    };
    constexpr int kCount = kHeads * kEach;
    constexpr int64_t kAhead = kCount <= 2 ? 64 : kCount <= 4 ? 32 : 16;
    const int64_t first = head * rows.channels + column, last = rows.left - 1;
    const int64_t bytes = kCount * kLanes * sizeof(T);
    constexpr int kOnes = in_a_register<T, kLanes, kRegister>, kParts = kLanes / kOnes;
    Vector<T, kOnes> sum[kCount][kParts] = {};
    for (int64_t e = 0; e < rows.n; ++e) {
      if (fetches) {
        const int64_t later = e + kAhead < last ? e + kAhead : last;
        const T* next = rows.at(later) + first;
        for (int64_t at = 0; at < bytes; at += kLine) {
          __builtin_prefetch(reinterpret_cast<const char*>(next) + at);
        }
      }
      const T* row = rows.at(e) + first;
      const T* weight = w + e * rows.heads + head;
      PYG_SAR_UNROLLED
      for (int h = 0; h < kHeads; ++h) {
        PYG_SAR_UNROLLED
        for (int v = 0; v < kEach; ++v) {
          PYG_SAR_UNROLLED
          for (int part = 0; part < kParts; ++part) {
            Vector<T, kOnes> x;
            load<kOnes>(x, row + place(h, v) + part * kOnes);
            sum[h * kEach + v][part] += x * weight[h];
          }
        }
      }
    }
    // Lanes of the last vector that the one before it has added.
    const int added = kWhole ? 0 : static_cast<int>((kEach - 1) * kLanes - tail);
    PYG_SAR_UNROLLED
    for (int h = 0; h < kHeads; ++h) {
      PYG_SAR_UNROLLED
      for (int v = 0; v < kEach; ++v) {
        const bool overlaps = v + 1 == kEach && added > 0;
        T* to = acc + first + place(h, v);
        Vector<T, kLanes> found;
        std::memcpy(&found, sum[h * kEach + v], sizeof(found));
        if (overlaps) {
          add_to<kLanes>(to, found, added);
        } else {
          Vector<T, kLanes> total;
          load<kLanes>(total, to);
          total += found;
          std::memcpy(to, &total, sizeof(total));
        }
      }
    }
  }

  // All heads, as many at a time as fit.
  template <int kLanes, int kHeads, int kEach, bool kWhole>
  PYG_SAR_INLINE void heads_from(int64_t head) const {
    for (; head + kHeads <= rows.heads; head += kHeads) {
      tile<kLanes, kHeads, kEach, kWhole>(head, 0, rows.channels - kLanes);
    }
    if constexpr (kHeads > 1) {
      if (head < rows.heads) heads_from<kLanes, kHeads / 2, kEach, kWhole>(head);
    }
  }

  // One head's columns from `column` on, as many as there are.
  template <int kLanes>
  PYG_SAR_INLINE void one_head(int64_t head) const {
    int64_t column = 0;
    for (; rows.channels - column >= kVectors * kLanes; column += kVectors * kLanes) {
      tile<kLanes, 1, kVectors>(head, column, (kVectors - 1) * kLanes);
    }
    const int64_t left = rows.channels - column;
    if (left == 0) return;
    // A tail may reach back over columns of the tile before.
    const int64_t tail = left - kLanes;
    switch ((left + kLanes - 1) / kLanes) {
      case 1: return tile<kLanes, 1, 1>(head, column, tail);
      case 2: return tile<kLanes, 1, 2>(head, column, tail);
      case 3: return tile<kLanes, 1, 3>(head, column, tail);
      case 4: return tile<kLanes, 1, 4>(head, column, tail);
      case 5: return tile<kLanes, 1, 5>(head, column, tail);
      case 6: return tile<kLanes, 1, 6>(head, column, tail);
      case 7: return tile<kLanes, 1, 7>(head, column, tail);
      default: return tile<kLanes, 1, 8>(head, column, tail);
    }
  }

  template <int kLanes>
  PYG_SAR_INLINE void narrow() const {
    if constexpr (kLanes > 0) {
      if (rows.channels < kLanes) return narrow<kLanes / 2>();
      if (rows.channels == kLanes) return heads_from<kLanes, kVectors, 1, true>(0);
      if constexpr (kLanes > 1) return heads_from<kLanes, kVectors / 2, 2, false>(0);
    }
  }

  PYG_SAR_INLINE void operator()() const {
    constexpr int kLanes = kFullLanes<T>;
    if (rows.channels < kLanes) return narrow<kLanes / 2>();
    if (rows.channels == kLanes) return heads_from<kLanes, kVectors, 1, true>(0);
    if (rows.channels == 2 * kLanes) return heads_from<kLanes, kVectors / 2, 2, true>(0);
    if (rows.channels < 2 * kLanes) return heads_from<kLanes, kVectors / 2, 2, false>(0);
    if (rows.channels == 4 * kLanes) return heads_from<kLanes, kVectors / 4, 4, true>(0);
    if (rows.channels < 4 * kLanes && rows.channels > 3 * kLanes) {
      return heads_from<kLanes, kVectors / 4, 4, false>(0);
    }
    for (int64_t head = 0; head < rows.heads; ++head) one_head<kLanes>(head);
  }
};

#ifdef PYG_SAR_LEVELS
// Narrow heads side by side, `kLanes / kChannels` of them in a vector: weights are spread over its
// lanes, which other processors do slowly.
template <int kChannels>
struct SideBySide {
  static constexpr int kLanes = 16;
  using Lanes = Vector<float, kLanes>;
  Rows<float> rows;
  float* acc;
  const float* w;
  bool fetches;

  template <int... lane>
  PYG_SAR_INLINE static Lanes spread(const Lanes& weight, std::integer_sequence<int, lane...>) {
    return __builtin_shufflevector(weight, weight, lane / kChannels...);
  }

  // `kCount` vectors from `head` on.
  template <int kCount>
  PYG_SAR_INLINE void run(int64_t head) const {
    constexpr int64_t kAhead = kCount <= 2 ? 64 : 32;
    const int64_t first = head * kChannels, last = rows.left - 1;
    Lanes sum[kCount] = {};
    for (int64_t e = 0; e < rows.n; ++e) {
      if (fetches) {
        const int64_t later = e + kAhead < last ? e + kAhead : last;
        const float* next = rows.at(later) + first;
        PYG_SAR_UNROLLED
        for (int v = 0; v < kCount; ++v) __builtin_prefetch(next + v * kLanes);
      }
      const float* row = rows.at(e) + first;
      const float* weight = w + e * rows.heads + head;
      PYG_SAR_UNROLLED
      for (int v = 0; v < kCount; ++v) {
        Lanes x, by;
        load<kLanes>(x, row + v * kLanes);
        load<kLanes>(by, weight + v * (kLanes / kChannels));
        sum[v] += x * spread(by, std::make_integer_sequence<int, kLanes>{});
      }
    }
    PYG_SAR_UNROLLED
    for (int v = 0; v < kCount; ++v) {
      float* to = acc + first + v * kLanes;
      Lanes total;
      load<kLanes>(total, to);
      total += sum[v];
      std::memcpy(to, &total, sizeof(total));
    }
  }

  PYG_SAR_INLINE void operator()() const {
    constexpr int kHeads = kLanes / kChannels;
    int64_t head = 0;
    for (; head + 4 * kHeads <= rows.heads; head += 4 * kHeads) run<4>(head);
    for (; head + 2 * kHeads <= rows.heads; head += 2 * kHeads) run<2>(head);
    for (; head < rows.heads; head += kHeads) run<1>(head);
  }
};

// Whether it was done.
__attribute__((target("avx512f"))) bool side_by_side(float* acc, const float* w, const Rows<float>& rows,
                                                     bool fetches) {
  if (rows.heads * rows.channels % 16 != 0) return false;
  switch (rows.channels) {
    case 8: return SideBySide<8>{rows, acc, w, fetches}(), true;
    case 4: return SideBySide<4>{rows, acc, w, fetches}(), true;
    case 2: return SideBySide<2>{rows, acc, w, fetches}(), true;
    default: return false;
  }
}
#endif

template <class T>
void add_weighted(T* acc, const T* w, const Rows<T>& rows, bool fetches) {
  on_best([&](auto registers) PYG_SAR_INLINED {
    Weighted<T, decltype(registers)::kBytes>{rows, acc, w, fetches}();
  });
}

}  // namespace

void accumulate(float* acc, const float* w, const Rows<float>& rows, bool fetches) {
#ifdef PYG_SAR_LEVELS
  if (__builtin_cpu_supports("avx512f") && side_by_side(acc, w, rows, fetches)) return;
#endif
  add_weighted(acc, w, rows, fetches);
}

void accumulate(double* acc, const double* w, const Rows<double>& rows, bool fetches) {
  add_weighted(acc, w, rows, fetches);
}

}  // namespace pyg_sar::attention
