// Rows of what Tensor.bernoulli_(p) draws from PyTorch's CPU generator, a Mersenne twister.
//
// Source: Matsumoto, Nishimura, "Mersenne twister: a 623-dimensionally equidistributed uniform pseudorandom
// number generator" (ACM TOMACS 8, 1998). A value of PyTorch's bernoulli_ takes two words of 32 bits, of
// which 53 bits are a number in [0, 1). Words that belong to other rows are passed over, not made.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "processors.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

constexpr int64_t kTwist = 624, kApart = 397;
constexpr int64_t kAhead = 24;         // rows that are fetched before they are drawn
constexpr int64_t kStateBytes = 5056;  // of torch.get_rng_state()

// How torch.get_rng_state() begins (at::CPUGeneratorImplStateLegacy); `left` is one more than the words
// that are left.
struct Saved {
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next, words[kTwist];
};

// Values of two words each, of which an array has kValues. Where an odd number of words was taken before,
// the first word of an array's first value is the last of the array before.
class Values {
 public:
  Values(const Saved& saved, uint64_t bound)
      : bound_(bound), left_((saved.left - 1) / 2), is_odd_((saved.left - 1) % 2 != 0) {
    for (int64_t i = 0; i < kTwist; ++i) words_[i + 1] = static_cast<uint32_t>(saved.words[i]);
  }

  void save(Saved& saved) const {
    const int64_t words = 2 * left_ + (is_odd_ ? 1 : 0);
    for (int64_t i = 0; i < kTwist; ++i) saved.words[i] = words_[i + 1];
    saved.left = static_cast<int32_t>(words + 1);
    saved.next = static_cast<uint64_t>(kTwist - words);
  }

  PYG_SAR_INLINE void pass(int64_t count) {
    for (; count > left_; renew()) count -= left_;
    left_ -= count;
  }

  // Which are below the bound.
  PYG_SAR_INLINE void draw(bool* out, int64_t count) {
    while (count > 0) {
      if (left_ == 0) renew();
      if (!made_) make();
      const bool* from = below_ + (kValues - left_);
      const int64_t some = std::min(count, left_);
      int64_t at = some / 8 * 8;
      if (at > 0) std::memcpy(out, from, at);
      if ((some & 4) != 0) std::memcpy(out + at, from + at, 4), at += 4;
      if ((some & 2) != 0) std::memcpy(out + at, from + at, 2), at += 2;
      if ((some & 1) != 0) out[at] = from[at];
      out += some, count -= some, left_ -= some;
    }
  }

 private:
  static constexpr int64_t kValues = kTwist / 2;
  uint64_t bound_;
  int64_t left_;  // values of this array that are not taken yet
  bool is_odd_, made_ = false;
  bool below_[kValues];
  uint32_t words_[1 + kTwist];  // the last of the array before, and the array

  PYG_SAR_INLINE void renew() {
    const auto mixed = [](uint32_t high, uint32_t low) PYG_SAR_INLINED {
      return (((high & 0x80000000u) | (low & 0x7FFFFFFFu)) >> 1) ^ (-(low & 1u) & 0x9908B0DFu);
    };
    uint32_t* w = words_ + 1;
    words_[0] = w[kTwist - 1];
    int64_t i = 0;
    for (; i < kTwist - kApart; ++i) w[i] = w[i + kApart] ^ mixed(w[i], w[i + 1]);
    for (; i < kTwist - 1; ++i) w[i] = w[i + kApart - kTwist] ^ mixed(w[i], w[i + 1]);
    w[i] = w[kApart - 1] ^ mixed(w[i], w[0]);
    left_ = kValues;
    made_ = false;
  }

