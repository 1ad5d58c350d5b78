// What all kernels ask of tensors, and how threads share work: compiled once.

#include "tensors.h"

#include <atomic>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "parallel.h"

namespace pyg_sar {
namespace {

void write(std::ostream& out, const Piece& x) {
  switch (x.kind) {
    case Piece::kText: out << x.text; return;
    case Piece::kNumber: out << x.number; return;
    case Piece::kReal: out << x.real; return;
    case Piece::kDtype: out << x.dtype; return;
    case Piece::kSizes: break;
  }
  for (size_t axis = 0; axis < x.sizes.size(); ++axis) out << (axis == 0 ? "[" : ", ") << x.sizes[axis];
  out << (x.sizes.empty() ? "[]" : "]");
}

}  // namespace

void fail(const char* kind, std::initializer_list<Piece> message) {
  std::ostringstream out;
  out << kind << ": ";
  for (const Piece& piece : message) write(out, piece);
  throw std::runtime_error(out.str());
}

// Tensors ######################################################################

Tensor empty(Sizes shape, ScalarType dtype) { return torch::stable::empty(shape, dtype); }

Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

Tensor as_dtype(const Tensor& x, ScalarType dtype) {
  return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
}

Tensor with_dense_rows(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  int64_t expected = 1;
  for (int64_t axis = x.dim() - 1; axis > 0; --axis) {
    if (sizes[axis] != 1 && strides[axis] != expected) return torch::stable::contiguous(x);
    expected *= sizes[axis];
  }
  return x;
}

void check_no_internal_overlap(const Tensor& x) {
  const Sizes sizes = x.sizes(), strides = x.strides();
  bool repeated = false;
  for (size_t axis = 0; axis < sizes.size(); ++axis) {
    repeated |= strides[axis] == 0 && sizes[axis] > 1;
  }
  STD_TORCH_CHECK(!repeated || x.numel() == 0,
                  "more than one element of a tensor that is added to refers to a single memory location");
}

void check_written(const char* op, const char* name, const Tensor& x) {
  CHECK_VALUE(x.size(1) <= 1 || x.stride(1) == 1, op, ": expected rows of '", name,
              "' that lie in one piece (got strides ", x.strides(), ")");
  check_no_internal_overlap(x);
}

void check_no_overlap(const Tensor& out, const Tensor& x) {
  if (out.numel() == 0 || x.numel() == 0) return;
  const auto begin = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()); };
  const auto end = [&](const Tensor& t) { return begin(t) + t.numel() * t.element_size(); };
  const auto dense = [](const Tensor& t) {
    const bool columns = t.dim() == 2 && t.stride(0) == 1 && t.stride(1) == t.size(0);
    return columns || t.is_contiguous();
  };
  const bool overlap = dense(out) && dense(x)
                           ? begin(out) < end(x) && begin(x) < end(out)
                           : begin(out) == begin(x) && same(out.sizes(), x.sizes()) &&
                                 same(out.strides(), x.strides());
  STD_TORCH_CHECK(!overlap, "some elements of a tensor that is added to and of one that is read refer to "
                            "a single memory location");
}

void check_floating(const char* op, const Tensor& x) {
  const auto dtype = x.scalar_type();
  CHECK_DTYPE(dtype == kFloat || dtype == kDouble || dtype == kBFloat16, op,
              ": expected float32, float64 or bfloat16 (got ", dtype, ")");
}

// Threads ######################################################################

#ifndef PYG_SAR_STANDARD_THREADS
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work) {
  torch::stable::parallel_for(begin, end, grain_size, work);
}
#else
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work) {
  const int64_t most = (end - begin + grain_size - 1) / std::max<int64_t>(grain_size, 1);
  const int64_t count = std::min<int64_t>(get_num_threads(), most);
  const int64_t each = count > 0 ? (end - begin + count - 1) / count : 0;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += each) {
    threads.emplace_back([&work, first, last = std::min(first + each, end)] { work(first, last); });
  }
  for (std::thread& thread : threads) thread.join();
}
#endif

void for_runs(int64_t count, int64_t size, const Work& work) {
  const int64_t runs = (count + size - 1) / size, threads = std::min<int64_t>(get_num_threads(), runs);
  std::atomic<int64_t> next{0};
  parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t run = next++; run < runs; run = next++) {
      work(run * size, std::min((run + 1) * size, count));
    }
  });
}

}  // namespace pyg_sar
