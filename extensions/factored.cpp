// A leaky ReLU with a slope from 0 to 1 is max(x, slope * x), and exp() ascends, so that
//
//   exp(leaky(k_j + q_i) - m_i) = max(exp(k_j) exp(q_i - m_i), exp(slope k_j) exp(slope q_i - m_i)):
//
// two exponentials for each source row and two for each target, none for an edge. An edge's weights
// are a load, a product and a maximum, in the loop that sums the values. m_i is
// leaky(max_j k_j + q_i), which no score of the shard exceeds, and of which none falls far short:
// keys are small, or this isn't done. Dropout takes weights out of the sum of values alone; its factor comes
// at the end.

#undef PYG_SAR_ONE_VERSION  // There is but one, for the widest processors: sanitizers see it, too.

#include "factored.h"
#include "factored_lanes.h"


#include <atomic>

namespace pyg_sar::attention {

#ifdef PYG_SAR_LEVELS
namespace {

constexpr int64_t kTargets = 32;  // at a time

// Two numbers of a head, as pairs of rows of kHeads: numbers of heads are padded.
template <int kHeads>
PYG_SAR_INLINE_512 void interleave(float* out, const float* a, const float* b, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(out + r * 2 * kHeads, a + r * kHeads, kHeads * sizeof(float));
    std::memcpy(out + r * 2 * kHeads + kHeads, b + r * kHeads, kHeads * sizeof(float));
  }
}

template <int kHeads>
struct Factors {
  const Terms<float>& t;
  const NamedRows& rows;

  // out[row] = exp(key), exp(slope * key); whether all are small
  PYG_SAR_INLINE_512 bool of_keys(float* out, int64_t first, int64_t last) const {
    constexpr int64_t kSize = kTargets * kHeads;
    float key[kSize] = {}, small[kSize];
    int large = 0;
    for (int64_t j = first; j < last; j += kTargets) {
      const int64_t n = std::min(kTargets, last - j);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t h = 0; h < t.heads; ++h) key[r * kHeads + h] = t.key.row(rows[j + r])[h];
      }
#pragma omp simd reduction(| : large)
      for (int64_t k = 0; k < n * kHeads; ++k) {
        const float x = key[k];
        large |= !(std::abs(x) <= kLargestKey);
        small[k] = exponential(t.slope * x);
        key[k] = exponential(x);
      }
      for (int64_t r = 0; r < n; ++r) {
        interleave<kHeads>(out + rows[j + r] * 2 * kHeads, key + r * kHeads, small + r * kHeads, 1);
      }
      if (t.heads < kHeads) std::fill_n(key, kSize, 0.0f);
    }
    return large == 0;
  }

  // Of each target: what keys' factors are multiplied by, and what was summed before.
  struct Of {
    float both[kTargets * 2 * kHeads], old[kTargets * kHeads], top[kTargets * kHeads];
  };

  PYG_SAR_512 __attribute__((noinline)) void of_targets(Of& out, const float* maximum, int64_t first,
                                                        int64_t n) const {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    float query[kTargets * kHeads] = {}, small[kTargets * kHeads];
    for (int64_t r = 0; r < n; ++r) {
      const int64_t i = t.target(first + r);
      const float* row = t.query.row(i);
      for (int64_t h = 0; h < t.heads; ++h) {
        query[r * kHeads + h] = row == nullptr ? 0.0f : row[h];
        out.old[r * kHeads + h] = maximum[i * t.heads + h];
      }
    }
#pragma omp simd
    for (int64_t k = 0; k < n * kHeads; ++k) {
      const float bound = leaky(query[k] + kLargestKey, t.slope);
      const float top = bound > kLowest ? bound : kLowest;  // a finite number for NaN
      const float old = out.old[k], now = old > top ? old : top;
      out.top[k] = now;
      out.old[k] = exponential(old - now);
      small[k] = exponential(t.slope * query[k] - now);
      query[k] = exponential(query[k] - now);
    }
    interleave<kHeads>(out.both, query, small, n);
  }
};

