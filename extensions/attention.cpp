// Attention over a shard's edges, target by target and head by head, with an online softmax:
//
//   s_e = score(query_i, key_j, edge_attr_e),   a_e = exp(s_e - maximum_i) / normaliser_i,
//   acc_i += exp(s_e - maximum_i) * k_e * value_e,   dL/ds_e = a_e (k_e <g_i, value_e> - delta_i)
//
// Nothing per edge is stored: the backward passes recompute. A row is added to by one thread, in a
// fixed order; what edges of several rows share has a buffer per chunk of edges, summed in order.
// All indices are checked before anything is read or written.

#include "attention.h"
#include "factored.h"
#include "segments.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <optional>

namespace pyg_sar::attention {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kName = "attention";
constexpr int64_t kGrain = 1 << 16;          // values that a chunk's edges read, at least
constexpr int64_t kLargeChunk = 1 << 22;     // the same where there are many chunks
constexpr int64_t kPerHead = 8;              // what an edge's scalars cost, in values
constexpr int64_t kMostChunks = 1 << 16;
constexpr int64_t kChunksOfParameters = 64;  // each has a buffer

// What the operators take after their own tensors.
struct Given {
  int64_t kind;
  const Tensor& value;
  const OptionalTensor &key, &query, &att, &edge_attr, &edge_weight;
  double slope, scale;
  const Tensor &source, &offsets;
  const OptionalTensor &targets, &edges, &drop_key;
  int64_t seed_low, seed_high;
  double p;
  OptionalTensor places = std::nullopt;  // transposed: where keys and values lie
};

#define PYG_SAR_GIVEN                                                                             \
  int64_t kind, const Tensor &value, const OptionalTensor &key, const OptionalTensor &query,      \
      const OptionalTensor &att, const OptionalTensor &edge_attr,                                 \
      const OptionalTensor &edge_weight, double slope, double scale, const Tensor &source,        \
      const Tensor &offsets, const OptionalTensor &targets, const OptionalTensor &edges,          \
      const OptionalTensor &drop_key, int64_t seed_low, int64_t seed_high, double p
#define PYG_SAR_GIVEN_NAMES                                                                       \
  Given {                                                                                         \
    kind, value, key, query, att, edge_attr, edge_weight, slope, scale, source, offsets, targets, \
        edges, drop_key, seed_low, seed_high, p                                                   \
  }

// Checks of shapes and dtypes #################################################

void expect(const char* name, const OptionalTensor& tensor, at::IntArrayRef shape,
            at::ScalarType dtype) {
  if (!tensor.has_value()) return;
  TORCH_CHECK_VALUE(tensor->sizes() == shape, "attention: expected '", name, "' of shape ", shape,
                    " (got ", tensor->sizes(), ")");
  TORCH_CHECK_TYPE(tensor->scalar_type() == dtype, "attention: expected '", name, "' of dtype ",
                   dtype, " (got ", tensor->scalar_type(), ")");
}

// Rows of keys and values that edges name.
int64_t source_rows(const Given& g) {
  return g.places.has_value() ? g.places->size(0) : g.value.size(0);
}

int64_t features(const Given& g) { return g.edge_attr.has_value() ? g.edge_attr->size(1) : 0; }

std::vector<int64_t> row_shape(const Given& g) {
  if (g.kind == kAdditive) return {g.value.size(1)};
  return {g.value.size(1), g.value.size(2)};
}

std::vector<int64_t> with_rows(int64_t rows, std::vector<int64_t> row) {
  row.insert(row.begin(), rows);
  return row;
}

void check_edges(const Given& g) {
  checked(kName, g.source, g.offsets, g.targets, std::nullopt);
  if (g.edges.has_value()) expect("edges", g.edges, g.source.sizes(), g.source.scalar_type());
  TORCH_CHECK_VALUE(g.p >= 0 && g.p <= 1, "attention: expected 'p' between 0 and 1 (got ", g.p, ")");
  TORCH_CHECK_VALUE(g.p == 0 || g.drop_key.has_value(), "attention: dropout needs a 'drop_key'");
  if (!g.drop_key.has_value()) return;
  TORCH_CHECK_VALUE(g.drop_key->dim() == 1, "attention: expected 'drop_key' of shape [E] (got ",
                    g.drop_key->sizes(), ")");
  expect("drop_key", g.drop_key, g.drop_key->sizes(), at::kInt);
}

void check(const Given& g, int64_t num_targets) {
  const auto dtype = g.value.scalar_type();
  TORCH_CHECK_VALUE(g.kind >= kAdditive && g.kind <= kMixed, "attention: unknown kind ", g.kind);
  TORCH_CHECK_VALUE(g.value.dim() == 3, "attention: expected 'value' of shape [M, H, C] (got ",
                    g.value.sizes(), ")");
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble,
                   "attention: expected float32 or float64 'value' (got ", dtype, ")");
  TORCH_CHECK_VALUE(g.key.has_value() || g.kind != kAdditive, "attention: 'key' is missing");
  TORCH_CHECK_VALUE(g.query.has_value() || g.kind == kAdditive, "attention: 'query' is missing");
  TORCH_CHECK_VALUE(g.att.has_value() == (g.kind == kGatv2 || g.kind == kMixed),
                    "attention: 'att' goes with gatv2 and mixed");
  TORCH_CHECK_VALUE(!g.edge_attr.has_value() || g.kind != kMixed,
                    "attention: mixed scores have no 'edge_attr'");
  TORCH_CHECK_VALUE(g.edge_attr.has_value() == g.edge_weight.has_value(),
                    "attention: 'edge_attr' goes with 'edge_weight'");
  const auto row = row_shape(g);
  expect("key", g.key, with_rows(g.value.size(0), row), dtype);
  expect("query", g.query, with_rows(num_targets, row), dtype);
  expect("att", g.att, g.kind == kMixed ? with_rows(2, row) : row, dtype);
  if (g.edge_attr.has_value()) {
    TORCH_CHECK_VALUE(g.edge_attr->dim() == 2, "attention: expected 'edge_attr' of shape [E, D] (got ",
                      g.edge_attr->sizes(), ")");
    expect("edge_attr", g.edge_attr, g.edge_attr->sizes(), dtype);
    expect("edge_weight", g.edge_weight, with_rows(features(g), row), dtype);
  }
  check_edges(g);
}

