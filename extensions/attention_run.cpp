// Gives the passes of attention their tensors, and runs them on all chunks of segments, in the version for the
// processor.

#include "attention.h"
#include "attention_passes.h"
#include "attention_tensors.h"
#include "factored.h"

#include <type_traits>

namespace pyg_sar::attention {
namespace {

#ifdef PYG_SAR_LEVELS
constexpr int kNarrow = 32;  // bytes of a register

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#else
constexpr int kNarrow = 16;
#endif

template <class Pass>
void run(const Pass& pass, int64_t kind) {
  const Terms<typename Pass::T>& t = pass.t;
#ifdef PYG_SAR_LEVELS
  if constexpr (std::is_same_v<typename Pass::T, float>) {
    // Heads that leave lanes of the widest registers are faster in narrower ones: what is left of a head is
    // taken a number at a time.
    const bool sums = !std::is_same_v<Pass, Forward<float>> || !shape_of(kind)->narrow_key;
    if (has_avx512() && (!sums || t.channels == 8 || t.channels % kLanes == 0)) {
      return for_runs(t.chunks, 1, [&](int64_t chunk, int64_t) { run_chunk<64>(pass, kind, chunk); });
    }
  }
#endif
  for_runs(t.chunks, 1, [&](int64_t chunk, int64_t) { run_chunk<kNarrow>(pass, kind, chunk); });
}

}  // namespace

void forward(const ForwardArguments& a) {
  const Given& g = a.given;
  const Dense dense(g, a.acc.size(0), false);
  if (nothing(g)) return;
  const Written sums(a.acc), top(a.maximum), total(a.normaliser);
  const int64_t chunks = num_chunks(g, kMostChunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, dense, chunks), sums.data<T>(), top.data<T>(), total.data<T>(),
                data<T>(dense.query_edges)};
  };
  if (g.value.scalar_type() == kDouble) {
    run(make.operator()<Forward<double>>(), g.kind);
  } else if (g.kind != Additive::kKind ||
             !add_factored(terms<float>(g, dense, chunks), g.value.size(0),
                           {sums.data<float>(), top.data<float>(), total.data<float>()})) {
    run(make.operator()<Forward<float>>(), g.kind);
  }
  for (const Written* written : {&sums, &top, &total}) written->write();
}

void backward_sources(const SourcesArguments& a) {
  const Given& g = a.given;
  const Cotangent& c = a.cotangent;
  Backward all(g, c, true);
  if (nothing(g)) return;
  const Written values(a.grad_value, true), keys(a.grad_key, true), queries(a.grad_query);
  const Written attrs(a.grad_edge_attr), weights(a.grad_edge_weight);
  int64_t most = a.grad_edge_weight.has_value() ? kChunksOfParameters : kMostChunks;
  if (a.grad_query.has_value()) most = get_num_threads();
  const int64_t chunks = num_chunks(g, most);
  const PerChunk query_sums(queries.dense, chunks), weight_sums(weights.dense, chunks);
  const auto factored = [&] {
    const Tensor top = with_dense_rows(c.maximum), total = with_dense_rows(c.normaliser);
    const Tensor mean = with_dense_rows(c.delta);
    const auto of_queries = query_sums.pointers<float>();
    return add_factored_sources(
        terms<float>(g, all.dense, chunks), c.grad_out.size(0),
        {matrix<float>(all.grad_out), matrix<float>(top), matrix<float>(total), matrix<float>(mean),
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
  const bool is_float = g.value.scalar_type() == kFloat;
  if (!is_float || g.kind != Additive::kKind || !factored()) {
    all.pack(g, c);
    is_float ? run(make.operator()<Sources<float>>(), g.kind) : run(make.operator()<Sources<double>>(), g.kind);
  }
  query_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&values, &keys, &queries, &attrs, &weights}) w->write();
}

void backward_targets(const TargetsArguments& a) {
  const Given& g = a.given;
  Backward all(g, a.cotangent, false);
  if (nothing(g)) return;
  all.pack(g, a.cotangent);
  const Written queries(a.grad_query), atts(a.grad_att), attrs(a.grad_edge_attr);
  const Written weights(a.grad_edge_weight);
  const bool shared = a.grad_att.has_value() || a.grad_edge_weight.has_value();
  const int64_t chunks = num_chunks(g, shared ? kChunksOfParameters : kMostChunks);
  const PerChunk att_sums(atts.dense, chunks), weight_sums(weights.dense, chunks);
  const auto make = [&]<class Pass>() {
    using T = typename Pass::T;
    return Pass{terms<T>(g, all.dense, chunks), all.known<T>(),         queries.data<T>(),
                attrs.data<T>(),                att_sums.pointers<T>(), weight_sums.pointers<T>()};
  };
  g.value.scalar_type() == kFloat ? run(make.operator()<Targets<float>>(), g.kind)
                                  : run(make.operator()<Targets<double>>(), g.kind);
  att_sums.sum();
  weight_sums.sum();
  for (const Written* w : {&queries, &atts, &attrs, &weights}) w->write();
}

}  // namespace pyg_sar::attention
