// The largest (smallest) value of the rows that a target's edges read, column by column, and how many
// edges reach it; and the gradient of what they read.


#include <algorithm>
#include <atomic>
#include <type_traits>

#include "segments.h"
#include "tensors.h"
#include "vectors.h"

namespace pyg_sar {

// See [Note: tiles] in gather_sum.h. Lanes in which two vectors overlap hold the same numbers.
constexpr int kMostExtremumVectors = 4;

// A vector that can be compared; compilers stumble over the comparison of vectors of one.
template <class T, int kLanes>
using Lanes = typename std::conditional_t<kLanes == 1, std::common_type<T>, VectorOf<T, kLanes>>::type;

template <class Vec, class T>
PYG_SAR_INLINE void read(Vec& to, const T* from) {
  std::memcpy(&to, from, sizeof(to));
}

template <class Row, bool kLargest>
struct ExtremumTile {
  Segments<int32_t> segments;
  Row *best, *ties;
  const Row* rows;
  int64_t best_stride, ties_stride, row_stride, width;

  template <int kBytes, int kLanes, int kVectors>
  PYG_SAR_INLINE void run(int64_t first, int64_t last) const {
    constexpr int64_t kAhead = 32;
    constexpr int kOnes = in_a_register<Row, kLanes, kBytes>, kParts = kLanes / kOnes;
    using Vec = Lanes<Row, kOnes>;
    const int64_t final = segments.num_edges - 1;
    const Vec one = Vec{} + Row(1), zero = {};
    for (int64_t t = first; t < last; ++t) {
      Row* const top = best + segments.target(t) * best_stride;
      Row* const count = ties + segments.target(t) * ties_stride;
      Vec high[kVectors * kParts], equal[kVectors * kParts];
      const auto at = [&](int v) PYG_SAR_INLINED {
        return (v / kParts + 1 < kVectors ? v / kParts * kLanes : width - kLanes) + v % kParts * kOnes;
      };
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors * kParts; ++v) {
        read(high[v], top + at(v));
        read(equal[v], count + at(v));
      }
      for (int64_t e = segments.offsets[t]; e < segments.offsets[t + 1]; ++e) {
        const int64_t later = e + kAhead < final ? e + kAhead : final;
        const Row* next = rows + segments.source[later] * row_stride;
        const Row* row = rows + segments.source[e] * row_stride;
        PYG_SAR_UNROLLED
        for (int v = 0; v < kVectors * kParts; ++v) {
          if (v % kParts == 0) __builtin_prefetch(next + v * kOnes);
          Vec x;
          read(x, row + at(v));
          // NaN replaces everything and is replaced by nothing; nothing is equal to it.
          const auto better = kLargest ? x > high[v] : x < high[v];
          const auto wrong = x != x;
          equal[v] += x == high[v] ? one : zero;
          equal[v] = better ? one : equal[v];
          equal[v] = wrong ? zero : equal[v];
          high[v] = better ? x : high[v];
          high[v] = wrong ? x : high[v];
        }
      }
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors * kParts; ++v) {
        std::memcpy(top + at(v), &high[v], sizeof(high[v]));
        std::memcpy(count + at(v), &equal[v], sizeof(equal[v]));
      }
    }
  }
};

// Edges grouped by the rows that were read: total[target(t)] += gradient[source[e]] where the row
// reaches best[source[e]].
template <class Row>
struct ExtremumGradientTile {
  Segments<int32_t> segments;
  Row* total;
  const Row *rows, *gradient, *best;
  int64_t total_stride, row_stride, gradient_stride, best_stride, width;
  std::atomic<int64_t>* reached;