// Where the vectors of a row begin, of which the last ones begin where a whole one fits, and the head of each lane.
void place_vectors(int64_t* place, Places* head, int64_t vectors, int64_t lanes, const Terms<float>& t) {
  for (int64_t v = 0; v < vectors; ++v) {
    place[v] = std::min(v * lanes, t.width() - lanes);
    int32_t heads[kFull];
    for (int l = 0; l < kFull; ++l) heads[l] = static_cast<int32_t>((place[v] + l % lanes) / t.channels);
    std::memcpy(&head[v], heads, sizeof(heads));
  }
}

// Rows of kVectors vectors of kLanes.
template <int kHeads, int kVectors, int kLanes>
struct FactoredForward {
  const Terms<float>& t;
  const Factors<kHeads>& factors;
  const float* pairs;
  float *acc, *maximum, *normaliser;
  int64_t last_line;  // of a row, where it may lie in one more than there are vectors
  int64_t place[kVectors];
  Places head[kVectors];

  FactoredForward(const Factors<kHeads>& of, const float* keys, const State& state)
      : t(of.t), factors(of), pairs(keys), acc(state.acc), maximum(state.maximum),
        normaliser(state.normaliser),
        last_line(crosses_lines(t.value.data, t.value.stride, t.width()) ? t.width() - 1 : 0) {
    place_vectors(place, head, kVectors, kLanes, t);
  }

  PYG_SAR_INLINE_512 void operator()(int64_t chunk) const {
    const int64_t first = t.first_segment(chunk), end = t.first_segment(chunk + 1);
    typename Factors<kHeads>::Of of;
    for (int64_t u = first; u < end; u += kTargets) {
      const int64_t n = std::min(kTargets, end - u);
      factors.of_targets(of, maximum, u, n);
      for (int64_t r = 0; r < n; ++r) {
        if (t.offsets[u + r] == t.offsets[u + r + 1]) continue;
        add(u + r, of.both + r * 2 * kHeads, of.old + r * kHeads, of.top + r * kHeads);
      }
    }
  }

  PYG_SAR_INLINE_512 void add(int64_t u, const float* both, const float* old,
                              const float* top) const {
    constexpr int64_t kAhead = kVectors <= 2 ? 96 : kVectors <= 4 ? 64 : 32;
    const int64_t last = t.num_edges - 1;
    const Lanes by = repeated<2 * kHeads>(both);
    Lanes sum[kVectors] = {}, total = {};
    for (int64_t e = t.offsets[u], stop = t.offsets[u + 1]; e < stop; ++e) {
      const int64_t later = t.source[e + kAhead < last ? e + kAhead : last];
      const float* next = t.value.data + later * t.value.stride;
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; ++v) __builtin_prefetch(next + v * kLanes);
      if (last_line != 0) __builtin_prefetch(next + last_line);
      __builtin_prefetch(pairs + later * 2 * kHeads);
      const int64_t j = t.source[e];
      const float* row = t.value.data + j * t.value.stride;
      const Lanes x = repeated<2 * kHeads>(pairs + j * 2 * kHeads) * by;
      const Lanes y = turned<kHeads>(x, kAllLanes);
      Lanes weight = x > y ? x : y;
      total += weight;
      if (t.drop_key != nullptr) {
        constexpr uint32_t kAgain = 0xFFFF / ((1u << kHeads) - 1);
        weight = _mm512_maskz_mov_ps(kept_heads<kHeads>(t, e) * kAgain, weight);
      }
      PYG_SAR_UNROLLED
      for (int v = 0; v < kVectors; ++v) {
        sum[v] += repeated<kLanes>(row + place[v]) * picked(weight, head[v]);
      }
    }
    finish(t.target(u), sum, total, old, top);
  }

  // Columns of two vectors are the same in both: all are read before one is written.
  PYG_SAR_INLINE_512 void finish(int64_t i, const Lanes* sum, const Lanes& total, const float* old,
                             const float* top) const {
    const Lanes before = repeated<kHeads>(old);
    const float kept = t.drop_key == nullptr ? 1.0f : t.kept;
    float* out = acc + i * t.width();
    Lanes x[kVectors];
    PYG_SAR_UNROLLED
    for (int v = 0; v < kVectors; ++v) {
      x[v] = repeated<kLanes>(out + place[v]) * picked(before, head[v]) + sum[v] * kept;
    }
    PYG_SAR_UNROLLED
    for (int v = 0; v < kVectors; ++v) std::memcpy(out + place[v], &x[v], kLanes * sizeof(float));
    float totals[kFull];
    std::memcpy(totals, &total, sizeof(totals));
    for (int64_t h = 0; h < t.heads; ++h) {
      float& normal = normaliser[i * t.heads + h];
      normal = normal * old[h] + totals[h];
      maximum[i * t.heads + h] = top[h];
    }
  }
};

