// The tensors that attention is given, as its passes want them.
#pragma once

#include "attention_arguments.h"
#include "attention_terms.h"


#include <algorithm>
#include <vector>

namespace pyg_sar::attention {

constexpr const char* kName = "attention";
constexpr int64_t kMostChunks = 1 << 16;
constexpr int64_t kChunksOfParameters = 64;  // each has a buffer
constexpr int64_t kSummedAtOnce = 1 << 15;   // numbers that are worth a thread

// Rows of keys and values that edges name.
inline int64_t source_rows(const Given& g) {
  return g.places.has_value() ? g.places->size(0) : g.value.size(0);
}

inline int64_t features(const Given& g) {
  return g.edge_attr.has_value() ? g.edge_attr->size(1) : 0;
}

inline bool nothing(const Given& g) {
  return g.source.numel() == 0 || g.value.size(1) * g.value.size(2) == 0;
}

// How many chunks of edges there are: at most as many as there is work for.
int64_t num_chunks(const Given& g, int64_t most);

template <class T>
Matrix<const T> matrix(const OptionalTensor& x) {
  if (!x.has_value() || x->numel() == 0) return {};
  return {x->const_data_ptr<T>(), x->stride(0)};
}

template <class T>
const T* data(const OptionalTensor& x) {
  return x.has_value() ? x->const_data_ptr<T>() : nullptr;
}

// A tensor to add to, in one piece or with rows in one piece each; write() brings it back to where
// it came from.
struct Written {
  OptionalTensor original, dense;

  explicit Written(const OptionalTensor& x, bool by_row = false) {
    if (!x.has_value()) return;
    check_no_internal_overlap(*x);
    original = *x;
    dense = by_row ? with_dense_rows(*x) : as_contiguous(*x);
  }
  template <class T>
  T* data() const {
    return dense.has_value() ? dense->mutable_data_ptr<T>() : nullptr;
  }
  template <class T>
  Matrix<T> matrix() const {
    return {data<T>(), dense.has_value() ? dense->stride(0) : 0};
  }
  void write() const {
    if (!dense.has_value() || dense->get() == original->get()) return;
    Tensor to = *original;
    torch::stable::copy_(to, *dense);
  }
};

// What was given, dense, its indices checked.
struct Dense {
  Tensor value, key, source, offsets;
  OptionalTensor query, att, edge_attr, edge_weight, targets, edges, drop_key, places;
  OptionalTensor query_edges;  // dot
  int64_t num_targets;

  Dense(const Given& g, int64_t targets_in_all, bool transposed);

  // <rows[n, h], edge_weight[d, h]>: [N, H, D]
  Tensor edge_products(const Tensor& rows) const;
};

template <class T>
Terms<T> terms(const Given& g, const Dense& d, int64_t chunks) {
  Terms<T> t{};
  t.heads = d.value.size(1);
  t.channels = d.value.size(2);
  t.features = features(g);
  t.value = matrix<T>(d.value);
  t.key = matrix<T>(d.key);
  t.query = matrix<T>(d.query);
  t.edge_attr = matrix<T>(d.edge_attr);
  t.att = data<T>(d.att);
  t.edge_weight = data<T>(d.edge_weight);
  t.slope = static_cast<T>(g.slope);
  t.scale = static_cast<T>(g.scale);
  t.source = d.source.const_data_ptr<int32_t>();
  t.offsets = d.offsets.const_data_ptr<int64_t>();
  t.targets = data<int64_t>(d.targets);
  if (d.edges.has_value()) {
    const bool narrow = d.edges->scalar_type() == kInt;
    t.edges_int = narrow ? d.edges->const_data_ptr<int32_t>() : nullptr;
    t.edges_long = narrow ? nullptr : d.edges->const_data_ptr<int64_t>();
  }
  t.drop_key = data<int32_t>(d.drop_key);
  t.drop_words = d.drop_key.has_value() && d.drop_key->dim() == 2 ? d.drop_key->size(1) : 0;
  t.places = data<int32_t>(d.places);
  t.seed_low = static_cast<uint32_t>(g.seed_low);
  t.seed_high = static_cast<uint32_t>(g.seed_high);
  t.threshold = static_cast<uint32_t>(std::min(g.p * 4294967296.0, 4294967295.0));
  t.kept = g.p < 1 ? static_cast<T>(1 / (1 - g.p)) : T(0);
  t.num_segments = d.offsets.numel() - 1;
  t.num_edges = d.source.numel();
  t.chunks = chunks;
  t.distance = distance_of<T>(t.width());
  return t;
}

// What the backward passes keep alive while they run.
struct Backward {
  Dense dense;
  Tensor grad_out;
  OptionalTensor grad_edges, packed_rows;

  Backward(const Given& g, const Cotangent& c, bool transposed);

  // Rows for those passes that read them: maximum, normaliser, delta and (additive) query of a
  // target, side by side. They may be so already, as published rows of other workers are.
  void pack(const Given& g, const Cotangent& c);
  template <class T>
  Tensor packed(const Cotangent& c, const OptionalTensor& query) const;

  template <class T>
  Known<T> known() const {
    return {matrix<T>(grad_out), matrix<T>(packed_rows), data<T>(dense.query_edges),
            data<T>(grad_edges)};
  }
};

// Buffers that each chunk adds to: the first is the result itself.
struct PerChunk {
  OptionalTensor result, others;  // others: [chunks - 1, ...]

  PerChunk(const OptionalTensor& out, int64_t chunks) : result(out) {
    if (!out.has_value()) return;
    std::vector<int64_t> shape = out->sizes().vec();
    shape.insert(shape.begin(), chunks - 1);
    others = torch::stable::new_zeros(*out, shape);
  }
  template <class T>
  std::vector<T*> pointers() const {
    if (!result.has_value()) return {};
    std::vector<T*> found{result->mutable_data_ptr<T>()};
    T* first = others->mutable_data_ptr<T>();
    const int64_t size = result->numel();
    for (int64_t c = 0; c < others->size(0); ++c) found.push_back(first + c * size);
    return found;
  }
  void sum() const {
    if (!result.has_value()) return;
    result->scalar_type() == kFloat ? sum_of(pointers<float>()) : sum_of(pointers<double>());
  }

 private:
  // In the order of the chunks.
  template <class T>
  void sum_of(const std::vector<T*>& chunks) const {
    parallel_for(0, result->numel(), kSummedAtOnce, [&](int64_t first, int64_t last) {
      for (size_t c = 1; c < chunks.size(); ++c) {
        for (int64_t k = first; k < last; ++k) chunks[0][k] += chunks[c][k];
      }
    });
  }
};

}  // namespace pyg_sar::attention
