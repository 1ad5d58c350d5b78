// The passes of attention for AVX-512. In float64 they are no faster than AVX2's.

#include "processors.h"

#ifdef PYG_SAR_LEVELS
#define PYG_SAR_LEVEL PYG_SAR_TARGET_512("avx512f,avx512vl,avx512dq,avx512bw,fma,bmi2")
#define PYG_SAR_REGISTER 64
#include "attention_level.h"

PYG_SAR_PASSES(float)
#endif
