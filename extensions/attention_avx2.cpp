// The passes of attention for AVX2 and for processors of another kind.

#include "processors.h"

#ifdef PYG_SAR_LEVELS
#define PYG_SAR_LEVEL __attribute__((target("avx2,fma,bmi2")))
#define PYG_SAR_REGISTER 32
#endif
#include "attention_level.h"

PYG_SAR_PASSES(float)
PYG_SAR_PASSES(double)