  template <int kBytes, int kLanes, int kVectors>
  PYG_SAR_INLINE void run(int64_t first, int64_t last) const {
    constexpr int64_t kAhead = 16;
    constexpr int kOnes = in_a_register<Row, kLanes, kBytes>, kParts = kLanes / kOnes;
    using Vec = Lanes<Row, kOnes>;
    const int64_t final = segments.num_edges - 1;
    const Vec one = Vec{} + Row(1), zero = {};
    int64_t all = 0;
    const auto at = [&](int v) PYG_SAR_INLINED {
      return (v / kParts + 1 < kVectors ? v / kParts * kLanes : width - kLanes) + v % kParts * kOnes;
    };
    for (int64_t t = first; t < last; ++t) {
      const Row* row = rows + segments.target(t) * row_stride;
      Vec x[kVectors * kParts], sum[kVectors * kParts] = {}, hits[kVectors * kParts] = {};
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors * kParts; ++v) read(x[v], row + at(v));
      for (int64_t e = segments.offsets[t]; e < segments.offsets[t + 1]; ++e) {
        const int64_t i = segments.source[e];
        const int64_t later = segments.source[e + kAhead < final ? e + kAhead : final];
        PYG_SAR_UNROLLED
        for (int v = 0; v < kVectors * kParts; ++v) {
          if (v % kParts == 0) {
            __builtin_prefetch(best + later * best_stride + at(v));
            __builtin_prefetch(gradient + later * gradient_stride + at(v));
          }
          Vec top, g;
          read(top, best + i * best_stride + at(v));
          read(g, gradient + i * gradient_stride + at(v));
          sum[v] += x[v] == top ? g : zero;
          hits[v] += x[v] == top ? one : zero;
        }
      }
      Row* to = total + segments.target(t) * total_stride;
      const int skipped = kVectors * kLanes - static_cast<int>(width);
      for (int v = 0; v < kVectors; ++v) {
        Row shares[kLanes], count[kLanes];
        std::memcpy(shares, &sum[v * kParts], sizeof(shares));
        std::memcpy(count, &hits[v * kParts], sizeof(count));
        for (int k = v + 1 == kVectors ? skipped : 0; k < kLanes; ++k) {
          to[at(v * kParts) + k] += shares[k];
          all += static_cast<int64_t>(count[k]);
        }
      }
    }
    *reached += all;
  }
};

// Calls run<lanes, vectors> for the tile's width.
template <int kBytes, int kLanes, int kVectors, class Tile>
PYG_SAR_INLINE void run_vectors(const Tile& tile, int64_t first, int64_t last) {
  if constexpr (kVectors > 1) {
    if (tile.width <= (kVectors - 1) * kLanes) return run_vectors<kBytes, kLanes, kVectors - 1>(tile, first, last);
  }
  tile.template run<kBytes, kLanes, kVectors>(first, last);
}

// Adds the tile's columns for a run of targets. GCC makes scalars of comparisons in registers of AVX-512.
template <class Row, class Tile>
void run_tile(const Tile& tile, int64_t first, int64_t last) {
  on_half([&](auto registers) PYG_SAR_INLINED {
    constexpr int kBytes = decltype(registers)::kBytes, kLanes = kFullLanes<Row>;
    constexpr int kPart = kLanes / 4;
    if (tile.width >= kLanes) return run_vectors<kBytes, kLanes, kMostExtremumVectors>(tile, first, last);
    if (tile.width >= kPart) return run_vectors<kBytes, kPart, 4>(tile, first, last);
    if constexpr (kPart > 1) run_vectors<kBytes, 1, kPart - 1>(tile, first, last);
  });
}

