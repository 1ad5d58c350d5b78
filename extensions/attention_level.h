// Compiles the passes of attention for a processor. A file says which, and for which numbers:
//
//   #define PYG_SAR_LEVEL      an attribute of functions
//   #define PYG_SAR_REGISTER   the bytes of a register
//   #include "attention_level.h"
//   PYG_SAR_PASSES(float)
#pragma once

#include "attention_passes.h"

namespace pyg_sar::attention {
namespace {

template <class Score, class Pass>
PYG_SAR_LEVEL void on_chunk(const Pass& pass, int64_t chunk) {
  pass.template run<Score>(chunk);
}

}  // namespace

template <int kRegister, class Pass>
void run_chunk(const Pass& pass, int64_t kind, int64_t chunk) {
  Scores::each([&]<class Score>() {
    if constexpr (Pass::kOfAll || !Score::kShape.by_source) {
      if (Score::kKind == kind) on_chunk<Score>(pass, chunk);
    }
  });
}

}  // namespace pyg_sar::attention

#define PYG_SAR_PASSES(T)                                                         \
  namespace pyg_sar::attention {                                                  \
  template void run_chunk<PYG_SAR_REGISTER>(const Forward<T>&, int64_t, int64_t); \
  template void run_chunk<PYG_SAR_REGISTER>(const Sources<T>&, int64_t, int64_t); \
  template void run_chunk<PYG_SAR_REGISTER>(const Targets<T>&, int64_t, int64_t); \
  }
