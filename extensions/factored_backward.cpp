// Gradients by source row of additive scores: which heads a pass takes, and in which version (factored_sources.h).

#undef PYG_SAR_ONE_VERSION  // There is but one, for the widest processors: sanitizers see it, too.

#include "factored_sources.h"

#include <atomic>
#include <bit>
#include <vector>

namespace pyg_sar::attention {

#ifdef PYG_SAR_LEVELS
namespace {

// By value: what is a copy of its own needn't be read again after each write.
template <class Pass>
PYG_SAR_512 void on_chunk(const Pass pass, int64_t chunk, float* queries) {
  pass(chunk, queries);
}

template <int kHeads>
PYG_SAR_512 void on_targets(const Factors<kHeads>& factors, float* out, int64_t first,
                            int64_t last) {
  factors.of_targets(out, first, last);
}

template <int kHeads>
PYG_SAR_512 bool on_sources(const Factors<kHeads>& factors, float* out, int64_t first,
                            int64_t last) {
  return factors.of_sources(out, first, last);
}

// Some heads of all: what they read and add to, and the rows of their sources.
struct Heads {
  Terms<float> t;
  SourceGradients g;
  int64_t first;
  Tensor sources{};
};

// The heads from the first one on that have a version.
Heads heads_from(const Terms<float>& t, const SourceGradients& g, int64_t first) {
  const int64_t each = (t.channels + kFull - 1) / kFull, column = first * t.channels;
  const int64_t most = t.channels == kFull / 2 ? kMostHeads : kMostVectors / each;
  const auto rest = static_cast<uint64_t>(std::min(most, t.heads - first));
  const bool is_any = rest == 3 || t.channels == kFull / 2;
  return {t.of_heads(first, static_cast<int64_t>(is_any ? rest : std::bit_floor(rest))),
          {g.grad_out.columns_from(column), g.maximum.columns_from(first),
           g.normaliser.columns_from(first), g.delta.columns_from(first),
           g.grad_value.columns_from(column), g.grad_key.columns_from(first), g.grad_query},
          first};
}

// Returns work<heads>().
template <int kHeads = 8, class Work>
auto with_version(int64_t heads, const Work& work) {
  if constexpr (kHeads > 1) {
    if (heads < kHeads) return with_version<kHeads - 1>(heads, work);
  }
  return work.template operator()<kHeads>();
}

template <int kHeads, int kEach, Layout kLayout>
void run(const Heads& heads, int64_t all_heads, const float* targets) {
  const Terms<float>& t = heads.t;
  const SourceGradients& g = heads.g;
  const auto mask = [&](int v) {
    const int64_t lanes = std::clamp<int64_t>(t.channels - v * kFull, 0, kFull);
    return static_cast<__mmask16>((1u << lanes) - 1);
  };
  const int64_t width = t.width();
  const bool crosses = crosses_lines(g.grad_out.data, g.grad_out.stride, width);
  const FactoredSources<kHeads, kEach, kLayout> pass{
      t, g.grad_out, g.grad_value, g.grad_key, targets, heads.sources.const_data_ptr<float>(),
      t.channels, all_heads, {mask(kEach - 2), mask(kEach - 1)}, crosses ? width - 1 : 0};
  for_runs(t.chunks, 1, [&](int64_t chunk, int64_t) {
    on_chunk(pass, chunk, g.grad_query.empty() ? nullptr : g.grad_query[chunk] + heads.first);
  });
}

// A head of more than four registers has six or eight.
template <int kHeads, int kEach = 1, class... Others>
void run_width(const Heads& heads, const Others&... others) {
  const int64_t channels = heads.t.channels;
  if constexpr (constexpr int kMore = kEach < 4 ? kEach + 1 : kEach + 2; kHeads * kMore <= kMostVectors) {
    if (channels > kEach * kFull) return run_width<kHeads, kMore>(heads, others...);
  }
  if constexpr (kHeads > 4 && kHeads < 8) return run<kHeads, 1, Layout::kHalf>(heads, others...);
  if constexpr (kEach <= 4) {
    if (channels == kEach * kFull) return run<kHeads, kEach, Layout::kWhole>(heads, others...);
  }
  if constexpr (kHeads > 1 && kEach == 1) {
    if (channels == kFull / 2) return run<kHeads, 1, Layout::kHalf>(heads, others...);
  }
  run<kHeads, kEach, Layout::kMasked>(heads, others...);
}

// Makes rows of the sources of some heads; says whether all keys are small.
template <int kHeads>
bool make_sources(Heads& heads) {
  const int64_t size = heads.t.num_segments;
  heads.sources = empty({size, Factors<kHeads>::kOfSource}, kFloat);
  float* sources = heads.sources.mutable_data_ptr<float>();
  std::atomic<bool> small{true};
  for_runs(size, kRowsPerTask, [&](int64_t first, int64_t last) {
    if (!on_sources(Factors<kHeads>{heads.t, heads.g}, sources, first, last)) small = false;
  });
  return small;
}

template <int kHeads>
void run_heads(const Heads& heads, int64_t all_heads, const NamedRows& named, int64_t num_targets) {
  const Tensor of_targets = empty({num_targets, Factors<kHeads>::kOfTarget}, kFloat);
  float* targets = of_targets.mutable_data_ptr<float>();
  for_runs(named.count, kRowsPerTask, [&](int64_t first, int64_t last) {
    on_targets(Factors<kHeads>{heads.t, heads.g, &named}, targets, first, last);
  });
  run_width<kHeads>(heads, all_heads, targets);
}

}  // namespace

bool add_factored_sources(const Terms<float>& t, int64_t num_targets, const SourceGradients& g) {
  if (!is_factored(t) || t.width() < kLeastWidth || t.channels > kMostVectors * kFull) return false;
  std::vector<Heads> all;
  for (int64_t first = 0; first < t.heads; first += all.back().t.heads) {
    all.push_back(heads_from(t, g, first));
    Heads& some = all.back();
    if (!with_version(some.t.heads, [&]<int kHeads>() { return make_sources<kHeads>(some); })) return false;
  }
  const NamedRows named(t, num_targets);
  for (const Heads& some : all) {
    with_version(some.t.heads, [&]<int kHeads>() { run_heads<kHeads>(some, t.heads, named, num_targets); });
  }
  return true;
}
#else
bool add_factored_sources(const Terms<float>&, int64_t, const SourceGradients&) { return false; }
#endif

}  // namespace pyg_sar::attention
