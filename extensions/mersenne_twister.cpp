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
constexpr int64_t kStateBytes = 5056;  // of torch.get_rng_state()

// How torch.get_rng_state() begins (at::CPUGeneratorImplStateLegacy); `left` is one more than the words that are left.
struct Saved {
  uint64_t seed;
  int32_t left, seeded;
  uint64_t next, words[kTwist];
};

struct Twister {
  uint32_t words[kTwist];
  int64_t left;  // words that are not taken yet, the last of the array

  PYG_SAR_INLINE void renew() {
    const auto mixed = [](uint32_t high, uint32_t low) PYG_SAR_INLINED {
      return (((high & 0x80000000u) | (low & 0x7FFFFFFFu)) >> 1) ^ (-(low & 1u) & 0x9908B0DFu);
    };
    int64_t i = 0;
    for (; i < kTwist - kApart; ++i) words[i] = words[i + kApart] ^ mixed(words[i], words[i + 1]);
    for (; i < kTwist - 1; ++i) words[i] = words[i + kApart - kTwist] ^ mixed(words[i], words[i + 1]);
    words[i] = words[kApart - 1] ^ mixed(words[i], words[0]);
    left = kTwist;
  }

  PYG_SAR_INLINE void pass(int64_t count) {
    for (; count > left; renew()) count -= left;
    left -= count;
  }

  static PYG_SAR_INLINE uint64_t tempered(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9D2C5680u;
    y ^= (y << 15) & 0xEFC60000u;
    return y ^ (y >> 18);
  }

  static PYG_SAR_INLINE bool below(uint32_t high, uint32_t low, uint64_t bound) {
    const uint64_t bits = tempered(high) << 32 | tempered(low);
    return (bits & ((uint64_t{1} << 53) - 1)) < bound;
  }

  PYG_SAR_INLINE void draw(bool* out, int64_t count, uint64_t bound) {
    while (count > 0) {
      if (left == 0) renew();
      if (left == 1) {  // A value's two words lie in two arrays.
        const uint32_t high = words[kTwist - 1];
        renew();
        *out++ = below(high, words[0], bound);
        --left, --count;
        continue;
      }
      const uint32_t* from = words + (kTwist - left);
      const int64_t some = std::min(count, left / 2);
      for (int64_t i = 0; i < some; ++i) out[i] = below(from[2 * i], from[2 * i + 1], bound);
      out += some, count -= some, left -= 2 * some;
    }
  }
};

std::tuple<Tensor, Tensor> bernoulli_rows_cpu(const Tensor& state, const Tensor& ids, int64_t total,
                                              int64_t width, double p) {
  CHECK_VALUE(p >= 0 && p <= 1, "bernoulli_rows: expected 'p' in [0, 1] (got ", p, ")");
  CHECK_VALUE(width >= 0, "bernoulli_rows: expected 'width' >= 0 (got ", width, ")");
  CHECK_VALUE(ids.dim() == 1, "bernoulli_rows: expected 'ids' of shape [n] (got ", ids.sizes(), ")");
  CHECK_DTYPE(ids.scalar_type() == kLong, "bernoulli_rows: expected int64 'ids' (got ", ids.scalar_type(), ")");
  CHECK_VALUE(state.dim() == 1 && state.numel() == kStateBytes && state.scalar_type() == ScalarType::Byte,
              "bernoulli_rows: expected 'state' of torch.get_rng_state() (got shape ", state.sizes(), ")");
  const Tensor out = empty({ids.size(0), width}, kBool), after = torch::stable::clone(state);
  const Tensor dense = as_contiguous(ids);
  Saved saved;
  std::memcpy(&saved, after.const_data_ptr(), sizeof saved);
  CHECK_VALUE(saved.left > 0 && saved.left <= kTwist, "bernoulli_rows: expected 'state' of torch.get_rng_state()");
  Twister twister;
  for (int64_t i = 0; i < kTwist; ++i) twister.words[i] = static_cast<uint32_t>(saved.words[i]);
  twister.left = saved.left - 1;
  const int64_t* id = dense.const_data_ptr<int64_t>();
  bool* to = out.mutable_data_ptr<bool>();
  const uint64_t bound = static_cast<uint64_t>(std::ceil(std::ldexp(p, 53)));
  on_best([&](auto) PYG_SAR_INLINED {
    int64_t row = 0;  // the next that is not drawn
    for (int64_t k = 0; k < dense.numel(); ++k) {
      if (k > 0 && id[k] == id[k - 1]) {
        std::copy_n(to + (k - 1) * width, width, to + k * width);
        continue;
      }
      CHECK_INDEX(id[k] >= row && id[k] < total,
                  "bernoulli_rows: expected ascending 'ids' below ", total, " (got ", id[k], ")");
      twister.pass(2 * width * (id[k] - row));
      row = id[k] + 1;
      twister.draw(to + k * width, width, bound);
    }
    twister.pass(2 * width * (total - row));
  });
  if (total * width > 0) {
    for (int64_t i = 0; i < kTwist; ++i) saved.words[i] = twister.words[i];
    saved.left = static_cast<int32_t>(twister.left + 1);
    saved.next = static_cast<uint64_t>(kTwist - twister.left);
    std::memcpy(after.mutable_data_ptr(), &saved, sizeof saved);
  }
  return {out, after};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("bernoulli_rows(Tensor state, Tensor ids, SymInt total, SymInt width, float p) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("bernoulli_rows", TORCH_BOX(&bernoulli_rows_cpu)); }

}  // namespace pyg_sar
