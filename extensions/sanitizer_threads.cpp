// at::parallel_for on std::thread, for ThreadSanitizer alone: it doesn't know the barriers of OpenMP.
//
// Compiled in by extensions/sanitize.sh thread, and in no other build.

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <vector>

namespace at::internal {

__attribute__((visibility("hidden"))) void invoke_parallel(
    const int64_t begin, const int64_t end, const int64_t grain_size,
    const std::function<void(int64_t, int64_t)>& f) {
  const int64_t most = at::divup(end - begin, std::max<int64_t>(grain_size, 1));
  const int64_t count = std::min<int64_t>(at::get_num_threads(), most);
  const int64_t each = at::divup(end - begin, count);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  for (int64_t k = 0; k < count; ++k) {
    threads.emplace_back([&, k] {
      const int64_t first = begin + k * each, last = std::min(first + each, end);
      try {
        ThreadIdGuard number(static_cast<int>(k));
        if (first < last) f(first, last);
      } catch (...) {
        errors[k] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace at::internal
