// The kernels as functions that autograd records: gather_sum and attention of all edges at once.
//
// Both are made of the operators that add in place, forward and backward; so they run, are traced and
// are functionalized as these are. What a shard at a time needs (pyg_sar/engine/fused_attention.py) is not
// a function of its inputs alone, and calls the operators in place itself.

#include "attention_arguments.h"
#include "attention_scores.h"
#include "stack.h"
#include "tensors.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

namespace pyg_sar {
namespace {

using attention::Given;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor optional(const Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

Tensor defined_or_not(const OptionalTensor& x) { return x.value_or(Tensor()); }

void check_once(const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(), "pyg_sar::", name,
                              " has no second derivatives: call it without create_graph=True");
}

// Sums #########################################################################

struct SumArguments {
  Tensor rows, source, offsets;
  OptionalTensor targets, weight, edges;
  SymInt num_targets;

  template <class Visit>
  void visit(const Visit& visit) {
    visit(rows, source, offsets, targets, weight, edges, num_targets);
  }
};

variable_list empty_sum(const SumArguments& a) {
  TORCH_CHECK_VALUE(a.rows.dim() == 2, "gather_sum: expected 'rows' of shape [M, F] (got ",
                    a.rows.sym_sizes(), ")");
  return {at::zeros_symint({a.num_targets, a.rows.sym_size(1)}, a.rows.options())};
}

variable_list sum(const SumArguments& a) {
  variable_list out = empty_sum(a);
  call("pyg_sar::gather_sum_", {out[0], a.rows, a.source, a.offsets, a.targets, a.weight, a.edges});
  return out;
}

struct Sum : torch::autograd::Function<Sum> {
  // 'rows' and 'weight' are those of the arguments, and named for autograd.
  static variable_list forward(AutogradContext* ctx, const SumArguments& a, const Tensor& rows,
                               const OptionalTensor& weight) {
    const bool weights_too = weight.has_value() && weight->requires_grad();
    ctx->save_for_backward({weights_too ? rows : Tensor(), a.source, a.offsets,
                            defined_or_not(a.targets), defined_or_not(weight),
                            defined_or_not(a.edges)});
    ctx->saved_data["rows"] = rows.requires_grad();
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_with("pyg_sar::gather_sum", a);
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(3);
    const Tensor& gradient = gradients[0];
    if (!gradient.defined()) return found;
    check_once("gather_sum");
    const variable_list kept = ctx->get_saved_variables();
    const Tensor &rows = kept[0], &source = kept[1], &offsets = kept[2];
    const OptionalTensor targets = optional(kept[3]), weight = optional(kept[4]);
    const OptionalTensor edges = optional(kept[5]), none;
    if (ctx->saved_data["rows"].toBool()) {
      const SymInt num_rows = ctx->saved_data["num_rows"].toSymInt();
      const bool numbered = weight.has_value();
      const auto by_source = call("pyg_sar::transpose", {source, offsets, targets, edges, num_rows,
                                                         gradient.sym_size(0), numbered});
      found[1] = at::zeros_symint({num_rows, gradient.sym_size(1)}, gradient.options());
      call("pyg_sar::gather_sum_", {found[1], gradient, by_source[0], by_source[1], none, weight,
                                    numbered ? OptionalTensor(by_source[2]) : none});
    }
    if (rows.defined()) {
      found[2] = call("pyg_sar::edge_dot", {rows, gradient, source, offsets, targets, edges})[0];
    }
    return found;
  }
};

variable_list recorded_sum(const SumArguments& a) { return Sum::apply(a, a.rows, a.weight); }

// Attention ####################################################################

struct AttentionArguments {
  Given given;
  SymInt num_targets;

  template <class Visit>
  void visit(const Visit& visit) {
    given.visit(visit);
    visit(num_targets);
  }
};

variable_list empty_state(const AttentionArguments& a) {
  const Tensor& value = a.given.value;
  TORCH_CHECK_VALUE(value.dim() == 3, "attention: expected 'value' of shape [M, H, C] (got ",
                    value.sym_sizes(), ")");
  const SymInt heads = value.sym_size(1);
  return {at::zeros_symint({a.num_targets, heads, value.sym_size(2)}, value.options()),
          at::full_symint({a.num_targets, heads}, -std::numeric_limits<double>::infinity(),
                          value.options()),
          at::zeros_symint({a.num_targets, heads}, value.options())};
}

variable_list attended(const AttentionArguments& a) {
  const variable_list state = empty_state(a);
  const Tensor &out = state[0], &maximum = state[1], &normaliser = state[2];
  call_with("pyg_sar::attention_", attention::ForwardArguments{out, maximum, normaliser, a.given});
  const Tensor none = maximum.eq(-std::numeric_limits<double>::infinity());
  out.div_(normaliser.masked_fill(none, 1).unsqueeze(-1));
  return state;
}

struct Attention : torch::autograd::Function<Attention> {
  static constexpr int kInputs = 6;
  static constexpr const char* kWanted[kInputs] = {"value", "key",       "query",
                                                   "att",   "edge_attr", "edge_weight"};

