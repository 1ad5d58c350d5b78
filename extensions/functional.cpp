// The kernels as functions that autograd records: gather_sum and attention of all edges at once.
//
// Both are made of the operators that add in place, forward and backward; so they run, are traced and
// are functionalized as these are. What a shard at a time needs (pyg_sar/engine/fused_attention.py) is not
// a function of its inputs alone, and calls the operators in place itself.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>

namespace pyg_sar {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Three = std::tuple<Tensor, Tensor, Tensor>;

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

OptionalTensor optional(const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

Tensor defined_or_not(const OptionalTensor& x) { return x.value_or(Tensor()); }

void check_once(const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "pyg_sar::", name,
                              " has no second derivatives: call it without create_graph=True");
}

Three transposed(const Tensor& source, const Tensor& offsets, const OptionalTensor& targets,
                 const OptionalTensor& edges, const SymInt& num_rows, const SymInt& num_targets,
                 bool numbered) {
  static const auto run = op<Three(const Tensor&, const Tensor&, const OptionalTensor&,
                                   const OptionalTensor&, SymInt, SymInt, bool)>("pyg_sar::transpose");
  return run.call(source, offsets, targets, edges, num_rows, num_targets, numbered);
}

// Sums #########################################################################

void add_sum(Tensor& out, const Tensor& rows, const Tensor& source, const Tensor& offsets,
             const OptionalTensor& targets, const OptionalTensor& weight,
             const OptionalTensor& edges) {
  static const auto run =
      op<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
              const OptionalTensor&, const OptionalTensor&)>("pyg_sar::gather_sum_");
  run.call(out, rows, source, offsets, targets, weight, edges);
}

#define PYG_SAR_SUM                                                                            \
  const Tensor &rows, const Tensor &source, const Tensor &offsets, const OptionalTensor &targets, \
      const OptionalTensor &weight, const OptionalTensor &edges, SymInt num_targets
using SumSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                            const OptionalTensor&, const OptionalTensor&, SymInt);

Tensor empty_sum(PYG_SAR_SUM) {
  TORCH_CHECK_VALUE(rows.dim() == 2, "gather_sum: expected 'rows' of shape [M, F] (got ",
                    rows.sym_sizes(), ")");
  return at::zeros_symint({num_targets, rows.sym_size(1)}, rows.options());
}

Tensor sum_cpu(PYG_SAR_SUM) {
  Tensor out = empty_sum(rows, source, offsets, targets, weight, edges, num_targets);
  add_sum(out, rows, source, offsets, targets, weight, edges);
  return out;
}

struct Sum : torch::autograd::Function<Sum> {
  static Tensor forward(AutogradContext* ctx, PYG_SAR_SUM) {
    const bool weights_too = weight.has_value() && weight->requires_grad();
    ctx->save_for_backward({weights_too ? rows : Tensor(), source, offsets,
                            defined_or_not(targets), defined_or_not(weight), defined_or_not(edges)});
    ctx->saved_data["rows"] = rows.requires_grad();
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto run = op<SumSignature>("pyg_sar::gather_sum");
    return run.call(rows, source, offsets, targets, weight, edges, num_targets);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(7);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return found;
    check_once("gather_sum");
    const variable_list kept = ctx->get_saved_variables();
    const Tensor &rows = kept[0], &source = kept[1], &offsets = kept[2];
    const OptionalTensor targets = optional(kept[3]), weight = optional(kept[4]);
    const OptionalTensor edges = optional(kept[5]);
    if (ctx->saved_data["rows"].toBool()) {
      const SymInt num_rows = ctx->saved_data["num_rows"].toSymInt();
      const auto [reads, first, numbers] =
          transposed(source, offsets, targets, edges, num_rows, gradient.sym_size(0),
                     weight.has_value());
      found[0] = at::zeros_symint({num_rows, gradient.sym_size(1)}, gradient.options());
      add_sum(found[0], gradient, reads, first, std::nullopt, weight,
              weight.has_value() ? OptionalTensor(numbers) : std::nullopt);
    }
    if (rows.defined()) {
      static const auto run =
          op<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                    const OptionalTensor&, const OptionalTensor&)>("pyg_sar::edge_dot");
      found[4] = run.call(rows, gradient, source, offsets, targets, edges);
    }
    return found;
  }
};