// Checks of indices ###########################################################

// Edges' numbers name rows of what edges have.
template <class Index>
void check_numbers(const Given& g, int64_t num_edges, const OptionalTensor& edges) {
  int64_t rows = std::numeric_limits<int64_t>::max();
  if (!g.edge_attr.has_value() && !g.drop_key.has_value()) return;
  if (g.edge_attr.has_value()) rows = std::min(rows, g.edge_attr->size(0));
  if (g.drop_key.has_value()) rows = std::min(rows, g.drop_key->size(0));
  if (!edges.has_value()) {
    TORCH_CHECK_INDEX(num_edges <= rows, "attention: ", num_edges, " edges, and ", rows,
                      " rows of 'edge_attr' or 'drop_key'");
    return;
  }
  const Index* number = edges->const_data_ptr<Index>();
  std::atomic<bool> good{true};
  at::parallel_for(0, num_edges, 1 << 18, [&](int64_t start, int64_t stop) {
    if (!within(number + start, stop - start, rows)) good = false;
  });
  TORCH_CHECK_INDEX(good, "attention: 'edges' names a row outside [0, ", rows, ")");
}

// 'read' and 'added' are how many rows edges read and add to.
template <class Index>
void check_indices(const Given& g, const SegmentTensors& segments, const OptionalTensor& edges,
                   int64_t read, int64_t added) {
  checked<Index>(kName, segments, read, added);
  check_numbers<Index>(g, segments.source.numel(), edges);
}

// Memory as the loops want it ##################################################

// Rows that lie in one piece each; a copy where they don't.
Tensor with_dense_rows(const Tensor& x) {
  int64_t expected = 1;
  for (int64_t axis = x.dim() - 1; axis > 0; --axis) {
    if (x.size(axis) != 1 && x.stride(axis) != expected) return x.contiguous();
    expected *= x.size(axis);
  }
  return x;
}