  // The inputs are those of the arguments, and named for autograd.
  template <class... Input>
  static variable_list forward(AutogradContext* ctx, const AttentionArguments& a,
                               const Input&... input) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Given& g = a.given;
    const variable_list found = call_with("pyg_sar::attention", a);
    variable_list kept{defined_or_not(input)...};
    for (int k = 0; k < kInputs; ++k) {
      ctx->saved_data[kWanted[k]] = kept[k].defined() && kept[k].requires_grad();
    }
    kept.insert(kept.end(), {g.source, g.offsets, defined_or_not(g.targets),
                             defined_or_not(g.edges), defined_or_not(g.drop_key)});
    kept.insert(kept.end(), found.begin(), found.end());
    ctx->save_for_backward(kept);
    ctx->mark_non_differentiable({found[1], found[2]});
    ctx->saved_data["integers"] = std::vector<int64_t>{g.kind, g.seed_low, g.seed_high};
    ctx->saved_data["numbers"] = std::vector<double>{g.slope, g.scale, g.p};
    return found;
  }

  static Given given(AutogradContext* ctx, const variable_list& kept) {
    const auto integers = ctx->saved_data["integers"].toIntVector();
    const auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    Given g;
    g.kind = integers[0];
    g.value = kept[0];
    g.key = optional(kept[1]);
    g.query = optional(kept[2]);
    g.att = optional(kept[3]);
    g.edge_attr = optional(kept[4]);
    g.edge_weight = optional(kept[5]);
    g.slope = numbers[0];
    g.scale = numbers[1];
    g.source = kept[6];
    g.offsets = kept[7];
    g.targets = optional(kept[8]);
    g.edges = optional(kept[9]);
    g.drop_key = optional(kept[10]);
    g.seed_low = integers[1];
    g.seed_high = integers[2];
    g.p = numbers[2];
    return g;
  }

  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    variable_list found(1 + kInputs);
    if (!gradients[0].defined()) return found;
    check_once("attention");
    const variable_list kept = ctx->get_saved_variables();
    OptionalTensor wanted[kInputs];
    for (int k = 0; k < kInputs; ++k) {
      if (!ctx->saved_data[kWanted[k]].toBool()) continue;
      found[k + 1] = at::zeros_symint(kept[k].sym_sizes(), kept[k].options());
      wanted[k] = found[k + 1];
    }
    const Given g = given(ctx, kept);
    const Tensor grad_out = gradients[0].contiguous();
    const attention::Cotangent cotangent{grad_out, kept[12], kept[13],
                                         grad_out.mul(kept[11]).sum(-1)};
    const bool by_source_alone = attention::shape_of(g.kind)->by_source;
    attention::SourcesArguments sources{wanted[0], wanted[1], {}, {}, {}, cotangent, g};
    if (by_source_alone) {
      sources.grad_query = wanted[2];
      sources.grad_edge_attr = wanted[4];
      sources.grad_edge_weight = wanted[5];
    }
    if (sources.grad_value || sources.grad_key || sources.grad_query || sources.grad_edge_attr ||
        sources.grad_edge_weight) {
      const bool numbered = g.edge_attr.has_value() || g.drop_key.has_value();
      const auto by_source =
          call("pyg_sar::transpose", {g.source, g.offsets, g.targets, g.edges, g.value.sym_size(0),
                                      grad_out.sym_size(0), numbered});
      sources.given.source = by_source[0];
      sources.given.offsets = by_source[1];
      sources.given.targets = std::nullopt;
      sources.given.edges = numbered ? OptionalTensor(by_source[2]) : std::nullopt;
      call_with("pyg_sar::attention_backward_sources_", sources);
    }
    if (!by_source_alone && (wanted[2] || wanted[3] || wanted[4] || wanted[5])) {
      call_with("pyg_sar::attention_backward_targets_",
                attention::TargetsArguments{wanted[2], wanted[3], wanted[4], wanted[5], cotangent,
                                            g});
    }
    return found;
  }
};

variable_list recorded_attention(const AttentionArguments& a) {
  const Given& g = a.given;
  return Attention::apply(a, g.value, g.key, g.query, g.att, g.edge_attr, g.edge_weight);
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
  m.impl("gather_sum", kernel<&sum>());
  m.impl("attention", kernel<&attended>());
}
TORCH_LIBRARY_IMPL(pyg_sar, Meta, m) {
  m.impl("gather_sum", kernel<&empty_sum>());
  m.impl("attention", kernel<&empty_state>());
}
TORCH_LIBRARY_IMPL(pyg_sar, Autograd, m) {
  m.impl("gather_sum", kernel<&recorded_sum>());
  m.impl("attention", kernel<&recorded_attention>());
}

}  // namespace pyg_sar
