// A partitioner's passes over the nodes of a graph, in order: each goes where its neighbours are.
//
// All is counted in integers, so that the plain loops of pyg_sar/partition/coarsening.py find the same.


#include <cmath>
#include <cstdint>
#include <vector>

#include "loads.h"
#include "segments.h"
#include "tensors.h"

namespace pyg_sar {
namespace {

// Nodes first, first + 1, ... with what each counts, and their neighbours.
template <class Index>
struct Run {
  int64_t first, size, kinds;
  const int64_t *weights, *offsets;
  const Index* adjacent;
};

// How many of a node's neighbours are in each group.
template <class Index>
class Near {
 public:
  explicit Near(int64_t groups) : count_(groups, 0) {}

  // The groups, in the order in which they come.
  const std::vector<Index>& count(const Run<Index>& run, int64_t node, const Index* group) {
    for (const Index one : groups_) count_[one] = 0;
    groups_.clear();
    for (int64_t e = run.offsets[node]; e < run.offsets[node + 1]; ++e) {
      const Index one = group[run.adjacent[e]];
      if (count_[one]++ == 0) groups_.push_back(one);
    }
    return groups_;
  }
  int64_t operator[](int64_t group) const { return count_[group]; }

 private:
  std::vector<Index> count_, groups_;
};

// The group with most of a node's neighbours. Among equals any will do, but not always the first.
struct Favourite {
  int64_t group = -1, count = 0;
  uint32_t turn = 0;