template <class T>
Matrix<const T> matrix(const Tensor& x) {
  if (!x.defined() || x.numel() == 0) return {};
  return {x.const_data_ptr<T>(), x.stride(0)};
}

template <class T>
const T* data(const Tensor& x) {
  return x.defined() ? x.const_data_ptr<T>() : nullptr;
}

// A tensor to add to, in one piece or with rows in one piece each; write() brings it back to where
// it came from.
struct Written {
  Tensor original, dense;

  explicit Written(const OptionalTensor& x, bool by_row = false) {
    if (!x.has_value()) return;
    at::assert_no_internal_overlap(*x);
    original = *x;
    dense = by_row ? with_dense_rows(*x) : x->contiguous();
  }
  template <class T>
  T* data() const {
    return dense.defined() ? dense.mutable_data_ptr<T>() : nullptr;
  }
  template <class T>
  Matrix<T> matrix() const {
    return {data<T>(), dense.defined() ? dense.stride(0) : 0};
  }
  void write() const {
    if (dense.defined() && !dense.is_same(original)) original.copy_(dense);
  }
};

// What was given, dense and checked.
struct Dense {
  Tensor value, key, query, att, edge_attr, edge_weight, source, offsets, targets, edges, drop_key;
  Tensor places;
  Tensor query_edges, grad_edges;
  int64_t num_targets;

  Dense(const Given& g, int64_t targets_in_all, bool transposed) : num_targets(targets_in_all) {
    const auto dense = [](const OptionalTensor& x) {
      return x.has_value() ? x->contiguous() : Tensor();
    };
    value = with_dense_rows(g.value);
    key = g.key.has_value() ? with_dense_rows(*g.key) : value;
    query = g.query.has_value() ? with_dense_rows(*g.query) : Tensor();
    edge_attr = g.edge_attr.has_value() ? with_dense_rows(*g.edge_attr) : Tensor();
    att = dense(g.att);
    edge_weight = dense(g.edge_weight);
    drop_key = g.p > 0 ? dense(g.drop_key) : Tensor();
    const int64_t read = transposed ? num_targets : value.size(0);
    const int64_t added = transposed ? source_rows(g) : num_targets;
    TORCH_CHECK_VALUE(std::max(read, added) <= std::numeric_limits<int32_t>::max(),
                      "attention: more rows than int32 can name");
    const SegmentTensors segments =
        checked(kName, g.source, g.offsets, g.targets, std::nullopt);
    edges = dense(g.edges);
    const OptionalTensor numbers = edges.defined() ? OptionalTensor(edges) : std::nullopt;
    segments.is_narrow() ? check_indices<int32_t>(g, segments, numbers, read, added)
                         : check_indices<int64_t>(g, segments, numbers, read, added);
    if (g.places.has_value()) {
      places = g.places->to(at::kInt).contiguous();
      TORCH_CHECK_INDEX(within(places.const_data_ptr<int32_t>(), places.numel(), value.size(0)),
                        "attention: 'places' names a row outside [0, ", value.size(0), ")");
    }
    targets = segments.targets.value_or(Tensor());
    offsets = segments.offsets.to(at::kLong);
    source = segments.source.to(at::kInt);
    if (g.kind == kDot && edge_attr.defined()) query_edges = edge_products(query);
  }

