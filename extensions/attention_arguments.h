// What the operators of attention are given.
#pragma once

#include "tensors.h"

#include <cstdint>

namespace pyg_sar::attention {

// What all of them take after their own tensors; pyg_sar/kernels/attention_ops.py tells the shapes.
struct Given {
  int64_t kind = 0;
  Tensor value;
  OptionalTensor key, query, att, edge_attr, edge_weight;
  double slope = 0, scale = 0;
  Tensor source, offsets;
  OptionalTensor targets, edges, drop_key;
  int64_t seed_low = 0, seed_high = 0;
  double p = 0;
  OptionalTensor places;  // transposed alone: where keys and values lie

  template <class Visit>
  void visit(const Visit& visit) {
    visit(kind, value, key, query, att, edge_attr, edge_weight, slope, scale, source, offsets,
          targets, edges, drop_key, seed_low, seed_high, p);
  }
};

// What the backward passes know of each target.
struct Cotangent {
  Tensor grad_out, maximum, normaliser, delta;

  template <class Visit>
  void visit(const Visit& visit) {
    visit(grad_out, maximum, normaliser, delta);
  }
};

// pyg_sar::attention_
struct ForwardArguments {
  Tensor acc, maximum, normaliser;
  Given given;

  template <class Visit>
  void visit(const Visit& visit) {
    visit(acc, maximum, normaliser);
    given.visit(visit);
  }
};

// pyg_sar::attention
struct AllArguments {
  Given given;
  int64_t num_targets = 0;

  template <class Visit>
  void visit(const Visit& visit) {
    given.visit(visit);
    visit(num_targets);
  }
};

// pyg_sar::attention_backward_sources_
struct SourcesArguments {
  OptionalTensor grad_value, grad_key, grad_query, grad_edge_attr, grad_edge_weight;
  Cotangent cotangent;
  Given given;

  template <class Visit>
  void visit(const Visit& visit) {
    visit(grad_value, grad_key, grad_query, grad_edge_attr, grad_edge_weight);
    cotangent.visit(visit);
    given.visit(visit);
    visit(given.places);
  }
};

// pyg_sar::attention_backward_targets_
struct TargetsArguments {
  OptionalTensor grad_query, grad_att, grad_edge_attr, grad_edge_weight;
  Cotangent cotangent;
  Given given;

  template <class Visit>
  void visit(const Visit& visit) {
    visit(grad_query, grad_att, grad_edge_attr, grad_edge_weight);
    cotangent.visit(visit);
    given.visit(visit);
  }
};

}  // namespace pyg_sar::attention
