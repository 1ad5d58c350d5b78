// Philox4x32-10: a row of random words for each id, a function of the id, the place and the key.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011);
// pyg_sar/space/draws.py has the same in PyTorch.


#include <algorithm>

#include "parallel.h"
#include "processors.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

constexpr int64_t kWords = 4;     // of a counter
constexpr int64_t kBatch = 16;    // counters whose rounds are computed side by side
constexpr int64_t kGrain = 4096;  // words of a task

// Counters (low word of the id, high word of the id, block, 0), which become their words.
struct Batch {
  uint32_t c[kWords][kBatch];

  PYG_SAR_INLINE void go(uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
      for (int64_t b = 0; b < kBatch; ++b) {
        const uint64_t first = uint64_t{0xD2511F53u} * c[0][b];
        const uint64_t second = uint64_t{0xCD9E8D57u} * c[2][b];
        c[0][b] = static_cast<uint32_t>(second >> 32) ^ c[1][b] ^ k0;
        c[2][b] = static_cast<uint32_t>(first >> 32) ^ c[3][b] ^ k1;
        c[1][b] = static_cast<uint32_t>(second);
        c[3][b] = static_cast<uint32_t>(first);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// Rows first to last - 1, each of `width` words; a batch may hold counters of several.
PYG_SAR_INLINE void fill(int64_t* out, const int64_t* ids, int64_t first, int64_t last,
                         int64_t width, uint32_t k0, uint32_t k1) {
  const int64_t blocks = (width + kWords - 1) / kWords;
  int64_t* to[kBatch];
  int64_t some[kBatch];
  Batch batch{};
  for (int64_t r = first, block = 0; r < last && blocks > 0;) {
    int64_t count = 0;
    for (; count < kBatch && r < last; ++count) {
      const uint64_t id = static_cast<uint64_t>(ids[r]);
      batch.c[0][count] = static_cast<uint32_t>(id);
      batch.c[1][count] = static_cast<uint32_t>(id >> 32);
      batch.c[2][count] = static_cast<uint32_t>(block);
      batch.c[3][count] = 0;
      to[count] = out + r * width + block * kWords;
      some[count] = std::min(width - block * kWords, kWords);
      if (++block == blocks) {
        block = 0;
        ++r;
      }
    }
    batch.go(k0, k1);
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t w = 0; w < some[b]; ++w) to[b][w] = batch.c[w][b];
    }
  }
}

void check(const Tensor& ids, int64_t width) {
  CHECK_VALUE(width >= 0, "philox_rows: expected 'width' >= 0 (got ", width, ")");
  CHECK_VALUE(ids.dim() == 1, "philox_rows: expected 'ids' of shape [n] (got ",
              ids.sizes(), ")");
  CHECK_DTYPE(ids.scalar_type() == kLong, "philox_rows: expected int64 'ids' (got ",
              ids.scalar_type(), ")");
}

Tensor philox_rows_cpu(const Tensor& ids, int64_t width, int64_t low, int64_t high) {
  check(ids, width);
  const Tensor out = empty({ids.size(0), width}, kLong);
  const Tensor dense = as_contiguous(ids);
  const int64_t* id = dense.const_data_ptr<int64_t>();
  const int64_t words = out.size(1);
  int64_t* to = out.mutable_data_ptr<int64_t>();
  const int64_t grain = std::max<int64_t>(kGrain / std::max<int64_t>(words, 1), 1);
  parallel_for(0, ids.numel(), grain, [&](int64_t first, int64_t last) {
    on_best([&](auto) PYG_SAR_INLINED {
      fill(to, id, first, last, words, static_cast<uint32_t>(low), static_cast<uint32_t>(high));
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("philox_rows(Tensor ids, SymInt width, int low, int high) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("philox_rows", TORCH_BOX(&philox_rows_cpu)); }

}  // namespace pyg_sar