  // <rows[n, h], edge_weight[d, h]>: [N, H, D]
  Tensor edge_products(const Tensor& rows) const {
    return at::einsum("nhc,dhc->nhd", {rows, edge_weight}).contiguous();
  }
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
  if (d.edges.defined()) {
    const bool narrow = d.edges.scalar_type() == at::kInt;
    t.edges_int = narrow ? d.edges.const_data_ptr<int32_t>() : nullptr;
    t.edges_long = narrow ? nullptr : d.edges.const_data_ptr<int64_t>();
  }
  t.drop_key = data<int32_t>(d.drop_key);
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

// Threads and processors #######################################################

#ifdef PYG_SAR_LEVELS
#define PYG_SAR_AVX512 \
  __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma,bmi2,prefer-vector-width=512")))
#define PYG_SAR_AVX2 __attribute__((target("avx2,fma,bmi2")))

template <class Pass>
PYG_SAR_AVX512 void on_avx512(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

template <class Pass>
PYG_SAR_AVX2 void on_avx2(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

int level() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
    return 2;
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}
#else
int level() { return 0; }
#endif

template <class Pass>
void on_any(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

template <class Pass>
void run(const Pass& pass) {
#ifdef PYG_SAR_LEVELS
  const int best = level();
  if (best == 2) return for_chunks(pass.t.chunks, [&](int64_t chunk) { on_avx512(pass, chunk); });
  if (best == 1) return for_chunks(pass.t.chunks, [&](int64_t chunk) { on_avx2(pass, chunk); });
#endif
  for_chunks(pass.t.chunks, [&](int64_t chunk) { on_any(pass, chunk); });
}

#ifdef PYG_SAR_LEVELS
// With a constant number of channels: for the processors with the widest registers only.
template <class Pass>
void run_wide(const Pass& pass) {
  for_chunks(pass.t.chunks, [&](int64_t chunk) { on_avx512(pass, chunk); });
}
#endif

// Runs a pass that 'make' makes for a kind and a number of channels (0: any).
template <template <class, int64_t, int64_t> class Pass, class T, int64_t kKind, class Make>
void dispatch_channels(int64_t channels, const Make& make) {
#ifdef PYG_SAR_LEVELS
  if constexpr (std::is_same_v<T, float>) {
    if (level() == 2) {
      switch (channels) {
        case 8: return run_wide(make.template operator()<Pass<T, kKind, 8>>());
        case 16: return run_wide(make.template operator()<Pass<T, kKind, 16>>());
        case 32: return run_wide(make.template operator()<Pass<T, kKind, 32>>());
        case 64: return run_wide(make.template operator()<Pass<T, kKind, 64>>());
        default: break;
      }
    }
  }
#endif
  run(make.template operator()<Pass<T, kKind, 0>>());
}

template <template <class, int64_t, int64_t> class Pass, class T, class Make>
void dispatch(int64_t kind, int64_t channels, const Make& make) {
  if (kind == kGatv2) return dispatch_channels<Pass, T, kGatv2>(channels, make);
  if (kind == kDot) return dispatch_channels<Pass, T, kDot>(channels, make);
  if (kind == kMixed) return dispatch_channels<Pass, T, kMixed>(channels, make);
  if constexpr (!std::is_same_v<Pass<T, kDot, 0>, Targets<T, kDot, 0>>) {
    dispatch_channels<Pass, T, kAdditive>(channels, make);
  }
}

// At most as many chunks as there is work for.
int64_t num_chunks(const Given& g, int64_t most) {
  const int64_t width = g.value.size(1) * (g.value.size(2) + kPerHead);
  const int64_t values = (g.source.numel() + g.offsets.numel()) * width;
  // Small chunks keep threads even, large ones keep rows coming: a chunk starts with none fetched.
  const int64_t even = std::max<int64_t>(8 * at::get_num_threads(), values / kLargeChunk);
  return std::clamp<int64_t>(values / kGrain, 1, std::min(even, most));
}

// Buffers that each chunk adds to: the first is the result itself.
struct PerChunk {
  Tensor result, others;

  PerChunk(const Tensor& out, int64_t chunks) : result(out) {
    if (!out.defined()) return;
    std::vector<int64_t> shape = out.sizes().vec();
    shape.insert(shape.begin(), chunks - 1);
    others = at::zeros(shape, out.options());
  }
  template <class T>
  std::vector<T*> pointers() const {
    if (!result.defined()) return {};
    std::vector<T*> found{result.mutable_data_ptr<T>()};
    T* first = others.mutable_data_ptr<T>();
    for (int64_t c = 0; c < others.size(0); ++c) found.push_back(first + c * result.numel());
    return found;
  }
  void sum() const {
    if (!result.defined()) return;
    for (int64_t c = 0; c < others.size(0); ++c) result.add_(others[c]);
  }
};

// The operators ################################################################

bool nothing(const Given& g) { return g.source.numel() == 0 || g.value[0].numel() == 0; }

void check_state(const Tensor& acc, const Tensor& maximum, const Tensor& normaliser,
                 const Given& g) {
  const auto dtype = g.value.scalar_type();
  TORCH_CHECK_VALUE(acc.dim() == 3, "attention: expected 'acc' of shape [N, H, C] (got ",
                    acc.sizes(), ")");
  check(g, acc.size(0));
  expect("acc", acc, {acc.size(0), g.value.size(1), g.value.size(2)}, dtype);
  expect("maximum", maximum, {acc.size(0), g.value.size(1)}, dtype);
  expect("normaliser", normaliser, {acc.size(0), g.value.size(1)}, dtype);
}

void attention_cpu(Tensor& acc, Tensor& maximum, Tensor& normaliser, PYG_SAR_GIVEN) {
  const Given g = PYG_SAR_GIVEN_NAMES;
  check_state(acc, maximum, normaliser, g);
  const Dense dense(g, acc.size(0), false);
  if (nothing(g)) return;
  const Written sums(acc), top(maximum), total(normaliser);
  const int64_t chunks = num_chunks(g, kMostChunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, dense, chunks), sums.data<T>(), top.data<T>(), total.data<T>(),
                data<T>(dense.query_edges)};
  };
  if (value.scalar_type() == at::kDouble) {
    dispatch<Forward, double>(kind, value.size(2), make);
  } else if (kind != kAdditive ||
             !add_factored(terms<float>(g, dense, chunks), value.size(0),
                           {sums.data<float>(), top.data<float>(), total.data<float>()})) {
    dispatch<Forward, float>(kind, value.size(2), make);
  }
  for (const Written* written : {&sums, &top, &total}) written->write();
}

void check_known(const Tensor& grad_out, const Tensor& maximum, const Tensor& normaliser,
                 const Tensor& delta, const Given& g) {
  const auto dtype = g.value.scalar_type();
  TORCH_CHECK_VALUE(grad_out.dim() == 3, "attention: expected 'grad_out' of shape [N, H, C] (got ",
                    grad_out.sizes(), ")");
  const int64_t rows = grad_out.size(0), heads = g.value.size(1);
  check(g, rows);
  expect("grad_out", grad_out, {rows, heads, g.value.size(2)}, dtype);
  expect("maximum", maximum, {rows, heads}, dtype);
  expect("normaliser", normaliser, {rows, heads}, dtype);
  expect("delta", delta, {rows, heads}, dtype);
}

// maximum, 1 / normaliser, delta and (additive) query of a target, side by side
Tensor packed(const Given& g, const Tensor& maximum, const Tensor& normaliser,
              const Tensor& delta) {
  const bool additive = g.kind == kAdditive && g.query.has_value();
  const Tensor last = additive ? *g.query : at::zeros_like(maximum);
  return at::cat({maximum, normaliser.reciprocal(), delta, last}, 1);
}

// What the backward passes keep alive while they run. Rows are packed by those that read them.
struct Backward {
  Dense dense;
  Tensor grad_out, packed_rows;

