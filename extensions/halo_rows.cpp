// A partitioner's last step: nodes move to other parts, one after another, where that saves halo rows.
//
// All is counted in integers, so that the plain loops of pyg_sar/partition/balance.py find the same.


#include <algorithm>
#include <cstdint>
#include <vector>

#include "loads.h"
#include "segments.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

// Neighbours of node v: other[offsets[v]], ..., other[offsets[v + 1] - 1].
template <class Index>
struct Neighbours {
  const int64_t* offsets;
  const Index* other;
  int64_t num_nodes;
};

// In which parts a node has targets, and how many of its edges go there.
template <class Index>
class Readers {
 public:
  struct Slot {
    Index part, edges;
  };
  struct Slots {
    const Slot *first, *last;
    const Slot* begin() const { return first; }
    const Slot* end() const { return last; }
  };

  Readers(const Neighbours<Index>& out, const Index* part, int64_t parts)
      : first_(out.num_nodes + 1, 0), size_(out.num_nodes, 0) {
    for (int64_t v = 0; v < out.num_nodes; ++v)
      first_[v + 1] = first_[v] + std::min(out.offsets[v + 1] - out.offsets[v], parts);
    slots_.resize(first_[out.num_nodes]);
    for (int64_t v = 0; v < out.num_nodes; ++v)
      for (int64_t e = out.offsets[v]; e < out.offsets[v + 1]; ++e)
        if (out.other[e] != v) add(v, part[out.other[e]], 1);
  }

  Slots of(int64_t v) const {
    const Slot* first = slots_.data() + first_[v];
    return {first, first + size_[v]};
  }
  Index edges(int64_t v, Index part) const {
    for (const Slot& slot : of(v))
      if (slot.part == part) return slot.edges;
    return 0;
  }
  void remove(int64_t v, Index part, Index edges) {
    Slot* const slot = find(v, part);
    check(slot != end(v) && slot->edges >= edges);
    slot->edges -= edges;
    if (slot->edges == 0) *slot = slots_[first_[v] + --size_[v]];
  }
  void add(int64_t v, Index part, Index edges) {
    Slot* const slot = find(v, part);
    if (slot != end(v)) {
      slot->edges += edges;
    } else {
      check(first_[v] + size_[v] < first_[v + 1]);
      *slot = {part, edges};
      ++size_[v];
    }
  }

 private:
  Slot* end(int64_t v) { return slots_.data() + first_[v] + size_[v]; }
  Slot* find(int64_t v, Index part) {
    return std::find_if(slots_.data() + first_[v], end(v), [&](const Slot& s) { return s.part == part; });
  }
  static void check(bool good) {
    CHECK_VALUE(good, "save_halo_rows_: expected the same edges by source and by target");
  }

  std::vector<int64_t> first_;
  std::vector<Index> size_;
  std::vector<Slot> slots_;
};

template <class Index>
int64_t save_halo_rows(const Neighbours<Index>& out, const Neighbours<Index>& in, Index* part,
                       Loads loads, const int64_t* weights, int64_t parts) {
  Readers<Index> readers(out, part, parts);
  struct Source {
    int64_t node;
    Index edges;
  };
  std::vector<Source> sources;
  std::vector<int64_t> there(parts, 0);
  int64_t total = 0;
  for (int64_t v = 0; v < in.num_nodes; ++v) {
    const Index own = part[v];
    sources.clear();
    for (int64_t e = in.offsets[v]; e < in.offsets[v + 1]; ++e) {
      const Index u = in.other[e];
      if (u == v) continue;
      if (!sources.empty() && sources.back().node == u) ++sources.back().edges;
      else sources.push_back({u, 1});
    }
    const int64_t* weight = weights + v * loads.kinds;
    loads.add(own, weight, -1);
    const bool stays = loads.fits(own, weight);
    // Its part no longer needs the rows of others that only this node reads, but maybe its own.
    int64_t left = readers.edges(v, own) > 0 ? -1 : 0;
    for (const Source& s : sources)
      left += part[s.node] != own && readers.edges(s.node, own) == s.edges;
    const bool alone = readers.of(v).begin() == readers.of(v).end();
    int64_t best = own, saved = 0;
    if (!stays || left > 0 || (left == 0 && !alone)) {
      // Another part need not get what is there already, nor the row of a node that moves there.
      for (const auto& slot : readers.of(v)) ++there[slot.part];
      for (const Source& s : sources) {
        ++there[part[s.node]];
        for (const auto& slot : readers.of(s.node)) there[slot.part] += slot.part != part[s.node];
      }
      left -= static_cast<int64_t>(sources.size());
      if (!stays) best = -1;
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t found = left + there[p];
        if (p != own && (best < 0 || found > saved) && loads.fits(p, weight)) best = p, saved = found;
      }
      if (best < 0) {  // No part has room: the limit can't be kept.
        best = own;
        double least = loads.excess(own, weight);
        for (int64_t p = 0; p < parts; ++p) {
          const double found = loads.excess(p, weight);
          if (found < least) best = p, least = found;
        }
        saved = best == own ? 0 : left + there[best];
      }
      std::fill(there.begin(), there.end(), 0);
    }
    loads.add(best, weight, 1);
    if (best == own) continue;
    for (const Source& s : sources) {
      readers.remove(s.node, own, s.edges);
      readers.add(s.node, static_cast<Index>(best), s.edges);
    }
    part[v] = static_cast<Index>(best);
    total += saved;
  }
  return total;
}

