// The cheapest vertex cover of a bipartite graph, by a largest matching of units.
//
// A source may give `pull` units and a target take `push`, along edges. What is given at most is what a
// cover costs at least (Picard and Queyranne, 1982). Units find their way in phases: a breadth-first
// search from the sources that have units left, then disjoint paths along its levels (Hopcroft and
// Karp, 1973). The cover of the plain way in pyg_sar/exchange/cover.py is the same: it is the cut
// that is nearest to the sources, of which there is one.


#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "segments.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

class Units {
 public:
  Units(const int64_t* offsets, const int32_t* target, int64_t sources, int64_t targets, int32_t pull,
        int32_t push)
      : offsets_(offsets),
        target_(target),
        sources_(sources),
        push_(push),
        left_(sources, pull),
        level_(sources),
        next_(sources),
        taken_(targets, 0),
        giver_(targets * push),
        far_(targets) {}

  // Returns how many units are given.
  int64_t give() {
    int64_t total = 0;
    while (search()) {
      std::copy(offsets_, offsets_ + sources_, next_.begin());
      for (int64_t s = 0; s < sources_; ++s)
        while (left_[s] > 0 && find_way(static_cast<int32_t>(s))) --left_[s], ++total;
    }
    return total;
  }
  // After it: whether sources with units left reach them.
  bool near(int64_t source) const { return level_[source] >= 0; }
  bool far(int64_t target) const { return far_[target] != 0; }

 private:
  // Sets the levels of the sources that those with units left reach; says if a unit can be taken.
  bool search() {
    std::fill(far_.begin(), far_.end(), 0);
    queue_.clear();
    for (int64_t s = 0; s < sources_; ++s) {
      level_[s] = left_[s] > 0 ? 0 : -1;
      if (left_[s] > 0) queue_.push_back(static_cast<int32_t>(s));
    }
    bool found = false;
    for (size_t i = 0; i < queue_.size(); ++i) {
      const int32_t s = queue_[i];
      for (int64_t e = offsets_[s]; e < offsets_[s + 1]; ++e) {
        const int32_t t = target_[e];
        if (far_[t]) continue;
        far_[t] = 1;
        found = found || taken_[t] < push_;
        for (int32_t k = 0; k < taken_[t]; ++k) {
          const int32_t other = giver_[int64_t{t} * push_ + k];
          if (level_[other] >= 0) continue;
          level_[other] = level_[s] + 1;
          queue_.push_back(other);
        }
      }
    }
    return found;
  }

  // Finds a taker of a unit of this source: one with room, or where another source gives its unit
  // elsewhere. On a stack of its own: ways may be long.
  bool find_way(int32_t start) {
    path_.assign(1, {start, 0});
    while (!path_.empty()) {
      auto& [s, k] = path_.back();
      if (next_[s] == offsets_[s + 1]) {
        level_[s] = -2;  // no way from here in this phase
        path_.pop_back();
        continue;
      }
      const int32_t t = target_[next_[s]];
      if (taken_[t] < push_) {
        giver_[int64_t{t} * push_ + taken_[t]++] = s;
        path_.pop_back();
        for (; !path_.empty(); path_.pop_back()) {
          const auto& [giver, place] = path_.back();
          giver_[int64_t{target_[next_[giver]]} * push_ + place] = giver;
        }
        return true;
      }
      while (k < push_ && level_[giver_[int64_t{t} * push_ + k]] != level_[s] + 1) ++k;
      if (k == push_) {
        ++next_[s], k = 0;
        continue;
      }
      path_.push_back({giver_[int64_t{t} * push_ + k], 0});
    }
    return false;
  }

  const int64_t* offsets_;
  const int32_t* target_;
  int64_t sources_;
  int32_t push_;
  std::vector<int32_t> left_, level_;
  std::vector<int64_t> next_;
  std::vector<int32_t> taken_, giver_;  // of each target: units taken, and from whom
  std::vector<uint8_t> far_;
  std::vector<int32_t> queue_;
  std::vector<std::pair<int32_t, int32_t>> path_;  // sources, and the place they want at a target
};

std::tuple<Tensor, Tensor, int64_t> minimum_cover_cpu(const Tensor& offsets, const Tensor& target,
                                                      int64_t num_targets, int64_t pull, int64_t push) {
  const char* op = "minimum_cover";
  CHECK_DTYPE(offsets.scalar_type() == kLong && target.scalar_type() == kInt, op,
              ": expected 'offsets' int64 and 'target' int32");
  CHECK_VALUE(offsets.is_contiguous() && target.is_contiguous() && offsets.numel() > 0, op,
              ": expected contiguous tensors, and an offset");
  CHECK_VALUE(pull > 0 && push > 0 && pull < 1 << 16 && push < 1 << 16, op,
              ": expected costs from 1 to 65535 (got ", pull, " and ", push, ")");
  const int64_t sources = offsets.numel() - 1;
  CHECK_VALUE(std::max(sources, num_targets) <= INT32_MAX, op, ": expected at most ", INT32_MAX,
              " sources and targets");
  const int64_t* first = offsets.const_data_ptr<int64_t>();
  CHECK_VALUE(first[0] == 0 && first[sources] == target.numel() &&
                  ascends(first, sources + 1, false),
              op, ": expected 'offsets' that ascend from 0 to ", target.numel());
  CHECK_INDEX(all_within(target.const_data_ptr<int32_t>(), target.numel(), num_targets), op,
              ": expected targets in [0, ", num_targets, ")");
  Units units(first, target.const_data_ptr<int32_t>(), sources, num_targets,
              static_cast<int32_t>(pull), static_cast<int32_t>(push));
  const int64_t bound = units.give();
  const Tensor pulled = empty({sources}, kBool), pushed = empty({num_targets}, kBool);
  bool *pull_row = pulled.mutable_data_ptr<bool>(), *push_row = pushed.mutable_data_ptr<bool>();
  for (int64_t s = 0; s < sources; ++s) pull_row[s] = !units.near(s);
  for (int64_t t = 0; t < num_targets; ++t) push_row[t] = units.far(t);
  return {pulled, pushed, bound};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "minimum_cover(Tensor offsets, Tensor target, int num_targets, int pull, int push) "
      "-> (Tensor pulled, Tensor pushed, int bound)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("minimum_cover", TORCH_BOX(&minimum_cover_cpu)); }

}  // namespace pyg_sar