  Backward(const Given& g, const Tensor& grad, bool transposed)
      : dense(g, grad.size(0), transposed), grad_out(with_dense_rows(grad)) {
    if (dense.query_edges.defined()) dense.grad_edges = dense.edge_products(grad_out);
  }
  template <class T>
  Known<T> known() const {
    return {matrix<T>(grad_out), packed_rows.const_data_ptr<T>(), data<T>(dense.query_edges),
            data<T>(dense.grad_edges)};
  }
};

#define PYG_SAR_KNOWN \
  const Tensor &grad_out, const Tensor &maximum, const Tensor &normaliser, const Tensor &delta

void check_written(const char* name, const OptionalTensor& gradient, const OptionalTensor& of) {
  if (!gradient.has_value()) return;
  TORCH_CHECK_VALUE(of.has_value(), "attention: a gradient of '", name, "', which is None");
  expect(name, gradient, of->sizes(), of->scalar_type());
}

void check_of_sources(const char* name, const OptionalTensor& gradient, const OptionalTensor& of,
                      const Given& g) {
  if (!gradient.has_value() || !of.has_value()) return check_written(name, gradient, of);
  auto shape = of->sizes().vec();
  shape[0] = source_rows(g);
  expect(name, gradient, shape, of->scalar_type());
}

void check_sources(const OptionalTensor& grad_value, const OptionalTensor& grad_key,
                   const OptionalTensor& grad_query, const OptionalTensor& grad_edge_attr,
                   const OptionalTensor& grad_edge_weight, const Given& g) {
  if (g.places.has_value()) {
    TORCH_CHECK_VALUE(g.places->dim() == 1, "attention: expected 'places' of shape [M] (got ",
                      g.places->sizes(), ")");
  }
  check_of_sources("grad_value", grad_value, g.value, g);
  check_of_sources("grad_key", grad_key, g.key, g);
  check_written("grad_query", grad_query, g.query);
  check_written("grad_edge_attr", grad_edge_attr, g.edge_attr);
  check_written("grad_edge_weight", grad_edge_weight, g.edge_weight);
  TORCH_CHECK_VALUE(g.kind == kAdditive || !(grad_query.has_value() || grad_edge_attr.has_value() ||
                                             grad_edge_weight.has_value()),
                    "attention: gradients of the query and of edges come by target");
}

void backward_sources_cpu(const OptionalTensor& grad_value, const OptionalTensor& grad_key,
                          const OptionalTensor& grad_query, const OptionalTensor& grad_edge_attr,
                          const OptionalTensor& grad_edge_weight, PYG_SAR_KNOWN, PYG_SAR_GIVEN,
                          const OptionalTensor& places) {
  Given g = PYG_SAR_GIVEN_NAMES;
  g.places = places;
  check_known(grad_out, maximum, normaliser, delta, g);
  check_sources(grad_value, grad_key, grad_query, grad_edge_attr, grad_edge_weight, g);
  Backward all(g, grad_out, true);
  if (nothing(g)) return;
  const Written values(grad_value, true), keys(grad_key, true), queries(grad_query);
  const Written attrs(grad_edge_attr), weights(grad_edge_weight);
  int64_t most = grad_edge_weight.has_value() ? kChunksOfParameters : kMostChunks;
  if (grad_query.has_value()) most = at::get_num_threads();
  const int64_t chunks = num_chunks(g, most);
  const PerChunk query_sums(queries.dense, chunks), weight_sums(weights.dense, chunks);
  const auto factored = [&] {
    const Tensor top = maximum.contiguous(), total = normaliser.contiguous();
    const Tensor mean = delta.contiguous();
    const auto of_queries = query_sums.pointers<float>();
    return add_factored_sources(
        terms<float>(g, all.dense, chunks), grad_out.size(0),
        {matrix<float>(all.grad_out), data<float>(top), data<float>(total), data<float>(mean),
         values.matrix<float>(), keys.matrix<float>(), of_queries});
  };
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    const auto of_values = values.matrix<T>();
    return Pass{terms<T>(g, all.dense, chunks),
                all.known<T>(),
                of_values,
                g.key.has_value() ? keys.matrix<T>() : of_values,
                attrs.data<T>(),
                query_sums.pointers<T>(),
                weight_sums.pointers<T>()};
  };
  const bool is_float = value.scalar_type() == at::kFloat;
  if (!is_float || kind != kAdditive || !factored()) {
    all.packed_rows = packed(g, maximum, normaliser, delta);
    is_float ? dispatch<Sources, float>(kind, value.size(2), make)
             : dispatch<Sources, double>(kind, value.size(2), make);
  }
  query_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&values, &keys, &queries, &attrs, &weights}) w->write();
}

