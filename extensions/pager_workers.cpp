// Threads that read ahead for arenas whose turn is near and write ahead for those whose turn is far.
#if defined(__linux__)

#include "pager.h"

#include <algorithm>
#include <csignal>
#include <pthread.h>

namespace pyg_sar::pager {
namespace {

constexpr int64_t kAhead = 2;         // turns
constexpr size_t kMostTurns = 4096;   // that are not alike: of a training there are some dozens

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
  turns.allocated[turns.count++ % Turns::kLast] = births_[current_] - turns.births;
  turns.births = births_[current_];
  turns.alike = 0;
  for (size_t i = 0; i < Turns::kLast; ++i)
    turns.alike = (turns.alike ^ turns.allocated[(turns.count + i) % Turns::kLast]) * 0x9e3779b97f4a7c15;
  if (needs_.size() >= kMostTurns) needs_.clear();
}

// Ages are those of other parts, too; numbers differ where parts planned in other ways, but stay for one part.
bool Pager::is(const Need& need, const Region& r) const {
  const bool alike = r.bytes <= 2 * need.bytes && need.bytes <= 2 * r.bytes;
  return need.born == r.born || (alike && need.age == turns_[r.arena].births - r.born);
}

void Pager::note(const Region& r) {
  if (r.arena != current_ || r.born >= turns_[current_].births) return;
  std::vector<Need>& needs = needs_[turns_[current_].alike];
  if (std::ranges::none_of(needs, [&](const Need& need) { return is(need, r); }))
    needs.push_back({r.born, turns_[current_].births - r.born, r.bytes});
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

// What turns that were alike needed is read ahead, for this arena and the next one.
bool Pager::prefetch_one(Lock& lock) {
  for (int64_t distance = 0; distance < std::min<int64_t>(kAhead, num_arenas()); ++distance) {
    const int64_t arena = arena_at(distance);
    const auto needs = needs_.find(turns_[arena].alike);
    if (needs == needs_.end()) continue;
    const Queue& out = arenas_[arena][static_cast<int>(State::kOut)];
    while (looked_at_[distance] < needs->second.size()) {
      const Need need = needs->second[looked_at_[distance]++];
      for (const auto& [stamp, r] : out) {
        if (!is(need, *r) || r->busy != Busy::kNo) continue;
        // The lock is given up meanwhile: what was found may be gone.
        const int64_t now = current_;
        if (!read_ahead(lock, distance, *r) && now == current_) looked_at_[distance] = SIZE_MAX;
        return true;
      }
    }
  }
  return false;
}

// False: there is no room, or the store fails. What is farther away than 'distance' makes room.
bool Pager::read_ahead(Lock& lock, int64_t distance, Region& r) {
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
  if (!read(lock, *found->second, false, spare)) return false;
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