  PYG_SAR_INLINE void make() {
    uint32_t tempered[kTwist];
    const uint32_t* from = words_ + (is_odd_ ? 0 : 1);
    for (int64_t i = 0; i < kTwist; ++i) {
      uint32_t y = from[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9D2C5680u;
      y ^= (y << 15) & 0xEFC60000u;
      tempered[i] = y ^ (y >> 18);
    }
    for (int64_t i = 0; i < kValues; ++i) {
      const uint64_t bits = uint64_t{tempered[2 * i]} << 32 | tempered[2 * i + 1];
      below_[i] = (bits & ((uint64_t{1} << 53) - 1)) < bound_;
    }
    made_ = true;
  }
};

// Row k of the first result [n, width] is row ids[k] of all, true with probability p; the second is the
// generator's state after all rows. `order`: places of ids in ascending order; null: they are in it.
std::tuple<Tensor, Tensor> bernoulli_rows_cpu(const Tensor& state, const Tensor& ids, const OptionalTensor& order,
                                              int64_t total, int64_t width, double p) {
  CHECK_VALUE(p >= 0 && p <= 1, "bernoulli_rows: expected 'p' in [0, 1] (got ", p, ")");
  CHECK_VALUE(width >= 0, "bernoulli_rows: expected 'width' >= 0 (got ", width, ")");
  CHECK_VALUE(ids.dim() == 1, "bernoulli_rows: expected 'ids' of shape [n] (got ", ids.sizes(), ")");
  CHECK_DTYPE(ids.scalar_type() == kLong, "bernoulli_rows: expected int64 'ids' (got ",
              ids.scalar_type(), ")");
  CHECK_VALUE(!order.has_value() || (order->dim() == 1 && order->numel() == ids.numel()),
              "bernoulli_rows: expected 'order' of shape ", ids.sizes());
  CHECK_DTYPE(!order.has_value() || order->scalar_type() == kInt,
              "bernoulli_rows: expected int32 'order' (got ", order->scalar_type(), ")");
  CHECK_VALUE(state.dim() == 1 && state.numel() == kStateBytes && state.scalar_type() == ScalarType::Byte,
              "bernoulli_rows: expected 'state' of torch.get_rng_state() (got shape ", state.sizes(), ")");
  const Tensor out = empty({ids.size(0), width}, kBool), after = torch::stable::clone(state);
  const Tensor dense = as_contiguous(ids);
  const Tensor ordered = order.has_value() ? as_contiguous(*order) : dense;
  const int32_t* places = order.has_value() ? ordered.const_data_ptr<int32_t>() : nullptr;
  Saved saved;
  std::memcpy(&saved, after.const_data_ptr(), sizeof saved);
  CHECK_VALUE(saved.left > 0 && saved.left <= kTwist, "bernoulli_rows: expected 'state' of torch.get_rng_state()");
  Values values(saved, static_cast<uint64_t>(std::ceil(std::ldexp(p, 53))));
  const int64_t rows = dense.numel(), *id = dense.const_data_ptr<int64_t>();
  bool* to = out.mutable_data_ptr<bool>();
  on_best([&](auto) PYG_SAR_INLINED {
    int64_t row = 0, last = 0;  // the next that is not drawn, and where the one before it went
    for (int64_t n = 0; n < rows; ++n) {
      if (places != nullptr && n + kAhead < rows) {
        const int64_t later = places[n + kAhead];
        __builtin_prefetch(id + later);
        __builtin_prefetch(to + later * width, 1);
      }
      const int64_t k = places == nullptr ? n : places[n];
      CHECK_INDEX(k >= 0 && k < rows, "bernoulli_rows: expected 'order' of ids (got ", k, ")");
      if (n > 0 && id[k] == row - 1) {
        std::copy_n(to + last * width, width, to + k * width);
        continue;
      }
      CHECK_INDEX(id[k] >= row && id[k] < total,
                  "bernoulli_rows: expected ascending 'ids' below ", total, " (got ", id[k], ")");
      values.pass(width * (id[k] - row));
      row = id[k] + 1;
      last = k;
      values.draw(to + k * width, width);
    }
    values.pass(width * (total - row));
  });
  if (total * width > 0) {
    values.save(saved);
    std::memcpy(after.mutable_data_ptr(), &saved, sizeof saved);
  }
  return {out, after};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("bernoulli_rows(Tensor state, Tensor ids, Tensor? order, SymInt total, SymInt width, float p) "
        "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("bernoulli_rows", TORCH_BOX(&bernoulli_rows_cpu)); }

}  // namespace pyg_sar