template <class Index>
Neighbours<Index> checked_neighbours(const Tensor& offsets, const Tensor& other, int64_t nodes) {
  const Neighbours<Index> found{offsets.const_data_ptr<int64_t>(), other.const_data_ptr<Index>(), nodes};
  CHECK_VALUE(offsets.numel() == nodes + 1 && found.offsets[0] == 0 &&
                  found.offsets[nodes] == other.numel() &&
                  ascends(found.offsets, nodes + 1, false),
              "save_halo_rows_: expected 'offsets' that ascend from 0 to ", other.numel());
  CHECK_INDEX(all_within(found.other, other.numel(), nodes),
              "save_halo_rows_: expected nodes in [0, ", nodes, ")");
  return found;
}

int64_t save_halo_rows_cpu(const Tensor& part, const Tensor& loads, const Tensor& weights,
                           const Tensor& most, const Tensor& first_out, const Tensor& target,
                           const Tensor& first_in, const Tensor& source) {
  const char* op = "save_halo_rows_";
  for (const Tensor* x : {&part, &loads, &weights, &most, &first_out, &target, &first_in, &source})
    CHECK_VALUE(x->is_contiguous(), op, ": expected contiguous tensors");
  for (const Tensor* x : {&loads, &weights, &most, &first_out, &first_in})
    CHECK_DTYPE(x->scalar_type() == kLong, op, ": expected int64 (got ", x->scalar_type(), ")");
  const auto dtype = part.scalar_type();
  CHECK_DTYPE((dtype == kInt || dtype == kLong) && target.scalar_type() == dtype &&
                  source.scalar_type() == dtype,
              op, ": expected parts and neighbours all int32 or all int64");
  const int64_t nodes = part.numel(), kinds = most.numel();
  CHECK_VALUE(loads.dim() == 2 && loads.size(1) == kinds &&
                  same(weights.sizes(), Sizes({nodes, kinds})),
              op, ": expected 'loads' [parts, kinds] and 'weights' [nodes, kinds] (got ",
              loads.sizes(), " and ", weights.sizes(), ")");
  const auto run = [&](auto type) {
    using Index = decltype(type);
    const auto out = checked_neighbours<Index>(first_out, target, nodes);
    const auto in = checked_neighbours<Index>(first_in, source, nodes);
    CHECK_INDEX(all_within(part.const_data_ptr<Index>(), nodes, loads.size(0)), op,
                ": expected parts in [0, ", loads.size(0), ")");
    return save_halo_rows<Index>(
        out, in, part.mutable_data_ptr<Index>(),
        {loads.mutable_data_ptr<int64_t>(), most.const_data_ptr<int64_t>(), kinds},
        weights.const_data_ptr<int64_t>(), loads.size(0));
  };
  return dtype == kInt ? run(int32_t{}) : run(int64_t{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "save_halo_rows_(Tensor(a!) part, Tensor(b!) loads, Tensor weights, Tensor most, "
      "Tensor first_out, Tensor target, Tensor first_in, Tensor source) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("save_halo_rows_", TORCH_BOX(&save_halo_rows_cpu)); }

}  // namespace pyg_sar
