// Attention over a shard's edges, target by target and head by head, with an online softmax:
//
//   s_e = score(query_i, key_j, edge_attr_e),   a_e = exp(s_e - maximum_i) / normaliser_i,
//   acc_i += exp(s_e - maximum_i) * k_e * value_e,   dL/ds_e = a_e (k_e <g_i, value_e> - delta_i)
//
// Nothing per edge is stored: the backward passes recompute. A row is added to by one thread, in a
// fixed order; what edges of several rows share has a buffer per chunk of edges, summed in order.
// All indices are checked before anything is read or written.

#include "attention.h"
#include "attention_scores.h"
#include "attention_tensors.h"
#include "segments.h"
#include "stack.h"

#include <limits>
#include <tuple>
#include <vector>

namespace pyg_sar::attention {
namespace {

// Checks of shapes and dtypes #################################################

void expect(const char* name, const OptionalTensor& tensor, Sizes shape, ScalarType dtype) {
  if (!tensor.has_value()) return;
  CHECK_VALUE(same(tensor->sizes(), shape), "attention: expected '", name, "' of shape ", shape,
              " (got ", tensor->sizes(), ")");
  CHECK_DTYPE(tensor->scalar_type() == dtype, "attention: expected '", name, "' of dtype ",
              dtype, " (got ", tensor->scalar_type(), ")");
}

std::vector<int64_t> row_shape(const Given& g, bool narrow) {
  if (narrow) return {g.value.size(1)};
  return {g.value.size(1), g.value.size(2)};
}

std::vector<int64_t> with_rows(int64_t rows, std::vector<int64_t> row) {
  row.insert(row.begin(), rows);
  return row;
}

void check_edges(const Given& g) {
  checked(kName, g.source, g.offsets, g.targets, std::nullopt);
  if (g.edges.has_value()) expect("edges", g.edges, g.source.sizes(), g.source.scalar_type());
  CHECK_VALUE(g.p >= 0 && g.p <= 1, "attention: expected 'p' between 0 and 1 (got ", g.p, ")");
  CHECK_VALUE(g.p == 0 || g.drop_key.has_value(), "attention: dropout needs a 'drop_key'");
  if (!g.drop_key.has_value()) return;
  const int64_t words = (g.value.size(1) + 31) / 32;
  const bool bits = g.drop_key->dim() == 2 && g.drop_key->size(1) == words;
  CHECK_VALUE(g.drop_key->dim() == 1 || bits,
              "attention: expected 'drop_key' of shape [E], or [E, ", words, "] (got ",
              g.drop_key->sizes(), ")");
  expect("drop_key", g.drop_key, g.drop_key->sizes(), kInt);
}

void check(const Given& g, int64_t num_targets) {
  const auto dtype = g.value.scalar_type();
  const Shape* shape = shape_of(g.kind);
  CHECK_VALUE(shape != nullptr, "attention: unknown kind ", g.kind);
  CHECK_VALUE(g.value.dim() == 3, "attention: expected 'value' of shape [M, H, C] (got ",
              g.value.sizes(), ")");
  CHECK_DTYPE(dtype == kFloat || dtype == kDouble,
              "attention: expected float32 or float64 'value' (got ", dtype, ")");
  CHECK_VALUE(g.key.has_value() || !shape->narrow_key, "attention: 'key' is missing");
  CHECK_VALUE(g.query.has_value() || (shape->joined && shape->narrow_query),
              "attention: 'query' is missing");
  CHECK_VALUE(g.att.has_value() == (shape->att > 0), "attention: expected ", shape->att,
              " rows of 'att'");
  CHECK_VALUE(!g.edge_attr.has_value() || shape->term != Term::kNone,
              "attention: these scores have no 'edge_attr'");
  CHECK_VALUE(g.edge_attr.has_value() == g.edge_weight.has_value(),
              "attention: 'edge_attr' goes with 'edge_weight'");
  const auto key = row_shape(g, shape->narrow_key), row = row_shape(g, false);
  expect("key", g.key, with_rows(g.value.size(0), key), dtype);
  expect("query", g.query, with_rows(num_targets, row_shape(g, shape->narrow_query)), dtype);
  expect("att", g.att, shape->att == 2 ? with_rows(2, row) : row, dtype);
  if (g.edge_attr.has_value()) {
    CHECK_VALUE(g.edge_attr->dim() == 2, "attention: expected 'edge_attr' of shape [E, D] (got ",
                g.edge_attr->sizes(), ")");
    expect("edge_attr", g.edge_attr, g.edge_attr->sizes(), dtype);
    expect("edge_weight", g.edge_weight, with_rows(features(g), key), dtype);
  }
  check_edges(g);
}

void check_state(const ForwardArguments& a) {
  const Given& g = a.given;
  const Tensor& acc = a.acc;
  const auto dtype = g.value.scalar_type();
  CHECK_VALUE(acc.dim() == 3, "attention: expected 'acc' of shape [N, H, C] (got ",
              acc.sizes(), ")");
  check(g, acc.size(0));
  expect("acc", acc, {acc.size(0), g.value.size(1), g.value.size(2)}, dtype);
  expect("maximum", a.maximum, {acc.size(0), g.value.size(1)}, dtype);
  expect("normaliser", a.normaliser, {acc.size(0), g.value.size(1)}, dtype);
}


void check_cotangent(const Cotangent& c, const Given& g) {
  const auto dtype = g.value.scalar_type();
  CHECK_VALUE(c.grad_out.dim() == 3, "attention: expected 'grad_out' of shape [N, H, C] (got ",
              c.grad_out.sizes(), ")");
  const int64_t rows = c.grad_out.size(0), heads = g.value.size(1);
  check(g, rows);
  expect("grad_out", c.grad_out, {rows, heads, g.value.size(2)}, dtype);
  expect("maximum", c.maximum, {rows, heads}, dtype);
  expect("normaliser", c.normaliser, {rows, heads}, dtype);
  expect("delta", c.delta, {rows, heads}, dtype);
}

void check_written(const char* name, const OptionalTensor& gradient, const OptionalTensor& of) {
  if (!gradient.has_value()) return;
  CHECK_VALUE(of.has_value(), "attention: a gradient of '", name, "', which is None");
  expect(name, gradient, of->sizes(), of->scalar_type());
}

void check_of_sources(const char* name, const OptionalTensor& gradient, const OptionalTensor& of,
                      const Given& g) {
  if (!gradient.has_value() || !of.has_value()) return check_written(name, gradient, of);
  auto shape = of->sizes().vec();
  shape[0] = source_rows(g);
  expect(name, gradient, shape, of->scalar_type());
}

void check_sources(const SourcesArguments& a) {
  const Given& g = a.given;
  check_cotangent(a.cotangent, g);
  if (g.places.has_value()) {
    CHECK_VALUE(g.places->dim() == 1, "attention: expected 'places' of shape [M] (got ",
                g.places->sizes(), ")");
  }
  check_of_sources("grad_value", a.grad_value, g.value, g);
  check_of_sources("grad_key", a.grad_key, g.key, g);
  check_written("grad_query", a.grad_query, g.query);
  check_written("grad_edge_attr", a.grad_edge_attr, g.edge_attr);
  check_written("grad_edge_weight", a.grad_edge_weight, g.edge_weight);
  CHECK_VALUE(shape_of(g.kind)->by_source ||
                  !(a.grad_query.has_value() || a.grad_edge_attr.has_value() ||
                    a.grad_edge_weight.has_value()),
              "attention: gradients of the query and of edges come by target");
}

void check_targets(const TargetsArguments& a) {
  const Given& g = a.given;
  check_cotangent(a.cotangent, g);
  CHECK_VALUE(!shape_of(g.kind)->by_source, "attention: all gradients come by source");
  check_written("grad_query", a.grad_query, g.query);
  check_written("grad_att", a.grad_att, g.att);
  check_written("grad_edge_attr", a.grad_edge_attr, g.edge_attr);
  check_written("grad_edge_weight", a.grad_edge_weight, g.edge_weight);
}

// The operators ################################################################

template <auto kCheck, auto kRun>
void checked_run(const ArgumentsOf<kRun>& a) {
  kCheck(a);
  kRun(a);
}

// out[i, h, c] /= normaliser[i, h], where an edge reached target i
template <class T>
void divide(const Tensor& out, const Tensor& maximum, const Tensor& normaliser) {
  const int64_t channels = out.size(2);
  const T *top = maximum.const_data_ptr<T>(), *total = normaliser.const_data_ptr<T>();
  T* to = out.mutable_data_ptr<T>();
  parallel_for(0, maximum.numel(), kSummedAtOnce / (channels + 1) + 1, [&](int64_t first, int64_t last) {
    for (int64_t k = first; k < last; ++k) {
      const T by = top[k] == -std::numeric_limits<T>::infinity() ? T(1) : total[k];
      for (int64_t c = 0; c < channels; ++c) to[k * channels + c] /= by;
    }
  });
}

// The state after all edges, with the output in place of 'acc'.
std::tuple<Tensor, Tensor, Tensor> attended(const AllArguments& a) {
  const Tensor& value = a.given.value;
  CHECK_VALUE(value.dim() == 3, "attention: expected 'value' of shape [M, H, C] (got ", value.sizes(), ")");
  const int64_t heads = value.size(1);
  const Tensor out = torch::stable::new_zeros(value, {a.num_targets, heads, value.size(2)});
  const Tensor normaliser = torch::stable::new_zeros(value, {a.num_targets, heads});
  const Tensor maximum = torch::stable::fill_(empty({a.num_targets, heads}, value.scalar_type()),
                                              -std::numeric_limits<double>::infinity());
  checked_run<&check_state, &forward>({out, maximum, normaliser, a.given});
  value.scalar_type() == kFloat ? divide<float>(out, maximum, normaliser)
                                : divide<double>(out, maximum, normaliser);
  return {out, maximum, normaliser};
}

#define PYG_SAR_SCHEMA                                                                          \
  "int kind, Tensor value, Tensor? key, Tensor? query, Tensor? att, Tensor? edge_attr, "        \
  "Tensor? edge_weight, float slope, float scale, Tensor source, Tensor offsets, "              \
  "Tensor? targets, Tensor? edges, Tensor? drop_key, int seed_low, int seed_high, float p"
#define PYG_SAR_KNOWN_SCHEMA "Tensor grad_out, Tensor maximum, Tensor normaliser, Tensor delta, "

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def("attention_(Tensor(a!) acc, Tensor(b!) maximum, Tensor(c!) normaliser, " PYG_SAR_SCHEMA ") -> ()");
  m.def("attention(" PYG_SAR_SCHEMA ", SymInt num_targets) -> (Tensor out, Tensor maximum, "
        "Tensor normaliser)");
  m.def(
      "attention_backward_sources_(Tensor(a!)? grad_value, Tensor(b!)? grad_key, "
      "Tensor(c!)? grad_query, Tensor(d!)? grad_edge_attr, "
      "Tensor(e!)? grad_edge_weight, " PYG_SAR_KNOWN_SCHEMA PYG_SAR_SCHEMA
      ", Tensor? places=None) -> ()");
  m.def(
      "attention_backward_targets_(Tensor(a!)? grad_query, Tensor(b!)? grad_att, "
      "Tensor(c!)? grad_edge_attr, "
      "Tensor(d!)? grad_edge_weight, " PYG_SAR_KNOWN_SCHEMA PYG_SAR_SCHEMA ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("attention_", kernel<&checked_run<&check_state, &forward>>);
  m.impl("attention", kernel<&attended>);
  m.impl("attention_backward_sources_", kernel<&checked_run<&check_sources, &backward_sources>>);
  m.impl("attention_backward_targets_", kernel<&checked_run<&check_targets, &backward_targets>>);
}

}  // namespace pyg_sar::attention
