// Threads that read ahead for arenas whose turn is near and write ahead for those whose turn is far.
#if defined(__linux__)

#include "pager.h"

#include <algorithm>
#include <csignal>
#include <pthread.h>

namespace pyg_sar::pager {
namespace {

constexpr size_t kMostKeys = 16384;  // an epoch has some dozens
constexpr size_t kMostNeeds = 1024;  // of a key
constexpr int64_t kSure = 3;         // steps of the program after which no turn needs what wasn't noted

}  // namespace

void Pager::turn(int64_t arena) {
  Lock lock(mutex_);
  begin_operation();
  end_turn();
  current_ = arena;
  turns_[arena].births = births_[arena];
  looked_at_ = {};
  write_failed_ = false;
  wake();
}

void Pager::end_turn() {
  Turns& turns = turns_[current_];
  ++needs_[turns.keys.front()].turns;  // also of one that needs nothing
  turns.allocated[turns.count++ % Turns::kLast] = births_[current_] - turns.births;
  turns.births = births_[current_];
  uint64_t key = 0;
  size_t taken = 0;
  for (size_t k = turns.keys.size(); k-- > 0; turns.keys[k] = key) {
    for (; taken < Turns::kAlike[k]; ++taken)
      key = (key ^ turns.allocated[(turns.count - 1 - taken) % Turns::kLast]) * 0x9e3779b97f4a7c15;
    key ^= Turns::kAlike[k];
  }
  if (needs_.size() > kMostKeys) needs_.clear();
}

// What was made since the parts planned has one age in all of them; what is older keeps its number in its part.
bool Pager::matches(const Need& need, const Region& r) const {
  const bool alike = r.bytes <= 2 * need.bytes && need.bytes <= 2 * r.bytes;
  return need.born == r.born || (alike && need.age == turns_[r.arena].births - r.born);
}

// Notes what a turn has missed, or found by a guess, for turns to come.
void Pager::note(const Region& r) {
  const Turns& turns = turns_[current_];
  if (r.arena != current_ || r.born >= turns.births) return;
  for (const uint64_t key : turns.keys) {
    std::vector<Need>& needs = needs_[key].all;
    const bool is_new = std::ranges::none_of(needs, [&](const Need& need) { return matches(need, r); });
    if (is_new && needs.size() < kMostNeeds) needs.push_back({r.born, turns.births - r.born, r.bytes});
  }
}

void Pager::wake() {
  ++asked_;
  idle_ = 0;
  work_.notify_all();
}

void Pager::wait() {
  Lock lock(mutex_);
  wake();
  changed_.wait(lock, [this] { return idle_ == workers_.size() && in_flight_ == 0; });
}

void Pager::work() {
  sigset_t others;  // signals of the process are the other threads'
  sigfillset(&others);
  for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&others, own);
  pthread_sigmask(SIG_SETMASK, &others, nullptr);
  Lock lock(mutex_);
  for (uint64_t answered = 0; !stopping_;) {
    if (prefetch_one(lock) || write_one(lock)) continue;
    if (answered != asked_) {
      answered = asked_;
      ++idle_;
      changed_.notify_all();
    }
    work_.wait(lock, [&] { return stopping_ || answered != asked_; });
  }
}

// What this turn and the next arena's will need, as turns like them did, is read ahead.
bool Pager::prefetch_one(Lock& lock) {
  const auto turns = std::min<int64_t>(std::ssize(looked_at_), num_arenas());
  for (int64_t distance = 0; distance < turns; ++distance) {
    const int64_t arena = arena_at(distance), now = current_;
    const auto& keys = turns_[arena].keys;
    const auto known = std::ranges::find_if(keys, [&](uint64_t key) {
      const auto found = needs_.find(key);
      return found != needs_.end() && (key != keys.front() || found->second.turns >= kSure * num_arenas());
    });
    if (known == keys.end()) continue;
    const std::vector<Need>& needs = needs_[*known].all;
    const Seen seen = known == keys.begin() ? Seen::kRead : Seen::kNo;
    const Queue& out = arenas_[arena][static_cast<int>(State::kOut)];
    while (looked_at_[distance] < needs.size()) {
      const Need need = needs[looked_at_[distance]++];
      const auto found = std::ranges::find_if(out, [&](const auto& one) {
        return one.second->busy == Busy::kNo && matches(need, *one.second);
      });
      if (found == out.end()) continue;
      // The lock is given up meanwhile: another turn may begin.
      if (!read_ahead(lock, distance, *found->second, seen) && now == current_) looked_at_[distance] = SIZE_MAX;
      return true;
    }
  }
  return false;
}

// False: there is no room, or the store fails. What is farther away than 'distance' makes room.
bool Pager::read_ahead(Lock& lock, int64_t distance, Region& r, Seen seen) {
  const int64_t bytes = r.bytes;
  const uint64_t stamp = r.stamp;
  const Queue& out = arenas_[arena_at(distance)][static_cast<int>(State::kOut)];
  Region* spare = nullptr;
  if (!make_room(lock, bytes, distance + 1, &spare)) return false;
  const auto found = out.find(stamp);  // the lock was given up
  if (found == out.end() || found->second->busy != Busy::kNo) {
    if (spare != nullptr) keep(*spare);
    return true;
  }
  if (!read(lock, *found->second, seen, spare)) return false;
  count_.prefetched += bytes;
  return true;
}

// As much as the next allocations need, not more: what waits may be freed, or changed, before it has to go. And
// never of the arena that computes: what it makes may be short-lived.
bool Pager::write_one(Lock& lock) {
  if (write_failed_ || !is_scarce()) return false;
  for (int64_t distance = num_arenas() - 1; distance > 0; --distance) {
    for (const auto& [stamp, r] : arenas_[arena_at(distance)][static_cast<int>(State::kDirty)]) {
      if (r->busy != Busy::kNo || r->pins > 0) continue;
      if (!write(lock, *r, true)) write_failed_ = true;
      return true;
    }
  }
  return false;
}

}  // namespace pyg_sar::pager

#endif