Tensor sum_autograd(PYG_SAR_SUM) {
  return Sum::apply(rows, source, offsets, targets, weight, edges, num_targets);
}

// Attention ####################################################################

constexpr int64_t kAdditive = 0;  // as in attention.h
constexpr const char* kFloats[] = {"value", "key", "query", "att", "edge_attr", "edge_weight"};

#define PYG_SAR_GIVEN                                                                             \
  int64_t kind, const Tensor &value, const OptionalTensor &key, const OptionalTensor &query,      \
      const OptionalTensor &att, const OptionalTensor &edge_attr,                                 \
      const OptionalTensor &edge_weight, double slope, double scale, const Tensor &source,        \
      const Tensor &offsets, const OptionalTensor &targets, const OptionalTensor &edges,          \
      const OptionalTensor &drop_key, int64_t seed_low, int64_t seed_high, double p
#define PYG_SAR_GIVEN_TYPES                                                                     \
  int64_t, const Tensor &, const OptionalTensor &, const OptionalTensor &,                       \
      const OptionalTensor &, const OptionalTensor &, const OptionalTensor &, double, double,    \
      const Tensor &, const Tensor &, const OptionalTensor &, const OptionalTensor &,            \
      const OptionalTensor &, int64_t, int64_t, double
#define PYG_SAR_GIVEN_NAMES                                                                     \
  kind, value, key, query, att, edge_attr, edge_weight, slope, scale, source, offsets, targets, \
      edges, drop_key, seed_low, seed_high, p

Three empty_state(const Tensor& value, const SymInt& num_targets) {
  TORCH_CHECK_VALUE(value.dim() == 3, "attention: expected 'value' of shape [M, H, C] (got ",
                    value.sym_sizes(), ")");
  const SymInt heads = value.sym_size(1);
  return {at::zeros_symint({num_targets, heads, value.sym_size(2)}, value.options()),
          at::full_symint({num_targets, heads}, -std::numeric_limits<double>::infinity(),
                          value.options()),
          at::zeros_symint({num_targets, heads}, value.options())};
}

Three attention_cpu(PYG_SAR_GIVEN, SymInt num_targets) {
  auto [out, maximum, normaliser] = empty_state(value, num_targets);
  static const auto run =
      op<void(Tensor&, Tensor&, Tensor&, PYG_SAR_GIVEN_TYPES)>("pyg_sar::attention_");
  run.call(out, maximum, normaliser, PYG_SAR_GIVEN_NAMES);
  const Tensor none = maximum.eq(-std::numeric_limits<double>::infinity());
  out.div_(normaliser.masked_fill(none, 1).unsqueeze(-1));
  return {out, maximum, normaliser};
}

Three attention_meta(PYG_SAR_GIVEN, SymInt num_targets) { return empty_state(value, num_targets); }

