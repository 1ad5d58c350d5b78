// Runs of free units of a line of numbers: addresses of a reservation, places in a file.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace pyg_sar::pager {

class Extents {
 public:
  // The first unit of the smallest free run that has 'units' from a multiple of 'align' on; -1: none.
  int64_t take(int64_t units, int64_t align = 1) {
    for (auto it = by_size_.lower_bound({units, 0}); it != by_size_.end(); ++it) {
      const auto [length, at] = *it;
      const int64_t begin = (at + align - 1) / align * align;
      if (begin + units > at + length) continue;
      remove(at, length);
      if (begin > at) insert(at, begin - at);
      if (begin + units < at + length) insert(begin + units, at + length - begin - units);
      return begin;
    }
    return -1;
  }

  void give(int64_t at, int64_t units) {
    auto next = by_place_.lower_bound(at);
    if (next != by_place_.begin()) {
      const auto [before, length] = *std::prev(next);
      if (before + length == at) {
        remove(before, length);
        at = before;
        units += length;
      }
    }
    if (next != by_place_.end() && next->first == at + units) {
      const auto [after, length] = *next;
      remove(after, length);
      units += length;
    }
    insert(at, units);
  }

 private:
  void insert(int64_t at, int64_t units) {
    by_place_.emplace(at, units);
    by_size_.emplace(units, at);
  }
  void remove(int64_t at, int64_t units) {
    by_place_.erase(at);
    by_size_.erase({units, at});
  }

  std::map<int64_t, int64_t> by_place_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

}  // namespace pyg_sar::pager
