// Threads are PyTorch's own. ThreadSanitizer, which doesn't know the barriers of OpenMP, sees threads of
// the standard library that share the work in the same way.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace pyg_sar {

using torch::stable::get_num_threads;

#ifndef PYG_SAR_STANDARD_THREADS
using torch::stable::parallel_for;
#else
template <class Work>
void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work) {
  const int64_t most = (end - begin + grain_size - 1) / std::max<int64_t>(grain_size, 1);
  const int64_t count = std::min<int64_t>(get_num_threads(), most);
  const int64_t each = count > 0 ? (end - begin + count - 1) / count : 0;
  std::vector<std::thread> threads;
  for (int64_t first = begin; first < end; first += each) {
    threads.emplace_back([&work, first, last = std::min(first + each, end)] { work(first, last); });
  }
  for (std::thread& thread : threads) thread.join();
}
#endif

}  // namespace pyg_sar
