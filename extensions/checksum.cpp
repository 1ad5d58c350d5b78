// A number that tells what memory holds. Words are taken in lanes: a lane's number goes with each word to another
// one, one to one, so that a word that changes alone always changes it. The shift brings high bits to low ones:
// without it two signs that change would cancel out. It doesn't depend on the number of threads.

#include <cstring>
#include <vector>

#include "parallel.h"
#include "processors.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

constexpr uint32_t kOdd = 0x9E3779B1u;
constexpr int kLanes = 64;            // words that are taken side by side
constexpr int64_t kRun = 1 << 16;     // bytes of a run
constexpr int64_t kRunsOfATask = 16;

uint64_t mixed(uint64_t total, uint64_t next) {
  total = (total ^ next) * 0x9E3779B97F4A7C15u;
  return total ^ (total >> 32);
}

template <int kRegister>  // bytes
PYG_SAR_INLINE uint64_t of_run(const uint8_t* bytes, int64_t size) {
  constexpr int kOnes = kRegister / sizeof(uint32_t), kParts = kLanes / kOnes;
  using Words = Vector<uint32_t, kOnes>;
  Words sums[kParts] = {};
  const auto add = [&](const uint8_t* from) PYG_SAR_INLINED {
    PYG_SAR_UNROLLED
    for (int part = 0; part < kParts; ++part) {
      Words words;
      std::memcpy(&words, from + part * kRegister, kRegister);
      const Words product = (sums[part] ^ words) * kOdd;
      sums[part] = product ^ (product >> 15);
    }
  };
  constexpr int64_t kBytes = kLanes * sizeof(uint32_t);
  int64_t at = 0;
  for (; at + kBytes <= size; at += kBytes) add(bytes + at);
  uint8_t rest[kBytes] = {};
  std::memcpy(rest, bytes + at, size - at);
  add(rest);
  uint32_t all[kLanes];
  std::memcpy(all, sums, sizeof(all));
  uint64_t total = size;
  for (const uint32_t sum : all) total = mixed(total, sum);
  return total;
}

int64_t checksum_cpu(const Tensor& bytes) {
  CHECK_VALUE(bytes.dim() == 1 && bytes.is_contiguous(),
              "checksum: expected contiguous 'bytes' of shape [n] (got shape ", bytes.sizes(), ")");
  CHECK_DTYPE(bytes.scalar_type() == ScalarType::Byte, "checksum: expected uint8 'bytes' (got ",
              bytes.scalar_type(), ")");
  const int64_t size = bytes.numel();
  const uint8_t* from = bytes.const_data_ptr<uint8_t>();
  std::vector<uint64_t> found((size + kRun - 1) / kRun);
  parallel_for(0, static_cast<int64_t>(found.size()), kRunsOfATask, [&](int64_t first, int64_t last) {
    on_best([&](auto registers) PYG_SAR_INLINED {
      for (int64_t run = first; run < last; ++run) {
        const int64_t start = run * kRun;
        found[run] = of_run<decltype(registers)::kBytes>(from + start, std::min(kRun, size - start));
      }
    });
  });
  uint64_t total = size;
  for (const uint64_t run : found) total = mixed(total, run);
  return static_cast<int64_t>(total);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) { m.def("checksum(Tensor bytes) -> int"); }

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("checksum", TORCH_BOX(&checksum_cpu)); }

}  // namespace pyg_sar