  bool operator<(const Favourite& other) const {
    return count < other.count || (count == other.count && turn < other.turn);
  }
};

template <class Index>
void join_clusters(const Run<Index>& run, Loads loads, Index* label, int64_t groups) {
  Near<Index> near(groups);
  // The cluster of those that a full one has no room for; the last: of those without neighbours.
  std::vector<Index> waiting(groups + 1, -1);
  for (int64_t node = 0; node < run.size; ++node) {
    const int64_t* weight = run.weights + node * run.kinds;
    const Index own = label[run.first + node];
    Favourite wanted, roomy;
    for (const int64_t one : near.count(run, node, label)) {
      const Favourite other{one, near[one], static_cast<uint32_t>(one) * 2654435761U};
      if (wanted < other) wanted = other;
      if (roomy < other && (one == own || loads.fits(one, weight))) roomy = other;
    }
    int64_t best = roomy.group < 0 ? own : roomy.group;
    if (best == own && wanted.group != own && loads.is_alone(own, weight)) {
      Index& others = waiting[wanted.group < 0 ? groups : wanted.group];
      if (others >= 0 && loads.fits(others, weight))
        best = others;
      else
        others = own;
    }
    if (best == own) continue;
    loads.add(own, weight, -1);
    loads.add(best, weight, 1);
    label[run.first + node] = static_cast<Index>(best);
  }
}

template <class Index>
void join_parts(const Run<Index>& run, Loads loads, Index* part, int64_t parts,
                const double* price) {
  Near<Index> near(parts);
  std::vector<int64_t> cost(parts * run.kinds);
  const auto reprice = [&](int64_t p) {
    for (int64_t k = p * run.kinds; k < (p + 1) * run.kinds; ++k)
      cost[k] = std::nearbyint(price[k - p * run.kinds] * std::sqrt(loads.held[k]));
  };
  for (int64_t p = 0; p < parts; ++p) reprice(p);
  for (int64_t node = 0; node < run.size; ++node) {
    const int64_t* weight = run.weights + node * run.kinds;
    const Index own = part[run.first + node];
    loads.add(own, weight, -1);
    reprice(own);
    near.count(run, node, part);
    const auto gain = [&](int64_t p) {
      int64_t found = near[p] << 16;
      for (int64_t k = 0; k < run.kinds; ++k) found -= weight[k] * cost[p * run.kinds + k];
      return found;
    };
    int64_t best = loads.fits(own, weight) ? own : -1, most = best < 0 ? 0 : gain(own);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t found = gain(p);
      if ((best < 0 || found > most) && loads.fits(p, weight)) best = p, most = found;
    }
    if (best < 0) {  // No part has room: the limit can't be kept.
      double least = loads.excess(best = 0, weight);
      for (int64_t p = 1; p < parts; ++p) {
        const double found = loads.excess(p, weight);
        if (found < least) best = p, least = found;
      }
    }
    loads.add(best, weight, 1);
    reprice(best);
    part[run.first + node] = static_cast<Index>(best);
  }
}

struct Given {
  const Tensor &group, &loads, &weights, &most, &offsets, &adjacent;
  int64_t first;
};

template <class Index>
Run<Index> checked_run(const char* op, const Given& g) {
  const int64_t size = g.offsets.numel() - 1, nodes = g.group.numel(), groups = g.loads.size(0);
  const Run<Index> run{g.first, size, g.most.numel(), g.weights.const_data_ptr<int64_t>(),
                       g.offsets.const_data_ptr<int64_t>(), g.adjacent.const_data_ptr<Index>()};
  CHECK_VALUE(run.offsets[0] == 0 && run.offsets[size] == g.adjacent.numel() &&
                  ascends(run.offsets, size + 1, false),
              op, ": expected 'offsets' that ascend from 0 to ", g.adjacent.numel());
  CHECK_INDEX(g.first >= 0 && g.first + size <= nodes &&
                  all_within(run.adjacent, g.adjacent.numel(), nodes),
              op, ": expected nodes in [0, ", nodes, ")");
  CHECK_INDEX(all_within(g.group.const_data_ptr<Index>(), nodes, groups), op,
              ": expected groups in [0, ", groups, ")");
  return run;
}

// Calls work(run, loads, group) with the index type of the groups and neighbours.
template <class Work>
void on_run(const char* op, const Given& g, const Work& work) {
  for (const Tensor* x : {&g.group, &g.loads, &g.weights, &g.most, &g.offsets, &g.adjacent})
    CHECK_VALUE(x->is_contiguous(), op, ": expected contiguous tensors");
  const int64_t size = g.offsets.numel() - 1, kinds = g.most.numel();
  CHECK_VALUE(size >= 0 && g.loads.dim() == 2 && g.loads.size(1) == kinds &&
                  same(g.weights.sizes(), Sizes({size, kinds})),
              op, ": expected 'loads' [groups, kinds] and 'weights' [nodes, kinds] (got ",
              g.loads.sizes(), " and ", g.weights.sizes(), ")");
  for (const Tensor* x : {&g.loads, &g.weights, &g.most, &g.offsets})
    CHECK_DTYPE(x->scalar_type() == kLong, op, ": expected int64 (got ", x->scalar_type(), ")");
  const auto dtype = g.group.scalar_type();
  CHECK_DTYPE((dtype == kInt || dtype == kLong) && g.adjacent.scalar_type() == dtype, op,
              ": expected neighbours and groups both int32 or both int64");
  const Loads loads{g.loads.mutable_data_ptr<int64_t>(), g.most.const_data_ptr<int64_t>(), kinds};
  const auto run = [&](auto type) {
    using Index = decltype(type);
    const auto nodes = checked_run<Index>(op, g);
    work(nodes, loads, g.group.mutable_data_ptr<Index>(), g.loads.size(0));
  };
  dtype == kInt ? run(int32_t{}) : run(int64_t{});
}

void join_clusters_cpu(const Tensor& label, const Tensor& loads, const Tensor& weights,
                       const Tensor& most, int64_t first, const Tensor& offsets,
                       const Tensor& adjacent) {
  on_run("join_clusters_", {label, loads, weights, most, offsets, adjacent, first},
         [](const auto& run, const Loads& all, auto* group, int64_t groups) {
           join_clusters(run, all, group, groups);
         });
}

void join_parts_cpu(const Tensor& part, const Tensor& loads, const Tensor& weights,
                    const Tensor& most, const Tensor& price, int64_t first, const Tensor& offsets,
                    const Tensor& adjacent) {
  CHECK_VALUE(price.is_contiguous() && price.scalar_type() == kDouble &&
                  same(price.sizes(), most.sizes()),
              "join_parts_: expected 'price' float64, of the shape of 'most'");
  on_run("join_parts_", {part, loads, weights, most, offsets, adjacent, first},
         [&](const auto& run, const Loads& all, auto* group, int64_t parts) {
           join_parts(run, all, group, parts, price.const_data_ptr<double>());
         });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "join_clusters_(Tensor(a!) label, Tensor(b!) loads, Tensor weights, Tensor most, int first, "
      "Tensor offsets, Tensor adjacent) -> ()");
  m.def(
      "join_parts_(Tensor(a!) part, Tensor(b!) loads, Tensor weights, Tensor most, Tensor price, "
      "int first, Tensor offsets, Tensor adjacent) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("join_clusters_", TORCH_BOX(&join_clusters_cpu));
  m.impl("join_parts_", TORCH_BOX(&join_parts_cpu));
}

}  // namespace pyg_sar