void check_targets(const OptionalTensor& grad_query, const OptionalTensor& grad_att,
                   const OptionalTensor& grad_edge_attr, const OptionalTensor& grad_edge_weight,
                   const Given& g) {
  TORCH_CHECK_VALUE(g.kind != kAdditive, "attention: gradients of additive scores come by source");
  check_written("grad_query", grad_query, g.query);
  check_written("grad_att", grad_att, g.att);
  check_written("grad_edge_attr", grad_edge_attr, g.edge_attr);
  check_written("grad_edge_weight", grad_edge_weight, g.edge_weight);
}

void backward_targets_cpu(const OptionalTensor& grad_query, const OptionalTensor& grad_att,
                          const OptionalTensor& grad_edge_attr,
                          const OptionalTensor& grad_edge_weight, PYG_SAR_KNOWN, PYG_SAR_GIVEN) {
  const Given g = PYG_SAR_GIVEN_NAMES;
  check_known(grad_out, maximum, normaliser, delta, g);
  check_targets(grad_query, grad_att, grad_edge_attr, grad_edge_weight, g);
  Backward all(g, grad_out, false);
  if (nothing(g)) return;
  all.packed_rows = packed(g, maximum, normaliser, delta);
  const Written queries(grad_query), atts(grad_att), attrs(grad_edge_attr);
  const Written weights(grad_edge_weight);
  const bool shared = grad_att.has_value() || grad_edge_weight.has_value();
  const int64_t chunks = num_chunks(g, shared ? kChunksOfParameters : kMostChunks);
  const PerChunk att_sums(atts.dense, chunks), weight_sums(weights.dense, chunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, all.dense, chunks), all.known<T>(),         queries.data<T>(),
                attrs.data<T>(),                att_sums.pointers<T>(), weight_sums.pointers<T>()};
  };
  value.scalar_type() == at::kFloat ? dispatch<Targets, float>(kind, value.size(2), make)
                                    : dispatch<Targets, double>(kind, value.size(2), make);
  att_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&queries, &atts, &attrs, &weights}) w->write();
}

