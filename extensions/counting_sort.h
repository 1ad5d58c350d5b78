// A stable counting sort on all threads, each of which counts and places a run of the numbers.
#pragma once


#include <algorithm>
#include <cstdint>
#include <vector>

#include "parallel.h"

namespace pyg_sar {

// Runs of `size` numbers with keys in [0, num_keys). Nothing but the result and a table of counts per
// thread is of the size of the numbers: `most` runs keep the table small.
template <class Place>
class CountingSort {
 public:
  CountingSort(int64_t size, int64_t num_keys, int64_t most)
      : size_(size), num_keys_(num_keys),
        runs_(std::min<int64_t>({get_num_threads(), std::max<int64_t>(most, 1),
                                 size / 4096 + 1})) {}

  // Calls work(start, stop, run) for each run of the numbers.
  template <class Work>
  void for_runs(const Work& work) const {
    parallel_for(0, runs_, 1, [&](int64_t first, int64_t last) {
      for (int64_t run = first; run < last; ++run) work(begin(run), begin(run + 1), run);
    });
  }

  // Where the numbers of each key begin: offsets, [num_keys + 1]. key(k) is that of number k.
  template <class Key>
  void count(Place* offsets, const Key& key) {
    counts_.assign(runs_ * num_keys_, 0);
    for_runs([&](int64_t start, int64_t stop, int64_t run) {
      Place* count = places(run);
      for (int64_t k = start; k < stop; ++k) ++count[key(k)];
    });
    Place total = 0;
    for (int64_t value = 0; value < num_keys_; ++value) {
      offsets[value] = total;
      for (int64_t run = 0; run < runs_; ++run) {
        Place& here = counts_[run * num_keys_ + value];
        const Place count = here;
        here = total;
        total += count;
      }
    }
    offsets[num_keys_] = total;
  }

  // After count(): where a run's next number of each key goes, [num_keys].
  Place* places(int64_t run) { return counts_.data() + run * num_keys_; }

 private:
  int64_t begin(int64_t run) const { return size_ / runs_ * run + std::min(run, size_ % runs_); }

  int64_t size_, num_keys_, runs_;
  std::vector<Place> counts_;
};

}  // namespace pyg_sar
