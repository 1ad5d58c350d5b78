// out[number(e)] = <rows[source[e]], gradient[target(t)]> for the edges e of each target t: the
// gradient of the weights that gather_sum_ takes.


#include <algorithm>

#include "segments.h"
#include "tensors.h"
#include "vectors.h"

namespace pyg_sar {

template <class Row, class Index>
struct Dots {
  Segments<Index> segments;
  Wide<Row>* out;
  const Row* rows;
  const Row* gradient;
  int64_t row_stride, gradient_stride, width;

  // Folds a vector of products in half, and adds those of as many of the columns that are left.
  template <int kLanes>
  PYG_SAR_INLINE Wide<Row> fold(const Vector<Wide<Row>, kLanes>& sum, const Row* x,
                                const Row* g, int64_t left) const {
    if constexpr (kLanes == 1) {
      return sum[0];
    } else {
      Vector<Wide<Row>, kLanes / 2> half[2], a, b;
      std::memcpy(half, &sum, sizeof(sum));
      half[0] += half[1];
      if (left >= kLanes / 2) {
        load<kLanes / 2>(a, x);
        load<kLanes / 2>(b, g);
        half[0] += a * b;
        x += kLanes / 2;
        g += kLanes / 2;
        left -= kLanes / 2;
      }
      return fold<kLanes / 2>(half[0], x, g, left);
    }
  }

  // Registers of kBytes.
  template <int kBytes>
  PYG_SAR_INLINE void go(int64_t first, int64_t last) const {
    constexpr int kLanes = kBytes / sizeof(Wide<Row>);
    constexpr int64_t kAhead = 16, kMostBytes = 1024;
    const int64_t full = width / kLanes * kLanes, final = segments.num_edges - 1;
    const int64_t bytes = std::min<int64_t>(width * sizeof(Row), kMostBytes);
    for (int64_t t = first; t < last; ++t) {
      const Row* g = gradient + segments.target(t) * gradient_stride;
      for (int64_t e = segments.offsets[t]; e < segments.offsets[t + 1]; ++e) {
        const int64_t later = e + kAhead < final ? e + kAhead : final;
        const char* next =
            reinterpret_cast<const char*>(rows + segments.source[later] * row_stride);
        for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(next + at);
        const Row* x = rows + segments.source[e] * row_stride;
        Vector<Wide<Row>, kLanes> sum = {}, a, b;
        for (int64_t f = 0; f < full; f += kLanes) {
          load<kLanes>(a, x + f);
          load<kLanes>(b, g + f);
          sum += a * b;
        }
        out[segments.number(e)] = fold<kLanes>(sum, x + full, g + full, width - full);
      }
    }
  }
};

namespace {

constexpr char kName[] = "edge_dot";

void check(const Tensor& rows, const Tensor& gradient) {
  CHECK_VALUE(
      gradient.dim() == 2 && rows.dim() == 2 && gradient.size(1) == rows.size(1),
      "edge_dot: expected 'rows' and 'gradient' of shapes [M, F] and [N, F] (got ",
      rows.sizes(), " and ", gradient.sizes(), ")");
  CHECK_DTYPE(gradient.scalar_type() == rows.scalar_type(),
              "edge_dot: expected 'rows' and 'gradient' of one dtype (got ",
              rows.scalar_type(), " and ", gradient.scalar_type(), ")");
  check_floating(kName, rows);
}

Tensor edge_dot_cpu(const Tensor& rows, const Tensor& gradient, const Tensor& source,
                    const Tensor& offsets, const OptionalTensor& targets,
                    const OptionalTensor& edges) {
  const SegmentTensors given = checked(kName, source, offsets, targets, edges);
  check(rows, gradient);
  Tensor out = empty(source.sizes(), wide_dtype(rows.scalar_type()));
  if (edges.has_value()) torch::stable::zero_(out);  // in case that numbers are missing
  const Tensor x = with_dense_rows(rows), g = with_dense_rows(gradient);
  const auto run = [&](auto row, auto index) {
    using Row = decltype(row);
    using Index = decltype(index);
    const Dots<Row, Index> dots{checked<Index>(kName, given, x.size(0), g.size(0)),
                                out.mutable_data_ptr<Wide<Row>>(),
                                x.const_data_ptr<Row>(),
                                g.const_data_ptr<Row>(),
                                x.stride(0),
                                g.stride(0),
                                x.size(1)};
    for_targets(dots.segments, [&](int64_t first, int64_t last) {
      on_best([&](auto registers) PYG_SAR_INLINED {
        dots.template go<decltype(registers)::kBytes>(first, last);
      });
    });
  };
  for_dtype(rows.scalar_type(), [&](auto row) {
    given.is_narrow() ? run(row, int32_t{}) : run(row, int64_t{});
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "edge_dot(Tensor rows, Tensor gradient, Tensor source, Tensor offsets, "
      "Tensor? targets=None, Tensor? edges=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("edge_dot", TORCH_BOX(&edge_dot_cpu)); }

}  // namespace pyg_sar