namespace {

// Matrices [., F] of one dtype.
void check(const char* op, std::initializer_list<const Tensor*> matrices) {
  const Tensor& first = **matrices.begin();
  for (const Tensor* x : matrices) {
    CHECK_VALUE(x->dim() == 2 && first.dim() == 2 && x->size(1) == first.size(1), op,
                ": expected rows of one width (got shapes ", first.sizes(), " and ",
                x->sizes(), ")");
    CHECK_DTYPE(x->scalar_type() == first.scalar_type(), op,
                ": expected tensors of one dtype (got ", first.scalar_type(), " and ",
                x->scalar_type(), ")");
  }
  CHECK_DTYPE(first.scalar_type() == kFloat || first.scalar_type() == kDouble, op,
              ": expected float32 or float64 (got ", first.scalar_type(), ")");
}

SegmentTensors narrow(const char* op, const Tensor& source, const Tensor& offsets,
                      const OptionalTensor& targets) {
  CHECK_DTYPE(source.scalar_type() == kInt, op, ": expected int32 'source' (got ",
              source.scalar_type(), ")");
  return checked(op, source, offsets, targets, std::nullopt);
}

// Runs work(start, stop) for tiles of columns.
template <class Row, class Work>
void for_tiles(int64_t width, const Work& work) {
  constexpr int64_t kMost = kFullLanes<Row> * kMostExtremumVectors;
  for (int64_t start = 0; start < width; start += kMost) {
    work(start, std::min(start + kMost, width));
  }
}

template <class Row, bool kLargest>
void extremum_of(Tensor& best, Tensor& ties, const Tensor& rows, const SegmentTensors& given) {
  ExtremumTile<Row, kLargest> tile{};
  tile.segments = checked<int32_t>("extremum", given, rows.size(0), best.size(0));
  tile.best_stride = best.stride(0);
  tile.ties_stride = ties.stride(0);
  tile.row_stride = rows.stride(0);
  for_tiles<Row>(rows.size(1), [&](int64_t start, int64_t stop) {
    tile.best = best.mutable_data_ptr<Row>() + start;
    tile.ties = ties.mutable_data_ptr<Row>() + start;
    tile.rows = rows.const_data_ptr<Row>() + start;
    tile.width = stop - start;
    for_targets(tile.segments, [&](int64_t first, int64_t last) { run_tile<Row>(tile, first, last); });
  });
}

template <class Row>
int64_t gradient_of(Tensor& total, const Tensor& rows, const Tensor& gradient, const Tensor& best,
                    const SegmentTensors& given) {
  std::atomic<int64_t> reached{0};
  ExtremumGradientTile<Row> tile{};
  tile.segments =
      checked<int32_t>("extremum_backward", given, std::min(gradient.size(0), best.size(0)),
                       std::min(total.size(0), rows.size(0)));
  tile.total_stride = total.stride(0);
  tile.row_stride = rows.stride(0);
  tile.gradient_stride = gradient.stride(0);
  tile.best_stride = best.stride(0);
  tile.reached = &reached;
  for_tiles<Row>(rows.size(1), [&](int64_t start, int64_t stop) {
    tile.total = total.mutable_data_ptr<Row>() + start;
    tile.rows = rows.const_data_ptr<Row>() + start;
    tile.gradient = gradient.const_data_ptr<Row>() + start;
    tile.best = best.const_data_ptr<Row>() + start;
    tile.width = stop - start;
    for_targets(tile.segments, [&](int64_t first, int64_t last) { run_tile<Row>(tile, first, last); });
  });
  return reached;
}

void extremum_cpu(Tensor& best, Tensor& ties, const Tensor& rows, const Tensor& source,
                  const Tensor& offsets, const OptionalTensor& targets, bool largest) {
  check("extremum", {&best, &ties, &rows});
  CHECK_VALUE(same(best.sizes(), ties.sizes()),
              "extremum: expected 'ties' of the shape of 'best'");
  const SegmentTensors given = narrow("extremum", source, offsets, targets);
  check_written("extremum", "best", best);
  check_written("extremum", "ties", ties);
  check_no_overlap(best, ties);
  check_no_overlap(best, rows);
  check_no_overlap(ties, rows);
  const Tensor x = with_dense_rows(rows);
  if (x.scalar_type() == kFloat) {
    largest ? extremum_of<float, true>(best, ties, x, given)
            : extremum_of<float, false>(best, ties, x, given);
  } else {
    largest ? extremum_of<double, true>(best, ties, x, given)
            : extremum_of<double, false>(best, ties, x, given);
  }
}

Tensor backward_cpu(Tensor& total, const Tensor& rows, const Tensor& gradient, const Tensor& best,
                    const Tensor& source, const Tensor& offsets, const OptionalTensor& targets) {
  constexpr char kName[] = "extremum_backward";
  check(kName, {&total, &rows, &gradient, &best});
  const SegmentTensors given = narrow(kName, source, offsets, targets);
  check_written(kName, "total", total);
  for (const Tensor* x : {&rows, &gradient, &best}) check_no_overlap(total, *x);
  const Tensor x = with_dense_rows(rows), g = with_dense_rows(gradient), b = with_dense_rows(best);
  Tensor reached = empty({}, kLong);
  *reached.mutable_data_ptr<int64_t>() = x.scalar_type() == kFloat
                                             ? gradient_of<float>(total, x, g, b, given)
                                             : gradient_of<double>(total, x, g, b, given);
  return reached;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "extremum_(Tensor(a!) best, Tensor(b!) ties, Tensor rows, Tensor source, Tensor offsets, "
      "Tensor? targets=None, bool largest=True) -> ()");
  m.def(
      "extremum_backward_(Tensor(a!) total, Tensor rows, Tensor gradient, Tensor best, "
      "Tensor source, Tensor offsets, Tensor? targets=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("extremum_", TORCH_BOX(&extremum_cpu));
  m.impl("extremum_backward_", TORCH_BOX(&backward_cpu));
}

}  // namespace pyg_sar
