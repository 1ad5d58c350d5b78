// Moments of columns, and rows made of them: what norms over nodes read their rows for.
//
// Rows are taken in blocks whose size depends on their number alone, and blocks are merged in order: so
// results don't depend on the number of threads. Sums of a few rows, which stay in a cache, are of the
// rows' dtype (float32 at least); what is made of these is float64.


#include <algorithm>
#include <vector>

#include "parallel.h"
#include "tensors.h"
#include "vectors.h"

namespace pyg_sar {
namespace {

constexpr int64_t kRows = 32;      // rows that are added up in their own dtype
constexpr int64_t kBlocks = 512;   // at most
constexpr int64_t kGrain = 32768;  // values that are worth a thread

template <class Row>
struct Rows {
  const Row* first;
  int64_t stride, count, width;

  explicit Rows(const Tensor& x)
      : first(x.const_data_ptr<Row>()), stride(x.stride(0)), count(x.size(0)), width(x.size(1)) {}
  const Row* operator[](int64_t row) const { return first + row * stride; }
};

int64_t grain(int64_t values) { return std::max<int64_t>(kGrain / std::max<int64_t>(values, 1), 1); }

// Rows of each block but the last.
int64_t block_rows(int64_t count) {
  return (std::max(16 * kRows, (count - 1) / kBlocks + 1) + kRows - 1) / kRows * kRows;
}

// Calls run(begin, end, found, found + width) for each block of rows, in any order.
template <class Run>
Tensor by_block(const Tensor& x, const Run& run) {
  const int64_t count = x.size(0), width = x.size(1), rows = block_rows(count);
  const int64_t blocks = (count + rows - 1) / rows;
  Tensor found = empty({blocks, 2, width}, kDouble);
  double* to = found.mutable_data_ptr<double>();
  parallel_for(0, blocks, grain(rows * width), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double* at = to + 2 * k * width;
      std::fill(at, at + 2 * width, 0.);
      run(k * rows, std::min((k + 1) * rows, count), at, at + width);
    }
  });
  return found;
}

// Merges the mean and the sum of squared distances from it of `more` rows into those of `count` rows
// (Chan et al., 1979).
PYG_SAR_INLINE void merge(double count, double& mean, double& squares, double more, double mean_of_more,
                          double squares_of_more) {
  const double apart = mean_of_more - mean, share = more / (count + more);
  mean += apart * share;
  squares += squares_of_more + apart * apart * count * share;
}

template <class Row>
void add_moments(const Rows<Row>& x, int64_t begin, int64_t end, double* mean, double* squares) {
  using Acc = Wide<Row>;
  std::vector<Acc> scratch(3 * x.width);
  Acc *centre = scratch.data(), *left = centre + x.width, *square = left + x.width;
  on_best([&](auto) PYG_SAR_INLINED {
    for (int64_t at = begin; at < end; at += kRows) {
      const int64_t stop = std::min(at + kRows, end);
      const double count = static_cast<double>(at - begin), more = static_cast<double>(stop - at);
      std::fill(centre, centre + 3 * x.width, Acc(0));
      for (int64_t i = at; i < stop; ++i) {
        const Row* row = x[i];
#pragma omp simd
        for (int64_t c = 0; c < x.width; ++c) centre[c] += static_cast<Acc>(row[c]);
      }
#pragma omp simd
      for (int64_t c = 0; c < x.width; ++c) centre[c] /= static_cast<Acc>(stop - at);
      // About the rounded mean; what is left of the sum corrects both.
      for (int64_t i = at; i < stop; ++i) {
        const Row* row = x[i];
#pragma omp simd
        for (int64_t c = 0; c < x.width; ++c) {
          const Acc apart = static_cast<Acc>(row[c]) - centre[c];
          left[c] += apart;
          square[c] += apart * apart;
        }
      }
#pragma omp simd
      for (int64_t c = 0; c < x.width; ++c) {
        const double rest = left[c];
        merge(count, mean[c], squares[c], more, centre[c] + rest / more, square[c] - rest * rest / more);
      }
    }
  });
}

template <class Row>
void add_products(const Rows<Row>& gradient, const Rows<Row>& x, const Wide<Row>* shift, int64_t begin,
                  int64_t end, double* total, double* product) {
  using Acc = Wide<Row>;
  const int64_t width = x.width;
  std::vector<Acc> scratch(2 * width);
  Acc *sum = scratch.data(), *scaled = sum + width;
  on_best([&](auto) PYG_SAR_INLINED {
    for (int64_t at = begin; at < end; at += kRows) {
      std::fill(sum, sum + 2 * width, Acc(0));
      for (int64_t i = at; i < std::min(at + kRows, end); ++i) {
        const Row *g = gradient[i], *row = x[i];
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) {
          const Acc value = static_cast<Acc>(g[c]);
          sum[c] += value;
          scaled[c] += value * (static_cast<Acc>(row[c]) - shift[c]);
        }
      }
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        total[c] += sum[c];
        product[c] += scaled[c];
      }
    }
  });
}

// One number for each column, in what rows are computed with.
Tensor by_column(const char* op, const char* name, const Tensor& values, const Tensor& x) {
  CHECK_VALUE(values.numel() == x.size(1), op, ": expected '", name, "' to have ", x.size(1),
              " numbers (got ", values.sizes(), ")");
  return as_contiguous(as_dtype(values, wide_dtype(x.scalar_type())));
}

