// Tensors of PyTorch's stable ABI, and what all kernels ask of those that they are given.
//
// Nothing but torch/csrc/stable and torch/headeronly may be included: one build of the library runs in
// PyTorch 2.10 and all later ones (TORCH_TARGET_VERSION in setup.py).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "vectors.h"

namespace pyg_sar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

constexpr ScalarType kBool = ScalarType::Bool, kInt = ScalarType::Int, kLong = ScalarType::Long;
constexpr ScalarType kFloat = ScalarType::Float, kDouble = ScalarType::Double;
constexpr ScalarType kBFloat16 = ScalarType::BFloat16;

// Errors #######################################################################

// The stable ABI has no kinds of errors, and what becomes of other exceptions differs between versions of
// PyTorch: pyg_sar/kernels/ops.py (named()) knows the kind by how the message begins.
struct Error : std::runtime_error {
  Error(const char* kind, const std::string& text)
      : std::runtime_error(std::string(kind) + ": " + text) {}
};

template <class T>
void write(std::ostream& out, const T& x) {
  out << x;
}
inline void write(std::ostream& out, Sizes x) {
  for (size_t axis = 0; axis < x.size(); ++axis) out << (axis == 0 ? "[" : ", ") << x[axis];
  out << (x.empty() ? "[]" : "]");
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (write(out, parts), ...);
  return out.str();
}

#define PYG_SAR_CHECK(condition, kind, ...) \
  if (!(condition)) throw ::pyg_sar::Error(kind, ::pyg_sar::text(__VA_ARGS__))
#define CHECK_VALUE(condition, ...) PYG_SAR_CHECK(condition, "ValueError", __VA_ARGS__)
#define CHECK_INDEX(condition, ...) PYG_SAR_CHECK(condition, "IndexError", __VA_ARGS__)
#define CHECK_DTYPE(condition, ...) PYG_SAR_CHECK(condition, "TypeError", __VA_ARGS__)

// Tensors ######################################################################

inline Tensor empty(Sizes shape, ScalarType dtype) { return torch::stable::empty(shape, dtype); }

inline Tensor as_contiguous(const Tensor& x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

inline Tensor as_dtype(const Tensor& x, ScalarType dtype) {
  return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

// Rows that lie in one piece each; a copy where they don't.
inline Tensor with_dense_rows(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  int64_t expected = 1;
  for (int64_t axis = x.dim() - 1; axis > 0; --axis) {
    if (sizes[axis] != 1 && strides[axis] != expected) return torch::stable::contiguous(x);
    expected *= sizes[axis];
  }
  return x;
}

// Refuses a tensor to add to of which two numbers lie in one place.
inline void check_no_internal_overlap(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  bool repeated = false;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    repeated |= strides[axis] == 0 && sizes[axis] > 1;
  }
  STD_TORCH_CHECK(!repeated || x.numel() == 0,
                  "more than one element of a tensor that is added to refers to a single memory location");
}

// Refuses a matrix to add to whose rows don't lie in one piece each, or overlap.
inline void check_written(const char* op, const char* name, const Tensor& x) {
  CHECK_VALUE(x.size(1) <= 1 || x.stride(1) == 1, op, ": expected rows of '", name,
              "' that lie in one piece (got strides ", x.strides(), ")");
  check_no_internal_overlap(x);
}

// Refuses a matrix that overlaps one that is added to: where both are dense, or the same.
inline void check_no_overlap(const Tensor& out, const Tensor& x) {
  if (out.numel() == 0 || x.numel() == 0) return;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * t.element_size(); };
  const auto dense = [](const Tensor& t) {
    const bool columns = t.dim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0);
    return columns || t.is_contiguous();
  };
  const bool overlap = dense(out) && dense(x)
                           ? begin(out) < end(x) && begin(x) < end(out)
                           : begin(out) == begin(x) && out.sizes() == x.sizes() &&
                                 out.strides() == x.strides();
  STD_TORCH_CHECK(!overlap, "some elements of a tensor that is added to and of one that is read refer to "
                            "a single memory location");
}

// What values of a dtype are added up in.
inline ScalarType wide_dtype(ScalarType dtype) { return dtype == kDouble ? kDouble : kFloat; }

inline void check_floating(const char* op, const Tensor& x) {
  const auto dtype = x.scalar_type();
  CHECK_DTYPE(dtype == kFloat || dtype == kDouble || dtype == kBFloat16, op,
              ": expected float32, float64 or bfloat16 (got ", dtype, ")");
}

// Calls run(row) with a number of the type of float32, float64 or bfloat16.
template <class Run>
void for_dtype(ScalarType dtype, const Run& run) {
  switch (dtype) {
    case kFloat: return run(float{});
    case kDouble: return run(double{});
    default: return run(BFloat16{});
  }
}

}  // namespace pyg_sar
