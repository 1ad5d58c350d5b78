// Runs a pass of attention on all chunks of segments: the version for the processor, the scores and the
// number of channels. A pass is an object that is called with a chunk's number; everything that it
// calls in a loop over edges is inlined into it, so that it is compiled as a whole for a processor.
#pragma once

#include "attention_arguments.h"
#include "attention_scores.h"
#include "segments.h"

#include <type_traits>

namespace pyg_sar::attention {

#ifdef PYG_SAR_LEVELS
#define PYG_SAR_AVX512 PYG_SAR_TARGET_512("avx512f,avx512vl,avx512dq,avx512bw,fma,bmi2")
#define PYG_SAR_AVX2 __attribute__((target("avx2,fma,bmi2")))

template <class Pass>
PYG_SAR_AVX512 void on_avx512(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

template <class Pass>
PYG_SAR_AVX2 void on_avx2(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

inline bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}

// For the processors with the widest registers only.
template <class Pass>
void run_wide(const Pass& pass) {
  for_chunks(pass.t.chunks, [&](int64_t chunk) { on_avx512(pass, chunk); });
}

// Heads that leave lanes of the widest registers are faster in narrower ones: what is left of a head is
// taken a number at a time.
template <class Pass>
void run(const Pass& pass) {
  if constexpr (std::is_same_v<typename Pass::T, float>) {
    const bool whole = !Pass::kByChannels || pass.t.channels % kLanes == 0;
    if (whole && has_avx512()) return run_wide(pass);
  }
  for_chunks(pass.t.chunks, [&](int64_t chunk) { on_avx2(pass, chunk); });
}
#else
template <class Pass>
void run(const Pass& pass) {
  for_chunks(pass.t.chunks, [&](int64_t chunk) { pass(chunk); });
}
#endif

// Runs a pass that 'make' makes for a score and a number of channels (0: any).
template <template <class, class, int64_t> class Pass, class T, class Score, class Make>
void dispatch_channels(int64_t channels, const Make& make) {
#ifdef PYG_SAR_LEVELS
  if constexpr (std::is_same_v<T, float> && Pass<T, Score, 0>::kByChannels) {
    if (has_avx512()) {
      switch (channels) {
        case 8: return run_wide(make.template operator()<Pass<T, Score, 8>>());
        case 16: return run_wide(make.template operator()<Pass<T, Score, 16>>());
        case 32: return run_wide(make.template operator()<Pass<T, Score, 32>>());
        case 64: return run_wide(make.template operator()<Pass<T, Score, 64>>());
        default: break;
      }
    }
  }
#endif
  run(make.template operator()<Pass<T, Score, 0>>());
}

// The same for the score that is asked for; kAll: also of scores whose gradients come by source alone.
template <template <class, class, int64_t> class Pass, class T, bool kAll, class Make>
void dispatch(const Given& g, const Make& make) {
  Scores::each([&]<class Score>() {
    if constexpr (kAll || !Score::kShape.by_source) {
      if (Score::kKind == g.kind) dispatch_channels<Pass, T, Score>(g.value.size(2), make);
    }
  });
}

}  // namespace pyg_sar::attention
