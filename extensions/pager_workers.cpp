// Threads that read ahead for arenas whose turn is near and write ahead for those whose turn is far.
#if defined(__linux__)

#include "pager.h"

#include <csignal>
#include <pthread.h>

namespace pyg_sar::pager {

void Pager::turn(int64_t arena) {
  Lock lock(mutex_);
  begin_operation();
  if (arena != current_ + 1) needed_.clear();
  current_ = arena;
  looked_at_ = {};
  write_failed_ = false;
  wake();
}

void Pager::prefetch(int64_t arena, int64_t limit) {
  Lock lock(mutex_);
  wanted_[arena] = limit;
  wake();
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

// What the arenas before this one needed in their turns is read ahead, for this one and the next. What is asked for
// comes the newest first: a part goes on where it stopped, and its backward pass comes from the end.
bool Pager::prefetch_one(Lock& lock) {
  for (int64_t distance = 0; distance < 2 && current_ + distance < num_arenas(); ++distance) {
    const Queue& out = arenas_[current_ + distance][static_cast<int>(State::kOut)];
    while (looked_at_[distance] < needed_.size()) {
      const int64_t born = needed_[looked_at_[distance]++];
      for (const auto& [stamp, r] : out) {
        if (r->born != born || r->busy != Busy::kNo) continue;
        if (!read_ahead(lock, distance, *r)) looked_at_[distance] = needed_.size();
        return true;
      }
    }
  }
  for (int64_t distance = 0; distance < num_arenas(); ++distance) {
    const int64_t arena = arena_at(distance);
    if (wanted_[arena] <= 0) continue;
    Region* next = nullptr;
    const Queue& out = arenas_[arena][static_cast<int>(State::kOut)];
    for (auto it = out.rbegin(); it != out.rend() && next == nullptr; ++it)
      if (it->second->busy == Busy::kNo) next = it->second;
    if (next == nullptr || next->bytes > wanted_[arena]) {
      wanted_[arena] = 0;
      continue;
    }
    wanted_[arena] -= next->bytes;
    if (!read_ahead(lock, distance, *next)) wanted_[arena] = 0;
    return true;
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