template <class Pass>
PYG_SAR_512 void on_chunk(const Pass& pass, int64_t chunk) {
  pass(chunk);
}

template <int kHeads>
PYG_SAR_512 bool on_keys(const Factors<kHeads>& factors, float* out, int64_t first, int64_t last) {
  return factors.of_keys(out, first, last);
}

template <int kHeads, int kVectors, int kLanes = kFull>
void run(const Factors<kHeads>& factors, const float* pairs, const State& state) {
  const FactoredForward<kHeads, kVectors, kLanes> pass(factors, pairs, state);
  for_runs(factors.t.chunks, 1, [&](int64_t chunk, int64_t) { on_chunk(pass, chunk); });
}

template <int kHeads>
void run_width(const Factors<kHeads>& factors, const float* pairs, const State& state) {
  const int64_t width = factors.t.width();
  if (width == 8) return run<kHeads, 1, 8>(factors, pairs, state);
  switch ((width + kFull - 1) / kFull) {
    case 1: return run<kHeads, 1>(factors, pairs, state);
    case 2: return run<kHeads, 2>(factors, pairs, state);
    case 3: return run<kHeads, 3>(factors, pairs, state);
    case 4: return run<kHeads, 4>(factors, pairs, state);
    case 5:
    case 6: return run<kHeads, 6>(factors, pairs, state);
    default: return run<kHeads, 8>(factors, pairs, state);
  }
}

template <int kHeads>
bool run_heads(const Terms<float>& t, int64_t num_rows, const State& state) {
  NamedRows rows(t, num_rows);
  if (!rows.have_many(t.num_edges)) return false;
  const Factors<kHeads> factors{t, rows};
  const Tensor pairs = empty({num_rows, 2 * kHeads}, kFloat);
  float* out = pairs.mutable_data_ptr<float>();
  const auto are_small = [&] {
    std::atomic<bool> small{true};
    for_runs(rows.count, kRowsPerTask, [&](int64_t first, int64_t last) {
      if (!on_keys(factors, out, first, last)) small = false;
    });
    return small.load();
  };
  if (!are_small()) {
    if (!rows.numbers.empty()) return false;
    rows = NamedRows(t, num_rows, true);
    if (!are_small()) return false;
  }
  run_width(factors, out, state);
  return true;
}

}  // namespace

bool add_factored(const Terms<float>& t, int64_t num_rows, const State& state) {
  const bool wide = t.width() >= kFull || t.width() == kFull / 2;
  const bool fits = t.heads <= kMostHeads && t.width() <= kMostVectors * kFull;
  if (!wide || !fits || !is_factored(t)) return false;
  if (t.heads > 4) return run_heads<8>(t, num_rows, state);
  if (t.heads > 2) return run_heads<4>(t, num_rows, state);
  return t.heads == 2 ? run_heads<2>(t, num_rows, state) : run_heads<1>(t, num_rows, state);
}
#else
bool add_factored(const Terms<float>&, int64_t, const State&) { return false; }
#endif

}  // namespace pyg_sar::attention
