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
#include <initializer_list>
#include <optional>
#include <vector>

#include "vectors.h"

namespace pyg_sar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Headers of older PyTorch (2.11) have no comparison of them.
inline bool same(Sizes a, Sizes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

constexpr ScalarType kBool = ScalarType::Bool, kInt = ScalarType::Int, kLong = ScalarType::Long;
constexpr ScalarType kFloat = ScalarType::Float, kDouble = ScalarType::Double;
constexpr ScalarType kBFloat16 = ScalarType::BFloat16;

// Errors #######################################################################

// What a message is made of.
struct Piece {
  const char* text = nullptr;
  int64_t number = 0;
  double real = 0;
  Sizes sizes;
  ScalarType dtype = kBool;
  enum { kText, kNumber, kReal, kSizes, kDtype } kind;

  Piece(const char* x) : text(x), kind(kText) {}
  Piece(int64_t x) : number(x), kind(kNumber) {}
  Piece(int x) : number(x), kind(kNumber) {}
  Piece(double x) : real(x), kind(kReal) {}
  Piece(Sizes x) : sizes(x), kind(kSizes) {}
  Piece(ScalarType x) : dtype(x), kind(kDtype) {}
};

// The stable ABI has no kinds of errors, and what becomes of other exceptions differs between versions of
// PyTorch: pyg_sar/kernels/ops.py (named()) knows the kind by how the message begins.
[[noreturn]] void fail(const char* kind, std::initializer_list<Piece> message);

#define PYG_SAR_CHECK(condition, kind, ...) \
  if (!(condition)) ::pyg_sar::fail(kind, {__VA_ARGS__})
#define CHECK_VALUE(condition, ...) PYG_SAR_CHECK(condition, "ValueError", __VA_ARGS__)
#define CHECK_INDEX(condition, ...) PYG_SAR_CHECK(condition, "IndexError", __VA_ARGS__)
#define CHECK_DTYPE(condition, ...) PYG_SAR_CHECK(condition, "TypeError", __VA_ARGS__)

// Tensors ######################################################################

Tensor empty(Sizes shape, ScalarType dtype);
Tensor as_contiguous(const Tensor& x);
Tensor as_dtype(const Tensor& x, ScalarType dtype);
// Rows that lie in one piece each; a copy where they don't.
Tensor with_dense_rows(const Tensor& x);

// Refuses a tensor to add to of which two numbers lie in one place.
void check_no_internal_overlap(const Tensor& x);
// Refuses a matrix to add to whose rows don't lie in one piece each, or overlap.
void check_written(const char* op, const char* name, const Tensor& x);
// Refuses a matrix that overlaps one that is added to: where both are dense, or the same.
void check_no_overlap(const Tensor& out, const Tensor& x);
void check_floating(const char* op, const Tensor& x);

// What values of a dtype are added up in.
inline ScalarType wide_dtype(ScalarType dtype) { return dtype == kDouble ? kDouble : kFloat; }

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