void check_rows(const char* op, const Tensor& x) {
  CHECK_VALUE(x.dim() == 2, op, ": expected rows [N, F] (got ", x.sizes(), ")");
  check_floating(op, x);
}

void check_alike(const char* op, const Tensor& x, const Tensor& gradient) {
  check_rows(op, gradient);
  CHECK_VALUE(same(x.sizes(), gradient.sizes()), op, ": expected 'gradient' of shape ", x.sizes(),
              " (got ", gradient.sizes(), ")");
  CHECK_DTYPE(x.scalar_type() == gradient.scalar_type(), op, ": expected 'gradient' of dtype ",
              x.scalar_type(), " (got ", gradient.scalar_type(), ")");
}

Tensor column_moments_cpu(const Tensor& given) {
  check_rows("column_moments", given);
  const Tensor x = with_dense_rows(given);
  Tensor result = empty({2, x.size(1)}, kDouble);
  torch::stable::zero_(result);
  for_dtype(x.scalar_type(), [&](auto row) {
    const Rows<decltype(row)> rows(x);
    const Tensor found = by_block(x, [&](int64_t begin, int64_t end, double* mean, double* squares) {
      add_moments(rows, begin, end, mean, squares);
    });
    const int64_t width = rows.width, size = block_rows(rows.count);
    const double* from = found.const_data_ptr<double>();
    double* to = result.mutable_data_ptr<double>();
    for (int64_t k = 0; k < found.size(0); ++k, from += 2 * width) {
      const auto before = static_cast<double>(k * size);
      const auto more = static_cast<double>(std::min(size, rows.count - k * size));
      for (int64_t c = 0; c < width; ++c) merge(before, to[c], to[width + c], more, from[c], from[width + c]);
    }
  });
  return result;
}

Tensor column_products_cpu(const Tensor& gradient, const Tensor& x, const Tensor& shift) {
  check_rows("column_products", x);
  check_alike("column_products", x, gradient);
  const Tensor g = with_dense_rows(gradient), rows = with_dense_rows(x);
  const Tensor centre = by_column("column_products", "shift", shift, x);
  OptionalTensor found;
  for_dtype(x.scalar_type(), [&](auto row) {
    using Row = decltype(row);
    const Rows<Row> from(rows), of(g);
    const auto* at = centre.const_data_ptr<Wide<Row>>();
    found = by_block(rows, [&](int64_t begin, int64_t end, double* total, double* product) {
      add_products(of, from, at, begin, end, total, product);
    });
  });
  const std::array<int64_t, 1> blocks{0};
  return torch::stable::sum(*found, Sizes(blocks));
}

Tensor scale_rows_cpu(const Tensor& given, const Tensor& shift, const Tensor& scale,
                      const Tensor& offset, const OptionalTensor& gradient, const OptionalTensor& factor) {
  constexpr char kName[] = "scale_rows";
  check_rows(kName, given);
  CHECK_VALUE(gradient.has_value() == factor.has_value(), kName,
              ": expected 'gradient' and 'factor', or neither");
  if (gradient.has_value()) check_alike(kName, given, *gradient);
  const Tensor x = with_dense_rows(given), g = gradient.has_value() ? with_dense_rows(*gradient) : x;
  const Tensor shifts = by_column(kName, "shift", shift, x), scales = by_column(kName, "scale", scale, x);
  const Tensor offsets = by_column(kName, "offset", offset, x);
  const Tensor factors = factor.has_value() ? by_column(kName, "factor", *factor, x) : shifts;
  Tensor out = empty(x.sizes(), x.scalar_type());
  for_dtype(x.scalar_type(), [&](auto row) {
    using Row = decltype(row);
    using Acc = Wide<Row>;
    const Rows<Row> from(x), of(g);
    const Acc *a = shifts.const_data_ptr<Acc>(), *s = scales.const_data_ptr<Acc>();
    const Acc *o = offsets.const_data_ptr<Acc>(), *f = factors.const_data_ptr<Acc>();
    Row* to = out.mutable_data_ptr<Row>();
    const int64_t width = from.width;
    const bool adds = gradient.has_value();
    parallel_for(0, from.count, grain(width), [&](int64_t begin, int64_t end) {
      on_best([&](auto) PYG_SAR_INLINED {
        for (int64_t i = begin; i < end; ++i) {
          const Row *in = from[i], *with = of[i];
          Row* result = to + i * width;
          if (adds) {
#pragma omp simd
            for (int64_t c = 0; c < width; ++c) {
              result[c] = static_cast<Row>((static_cast<Acc>(in[c]) - a[c]) * s[c] +
                                           (static_cast<Acc>(with[c]) - o[c]) * f[c]);
            }
          } else {
#pragma omp simd
            for (int64_t c = 0; c < width; ++c) {
              result[c] = static_cast<Row>((static_cast<Acc>(in[c]) - a[c]) * s[c] + o[c]);
            }
          }
        }
      });
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("column_moments(Tensor x) -> Tensor");
  m.def("column_products(Tensor gradient, Tensor x, Tensor shift) -> Tensor");
  m.def(
      "scale_rows(Tensor x, Tensor shift, Tensor scale, Tensor offset, Tensor? gradient=None, "
      "Tensor? factor=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("column_moments", TORCH_BOX(&column_moments_cpu));
  m.impl("column_products", TORCH_BOX(&column_products_cpu));
  m.impl("scale_rows", TORCH_BOX(&scale_rows_cpu));
}


}  // namespace pyg_sar