struct Attention : torch::autograd::Function<Attention> {
  static variable_list forward(AutogradContext* ctx, PYG_SAR_GIVEN, SymInt num_targets) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto run =
        op<Three(PYG_SAR_GIVEN_TYPES, SymInt)>("pyg_sar::attention");
    auto [out, maximum, normaliser] = run.call(PYG_SAR_GIVEN_NAMES, num_targets);
    variable_list kept{value};
    for (const OptionalTensor* x : {&key, &query, &att, &edge_attr, &edge_weight}) {
      kept.push_back(defined_or_not(*x));
    }
    for (int k = 0; k < 6; ++k) {
      ctx->saved_data[kFloats[k]] = kept[k].defined() && kept[k].requires_grad();
    }
    kept.insert(kept.end(), {source, offsets, defined_or_not(targets), defined_or_not(edges),
                             defined_or_not(drop_key), out, maximum, normaliser});
    ctx->save_for_backward(kept);
    ctx->mark_non_differentiable({maximum, normaliser});
    ctx->saved_data["integers"] = std::vector<int64_t>{kind, seed_low, seed_high};
    ctx->saved_data["numbers"] = std::vector<double>{slope, scale, p};
    return {out, maximum, normaliser};
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(18);  // as many as forward() takes
    if (!gradients[0].defined()) return found;
    check_once("attention");
    const variable_list kept = ctx->get_saved_variables();
    OptionalTensor wanted[6];
    for (int k = 0; k < 6; ++k) {
      if (!ctx->saved_data[kFloats[k]].toBool()) continue;
      found[k + 1] = at::zeros_symint(kept[k].sym_sizes(), kept[k].options());
      wanted[k] = found[k + 1];
    }
    add_gradients(kept, ctx->saved_data["integers"].toIntVector(),
                  ctx->saved_data["numbers"].toDoubleVector(), gradients[0].contiguous(), wanted);
    return found;
  }

  static void add_gradients(const variable_list& kept, const std::vector<int64_t>& integers,
                            const std::vector<double>& numbers, const Tensor& grad_out,
                            OptionalTensor* wanted) {
    const Tensor &value = kept[0], &out = kept[11], &maximum = kept[12], &normaliser = kept[13];
    const Tensor delta = grad_out.mul(out).sum(-1);
    const OptionalTensor targets = optional(kept[8]), edges = optional(kept[9]), nothing;
    const bool additive = integers[0] == kAdditive;
    const auto given = [&](const auto& call, const Tensor& source, const Tensor& offsets,
                           const OptionalTensor& rows, const OptionalTensor& order,
                           auto&... written) {
      call(written..., grad_out, maximum, normaliser, delta, integers[0], value,
           optional(kept[1]), optional(kept[2]), optional(kept[3]), optional(kept[4]),
           optional(kept[5]), numbers[0], numbers[1], source, offsets, rows, order,
           optional(kept[10]), integers[1], integers[2], numbers[2]);
    };
    OptionalTensor query = additive ? wanted[2] : nothing, attr = additive ? wanted[4] : nothing;
    OptionalTensor weight = additive ? wanted[5] : nothing;
    if (wanted[0] || wanted[1] || query || attr || weight) {
      const bool numbered = kept[4].defined() || kept[10].defined();
      const auto [reads, first, order] = transposed(kept[6], kept[7], targets, edges,
                                                    value.sym_size(0), out.sym_size(0), numbered);
      static const auto run =
          op<void(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                  const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                  const Tensor&, const Tensor&, PYG_SAR_GIVEN_TYPES, const OptionalTensor&)>(
              "pyg_sar::attention_backward_sources_");
      const auto in_order = [&](const auto&... all) { run.call(all..., nothing); };
      given(in_order, reads, first, nothing, numbered ? OptionalTensor(order) : nothing, wanted[0],
            wanted[1], query, attr, weight);
    }
    if (additive || !(wanted[2] || wanted[3] || wanted[4] || wanted[5])) return;
    static const auto run =
        op<void(const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                PYG_SAR_GIVEN_TYPES)>("pyg_sar::attention_backward_targets_");
    const auto call = [&](const auto&... all) { run.call(all...); };
    given(call, kept[6], kept[7], targets, edges, wanted[2], wanted[3], wanted[4], wanted[5]);
  }
};

Three attention_autograd(PYG_SAR_GIVEN, SymInt num_targets) {
  const variable_list found = Attention::apply(PYG_SAR_GIVEN_NAMES, num_targets);
  return {found[0], found[1], found[2]};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(pyg_sar, m) {
  m.def(
      "gather_sum(Tensor rows, Tensor source, Tensor offsets, Tensor? targets, Tensor? weight, "
      "Tensor? edges, SymInt num_targets) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention(int kind, Tensor value, Tensor? key, Tensor? query, Tensor? att, "
      "Tensor? edge_attr, Tensor? edge_weight, float slope, float scale, Tensor source, "
      "Tensor offsets, Tensor? targets, Tensor? edges, Tensor? drop_key, int seed_low, "
      "int seed_high, float p, SymInt num_targets) -> (Tensor out, Tensor maximum, "
      "Tensor normaliser)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(pyg_sar, CPU, m) {
  m.impl("gather_sum", &sum_cpu);
  m.impl("attention", &attention_cpu);
}
TORCH_LIBRARY_IMPL(pyg_sar, Meta, m) {
  m.impl("gather_sum", &empty_sum);
  m.impl("attention", &attention_meta);
}
TORCH_LIBRARY_IMPL(pyg_sar, Autograd, m) {
  m.impl("gather_sum", &sum_autograd);
  m.impl("attention", &attention_autograd);
}

}  // namespace pyg_sar
