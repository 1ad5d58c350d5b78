// Included before all else in the build for ThreadSanitizer: at::parallel_for calls what
// sanitizer_threads.cpp defines, instead of OpenMP.
#pragma once

#include <ATen/Config.h>

#undef AT_PARALLEL_OPENMP
#undef AT_PARALLEL_NATIVE
#define AT_PARALLEL_OPENMP 0
#define AT_PARALLEL_NATIVE 1
