// What all kernels ask of the tensors that they are given.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>

#include <optional>

namespace pyg_sar {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Rows that lie in one piece each; a copy where they don't.
inline Tensor with_dense_rows(const Tensor& x) {
  int64_t expected = 1;
  for (int64_t axis = x.dim() - 1; axis > 0; --axis) {
    if (x.size(axis) != 1 && x.stride(axis) != expected) return x.contiguous();
    expected *= x.size(axis);
  }
  return x;
}

// Refuses a matrix to add to whose rows don't lie in one piece each, or overlap.
inline void check_written(const char* op, const char* name, const Tensor& x) {
  TORCH_CHECK_VALUE(x.size(1) <= 1 || x.stride(1) == 1, op, ": expected rows of '", name,
                    "' that lie in one piece (got strides ", x.strides(), ")");
  at::assert_no_internal_overlap(x);
}

// What values of a dtype are added up in.
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_floating(const char* op, const Tensor& x) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16, op,
                   ": expected float32, float64 or bfloat16 (got ", dtype, ")");
}

// Calls run(row) with a number of the type of float32, float64 or bfloat16.
template <class Run>
void for_dtype(at::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case at::kFloat: return run(float{});
    case at::kDouble: return run(double{});
    default: return run(c10::BFloat16{});
  }
}

}  // namespace pyg_sar
