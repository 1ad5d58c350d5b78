// Checks of edges grouped by target, and the sort that groups them.

#include "segments.h"


#include <tuple>

#include "counting_sort.h"
#include "tensors.h"

namespace pyg_sar {

// Without branches, so that they are vectorised.
template <class Index>
bool within(const Index* x, int64_t size, int64_t bound) {
  return on_best([=](auto) PYG_SAR_INLINED {
    Index low = 0, high = -1;
    for (int64_t k = 0; k < size; ++k) {
      low = x[k] < low ? x[k] : low;
      high = x[k] > high ? x[k] : high;
    }
    return low >= 0 && high < bound;
  });
}

template <class Index>
bool ascends(const Index* x, int64_t size, bool strictly) {
  return on_best([=](auto) PYG_SAR_INLINED {
    bool falls = false, stays = false;
    for (int64_t k = 1; k < size; ++k) {
      falls |= x[k] < x[k - 1];
      stays |= x[k] == x[k - 1];
    }
    return !falls && !(strictly && stays);
  });
}

template bool within(const int32_t*, int64_t, int64_t);
template bool within(const int64_t*, int64_t, int64_t);
template bool ascends(const int32_t*, int64_t, bool);
template bool ascends(const int64_t*, int64_t, bool);

namespace {

bool is_index(const Tensor& x) {
  return x.scalar_type() == kInt || x.scalar_type() == kLong;
}

}  // namespace

SegmentTensors checked(const char* op, const Tensor& source, const Tensor& offsets,
                       const OptionalTensor& targets, const OptionalTensor& edges) {
  CHECK_VALUE(source.dim() == 1 && offsets.dim() == 1 && offsets.size(0) > 0, op,
              ": expected 'source' and 'offsets' of shapes [E] and [U + 1] (got ",
              source.sizes(), " and ", offsets.sizes(), ")");
  CHECK_DTYPE(is_index(source), op, ": expected int32 or int64 'source' (got ",
              source.scalar_type(), ")");
  CHECK_DTYPE(offsets.scalar_type() == source.scalar_type(), op,
              ": expected 'offsets' of the dtype of 'source' (got ", offsets.scalar_type(),
              " and ", source.scalar_type(), ")");
  if (targets.has_value()) {
    CHECK_VALUE(targets->dim() == 1 && targets->size(0) == offsets.size(0) - 1, op,
                ": expected 'targets' of shape [", offsets.size(0) - 1, "] (got ",
                targets->sizes(), ")");
    CHECK_DTYPE(targets->scalar_type() == kLong, op, ": expected int64 'targets' (got ",
                targets->scalar_type(), ")");
  }
  if (edges.has_value()) {
    CHECK_VALUE(same(edges->sizes(), source.sizes()), op, ": expected 'edges' of shape [",
                source.size(0), "] (got ", edges->sizes(), ")");
    CHECK_DTYPE(edges->scalar_type() == source.scalar_type(), op,
                ": expected 'edges' of the dtype of 'source' (got ", edges->scalar_type(),
                " and ", source.scalar_type(), ")");
  }
  SegmentTensors out{as_contiguous(source), as_contiguous(offsets), std::nullopt, std::nullopt};
  if (targets.has_value()) out.targets = as_contiguous(*targets);
  if (edges.has_value()) out.edges = as_contiguous(*edges);
  return out;
}

template <class Index>
Segments<Index> checked(const char* op, const SegmentTensors& given, int64_t num_rows,
                        int64_t num_out) {
  const Segments<Index> s{given.source.const_data_ptr<Index>(),
                          given.offsets.const_data_ptr<Index>(),
                          given.targets ? given.targets->const_data_ptr<int64_t>() : nullptr,
                          given.edges ? given.edges->const_data_ptr<Index>() : nullptr,
                          given.source.numel(),
                          given.offsets.numel() - 1};
  const int64_t last = s.num_targets;
  CHECK_VALUE(s.offsets[0] == 0 && s.offsets[last] == s.num_edges &&
                  ascends(s.offsets, last + 1, false),
              op, ": expected 'offsets' that ascend from 0 to the number of edges, ",
              s.num_edges);
  CHECK_INDEX(s.targets == nullptr
                  ? last <= num_out
                  : within(s.targets, last, num_out) && ascends(s.targets, last, true),
              op, ": expected ascending 'targets' in [0, ", num_out, ")");
  CHECK_INDEX(all_within(s.source, s.num_edges, num_rows), op, ": 'source' names a row outside [0, ",
              num_rows, ")");
  CHECK_INDEX(s.edges == nullptr || all_within(s.edges, s.num_edges, s.num_edges), op,
              ": 'edges' names an edge outside [0, ", s.num_edges, ")");
  return s;
}

template Segments<int32_t> checked(const char*, const SegmentTensors&, int64_t, int64_t);
template Segments<int64_t> checked(const char*, const SegmentTensors&, int64_t, int64_t);

namespace {

template <class Key, class Place>
void sort_by_counting(const Key* key, const Place* before, int64_t size, int64_t num_keys,
                      Place* order, Place* offsets) {
  CHECK_INDEX(all_within(key, size, num_keys), "sort_edges: expected keys in [0, ", num_keys,
              ")");
  CHECK_INDEX(before == nullptr || all_within(before, size, size),
              "sort_edges: expected an 'order' of numbers in [0, ", size, ")");
  const auto edge = [&](int64_t k) -> int64_t { return before == nullptr ? k : before[k]; };
  // A table of counts per thread shall not take more than the result does.
  CountingSort<Place> sort(size, num_keys, 2 * size / std::max<int64_t>(num_keys, 1));
  sort.count(offsets, [&](int64_t k) { return key[edge(k)]; });
  sort.for_runs([&](int64_t start, int64_t stop, int64_t run) {
    Place* place = sort.places(run);
    for (int64_t k = start; k < stop; ++k) {
      const int64_t e = edge(k);
      order[place[key[e]]++] = static_cast<Place>(e);
    }
  });
}

void check_sort(const Tensor& key, int64_t num_keys, const OptionalTensor& order) {
  CHECK_VALUE(key.dim() == 1 && num_keys >= 0, "sort_edges: expected 'key' of shape [E] and ",
              "'num_keys' of at least 0 (got ", key.sizes(), " and ", num_keys, ")");
  CHECK_DTYPE(is_index(key), "sort_edges: expected int32 or int64 'key' (got ",
              key.scalar_type(), ")");
  const auto place = key.numel() < (int64_t{1} << 31) ? kInt : kLong;
  CHECK_VALUE(!order.has_value() || same(order->sizes(), key.sizes()),
              "sort_edges: expected 'order' of the shape of 'key'");
  CHECK_DTYPE(!order.has_value() || order->scalar_type() == place,
              "sort_edges: expected 'order' of dtype ", place);
}

std::tuple<Tensor, Tensor> sort_edges_cpu(const Tensor& key, int64_t num_keys,
                                          const OptionalTensor& order) {
  check_sort(key, num_keys, order);
  const auto place = key.numel() < (int64_t{1} << 31) ? kInt : kLong;
  const Tensor out = empty({key.numel()}, place), offsets = empty({num_keys + 1}, place);
  const Tensor keys = as_contiguous(key);
  OptionalTensor before;
  if (order.has_value()) before = as_contiguous(*order);
  const auto sort = [&](auto key_type, auto place_type) {
    using Key = decltype(key_type);
    using Place = decltype(place_type);
    sort_by_counting(keys.const_data_ptr<Key>(),
                     before ? before->const_data_ptr<Place>() : nullptr, keys.numel(), num_keys,
                     out.mutable_data_ptr<Place>(),
                     offsets.mutable_data_ptr<Place>());
  };
  const bool narrow_key = keys.scalar_type() == kInt, narrow = out.scalar_type() == kInt;
  if (narrow) narrow_key ? sort(int32_t{}, int32_t{}) : sort(int64_t{}, int32_t{});
  else narrow_key ? sort(int32_t{}, int64_t{}) : sort(int64_t{}, int64_t{});
  return {out, offsets};
}

}  // namespace

STABLE_TORCH_LIBRARY(pyg_sar, m) {
  m.def("runs_here() -> bool");
  m.def("sort_edges(Tensor key, SymInt num_keys, Tensor? order=None) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CompositeExplicitAutograd, m) {
  m.impl("runs_here", TORCH_BOX(&runs_here));
}
STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) { m.impl("sort_edges", TORCH_BOX(&sort_edges_cpu)); }

}  // namespace pyg_sar