// Shapes alone: arguments are checked when a kernel runs, and sizes may be symbols here ##########

void attention_meta(Tensor&, Tensor&, Tensor&, PYG_SAR_GIVEN) {}

void backward_sources_meta(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, PYG_SAR_KNOWN, PYG_SAR_GIVEN,
                           const OptionalTensor&) {}

void backward_targets_meta(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, PYG_SAR_KNOWN, PYG_SAR_GIVEN) {}

#define PYG_SAR_SCHEMA                                                                          \
  "int kind, Tensor value, Tensor? key, Tensor? query, Tensor? att, Tensor? edge_attr, "        \
  "Tensor? edge_weight, float slope, float scale, Tensor source, Tensor offsets, "              \
  "Tensor? targets, Tensor? edges, Tensor? drop_key, int seed_low, int seed_high, float p"
#define PYG_SAR_KNOWN_SCHEMA "Tensor grad_out, Tensor maximum, Tensor normaliser, Tensor delta, "

}  // namespace

TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("attention_(Tensor(a!) acc, Tensor(b!) maximum, Tensor(c!) normaliser, " PYG_SAR_SCHEMA ") -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward_sources_(Tensor(a!)? grad_value, Tensor(b!)? grad_key, "
      "Tensor(c!)? grad_query, Tensor(d!)? grad_edge_attr, "
      "Tensor(e!)? grad_edge_weight, " PYG_SAR_KNOWN_SCHEMA PYG_SAR_SCHEMA
      ", Tensor? places=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward_targets_(Tensor(a!)? grad_query, Tensor(b!)? grad_att, "
      "Tensor(c!)? grad_edge_attr, "
      "Tensor(d!)? grad_edge_weight, " PYG_SAR_KNOWN_SCHEMA PYG_SAR_SCHEMA ") -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("attention_", &attention_cpu);
  m.impl("attention_backward_sources_", &backward_sources_cpu);
  m.impl("attention_backward_targets_", &backward_targets_cpu);
}
TORCH_LIBRARY_IMPL(pyg_sar, Meta, m) {
  m.impl("attention_", &attention_meta);
  m.impl("attention_backward_sources_", &backward_sources_meta);
  m.impl("attention_backward_targets_", &backward_targets_meta);
}

}  // namespace pyg_sar::attention
