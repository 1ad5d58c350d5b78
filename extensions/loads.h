// What groups of nodes hold of all that a partitioner balances, and the most that they may.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pyg_sar {

struct Loads {
  int64_t* held;  // [groups, kinds]
  const int64_t* most;
  int64_t kinds;

  bool fits(int64_t group, const int64_t* weight) const {
    for (int64_t k = 0; k < kinds; ++k)
      if (held[group * kinds + k] + weight[k] > most[k]) return false;
    return true;
  }
  // Whether the group holds this node and nothing else.
  bool is_alone(int64_t group, const int64_t* weight) const {
    return std::equal(weight, weight + kinds, held + group * kinds);
  }
  void add(int64_t group, const int64_t* weight, int64_t times) {
    for (int64_t k = 0; k < kinds; ++k) held[group * kinds + k] += times * weight[k];
  }
  // How much further over its limits, as shares of them, a node takes a group.
  double excess(int64_t group, const int64_t* weight) const {
    double sum = 0;
    for (int64_t k = 0; k < kinds; ++k) {
      const int64_t over = held[group * kinds + k] - most[k];
      sum += static_cast<double>(std::max<int64_t>(over + weight[k], 0) - std::max<int64_t>(over, 0)) /
             static_cast<double>(most[k]);
    }
    return sum;
  }
};

}  // namespace pyg_sar
