// Threads are PyTorch's own. ThreadSanitizer, which doesn't know the barriers of OpenMP, sees threads of
// the standard library that share the work in the same way.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace pyg_sar {

using torch::stable::get_num_threads;

// What is done with a run of numbers, [first, last). It refers to a function, so that loops over threads are
// compiled once.
class Work {
 public:
  template <class Run>
  Work(const Run& run)
      : run_(&run), call_([](const void* run, int64_t first, int64_t last) {
          (*static_cast<const Run*>(run))(first, last);
        }) {}
  void operator()(int64_t first, int64_t last) const { call_(run_, first, last); }

 private:
  const void* run_;
  void (*call_)(const void*, int64_t, int64_t);
};

void parallel_for(int64_t begin, int64_t end, int64_t grain_size, const Work& work);

// For runs of `size` numbers of `count`: one thread takes one after the other, since hubs and other processes
// make some slower.
void for_runs(int64_t count, int64_t size, const Work& work);

}  // namespace pyg_sar
