// What compilers and processors have: attributes of functions, and versions of loops.
//
// Any compiler with the vector extensions of GCC and Clang builds the kernels, for any processor.
#pragma once

#include <cstdint>

#define PYG_SAR_INLINED __attribute__((always_inline))  // of a lambda
#define PYG_SAR_INLINE inline PYG_SAR_INLINED

// Of a loop over registers: they are none where it has a counter. Of one that is not to be unrolled.
#ifdef __clang__
#define PYG_SAR_UNROLLED _Pragma("unroll")
#define PYG_SAR_ROLLED _Pragma("nounroll")
#else
#define PYG_SAR_UNROLLED _Pragma("GCC unroll 16")
#define PYG_SAR_ROLLED _Pragma("GCC unroll 1")
#endif

// One build runs on any x86-64 with AVX2 and FMA: the version for the processor at hand is called.
// They are named by feature: by architecture (arch=haswell) another maker's processor would get none.
#if defined(__x86_64__) && !defined(PYG_SAR_ONE_VERSION)
#define PYG_SAR_LEVELS 1
#endif

// GCC takes registers of 256 bits where it isn't told; Clang the widest of those that are named.
#ifdef __clang__
#define PYG_SAR_TARGET_512(features) __attribute__((target(features)))
#else
#define PYG_SAR_TARGET_512(features) __attribute__((target(features ",prefer-vector-width=512")))
#endif

namespace pyg_sar {

constexpr int64_t kLine = 64;  // bytes of a cache line

// Of the processor that a version is for.
template <int kBytesOfOne>
struct Registers {
  static constexpr int kBytes = kBytesOfOne;
};

#ifdef PYG_SAR_LEVELS
template <class Work>
__attribute__((target("avx512f"))) auto on_avx512f(const Work& work) {
  return work(Registers<64>{});
}

template <class Work>
__attribute__((target("avx2,fma"))) auto on_avx2(const Work& work) {
  return work(Registers<32>{});
}
#endif

// Returns work(Registers), in the version for AVX2: what is not inlined into it has one version.
template <class Work>
auto on_half(const Work& work) {
#ifdef PYG_SAR_LEVELS
  return on_avx2(work);
#else
  return work(Registers<16>{});
#endif
}

// The same in the version for the processor.
template <class Work>
auto on_best(const Work& work) {
#ifdef PYG_SAR_LEVELS
  if (__builtin_cpu_supports("avx512f")) return on_avx512f(work);
#endif
  return on_half(work);
}

// Says if there is a version for this processor.
inline bool runs_here() {
#ifdef PYG_SAR_LEVELS
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

}  // namespace pyg_sar
