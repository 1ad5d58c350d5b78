// How regions leave memory and come back. All is called with the lock held, and gives it up while the
// disk works: the region is busy then, and stays where it is.
#if defined(__linux__)

#include "pager.h"

#include <algorithm>

#include <cerrno>
#include <cstring>

namespace pyg_sar::pager {
namespace {

// What fits together is missed at most once or twice by an operator, as the oldest goes first.
constexpr int64_t kOften = 8;

// Regions that are written together: bytes, and how many.
constexpr int64_t kTogether = 8 << 20;
constexpr size_t kMostTogether = 64;

}  // namespace

// The next region to go: of the arena whose turn is farthest away, down to 'nearest' turns from now, the
// oldest; 'has_place': of those that need no new place in the file.
Region* Pager::victim(int64_t nearest, bool has_place) const {
  if (!store_) return nullptr;
  for (int64_t distance = num_arenas() - 1; distance >= nearest; --distance) {
    const Arena& arena = arenas_[arena_at(distance)];
    Region* oldest = nullptr;
    for (const int state : {0, 1}) {
      for (const auto& [stamp, r] : arena[state]) {
        if (oldest != nullptr && oldest->stamp < stamp) break;
        if (r->busy != Busy::kNo || r->pins > 0 || (has_place && r->place < 0)) continue;
        oldest = r;
        break;
      }
    }
    if (oldest != nullptr) return oldest;
  }
  return nullptr;
}

// Evicts until 'bytes' more fit, or 'spare' has pages for them that are counted already: fresh ones cost
// the kernel as much time as half a read does. False: nothing else may go.
bool Pager::make_room(Lock& lock, int64_t bytes, int64_t nearest, Region** spare, bool in_place) {
  if (bytes > budget_) return false;
  bool full = false;
  for (;;) {
    if (spare != nullptr && (*spare = reuse(bytes, in_place)) != nullptr) return true;
    if (!exceeds(bytes) && maps_ < most_maps_) return true;
    if (drop_cached()) continue;
    if (Region* r = victim(nearest, full)) {
      if (!evict(lock, *r, spare != nullptr ? bytes : 0)) {
        if (full) return false;
        full = true;
      }
    } else if (in_flight_ > 0) {
      changed_.wait(lock);
    } else {
      return false;
    }
  }
  return true;
}

// 'wanted': its pages are kept for so many bytes, where they are of about that size.
bool Pager::evict(Lock& lock, Region& r, int64_t wanted) {
  if (r.state == State::kDirty && !write(lock, r, false)) return false;
  if (r.state != State::kClean || r.busy != Busy::kNo || r.pins > 0) return true;
  const bool fits = !r.grown && wanted <= r.bytes && r.bytes <= wanted + wanted / 8;
  if (!fits || !lift(r)) {
    if (!drop_pages(r.base, r.bytes)) {
      last_error_ = errno;
      return false;
    }
    r.grown = false;
    hold(-r.bytes, -1);
  }
  place(r, State::kOut);
  ++count_.evictions;
  changed_.notify_all();
  return true;
}

// Moves a region's pages to a cached region.
bool Pager::lift(Region& r) {
  Region* spare = unused();
  spare->base = reservation_.take(r.bytes, spare, &spare->slots);
  if (spare->base == nullptr) return false;
  if (!move_pages(r.base, spare->base, r.bytes)) {
    reservation_.give(spare->base, spare->slots);
    return false;
  }
  unused_.pop_back();
  spare->bytes = r.bytes;
  spare->grown = false;
  keep(*spare);
  return true;
}

// A dirty region with a place in the file, and those that follow it there or can: the disk takes one large write
// faster than many small ones. Empty: there is no place.
std::vector<Region*> Pager::together(Region& first) {
  std::vector<Region*> found{&first};
  int64_t bytes = first.bytes;
  const Queue& dirty = queue(first);
  for (auto it = dirty.upper_bound(first.stamp); it != dirty.end() && found.size() < kMostTogether; ++it) {
    Region* r = it->second;
    if (r->busy != Busy::kNo || r->pins > 0) continue;
    const bool follows = first.place < 0 ? r->place < 0 : r->place == first.place + bytes;
    if (!follows || bytes + r->bytes > kTogether) break;
    found.push_back(r);
    bytes += r->bytes;
  }
  if (first.place >= 0) return found;
  int64_t place = found.size() > 1 ? store_->take(bytes) : -1;
  if (place < 0) {
    found.resize(1);
    if ((place = store_->reserve(first.bytes)) < 0) return {};
  }
  for (Region* r : found) {
    r->place = place;
    place += r->bytes;
  }
  return found;
}

// Writes a dirty region, with others. True: it is clean now, or was freed, or (where the write yields) changed.
bool Pager::write(Lock& lock, Region& first, bool yields) {
  std::vector<Region*> all = together(first);
  if (all.empty()) {
    last_error_ = store_->error();
    return false;
  }
  std::vector<iovec> pieces;
  for (Region* r : all) {
    if (!protect_pages(r->base, r->bytes, false)) {
      last_error_ = errno;
      break;
    }
    r->busy = Busy::kWriting;
    r->yields = yields;
    r->stop = false;
    pieces.push_back({r->base, static_cast<size_t>(r->bytes)});
  }
  if (pieces.empty()) return false;
  all.resize(pieces.size());
  ++in_flight_;
  lock.unlock();
  // Only a region that is alone may stop half way.
  const std::atomic<bool>* stop = all.size() > 1 ? nullptr : &first.stop;
  const int error = store_->write(std::move(pieces), first.place, stop, count_.written);
  lock.lock();
  --in_flight_;
  const bool done = error == 0 || first.freed;
  if (error != 0) last_error_ = error;
  for (Region* r : all) {
    r->busy = Busy::kNo;
    if (r->freed) {
      retire(*r);
    } else if (!r->stop) {
      if (error == 0) place(*r, State::kClean);
      else protect_pages(r->base, r->bytes, true);
    }
  }
  changed_.notify_all();
  return done;
}

// Fills a region that is out; the caller has made room, or gives pages.
bool Pager::read(Lock& lock, Region& r, Seen seen, Region* spare) {
  r.busy = Busy::kReading;
  ++in_flight_;
  if (spare == nullptr) hold(r.bytes);
  lock.unlock();
  int error = ENOMEM;
  {
    Scratch scratch(r.base, r.bytes, spare != nullptr ? spare->base : nullptr);
    if (scratch.data() != nullptr) {
      error = store_->read(scratch.data(), r.bytes, r.place);
      if (error == 0 && !scratch.move(seen)) error = ENOMEM;
    }
  }
  if (spare != nullptr) drop_pages(spare->base, spare->bytes);
  lock.lock();
  if (spare != nullptr) let_go(*spare);
  --in_flight_;
  r.busy = Busy::kNo;
  changed_.notify_all();
  if (error != 0) {
    last_error_ = error;
    count_.resident -= r.bytes;
    --maps_;
    if (r.freed) retire(r);
    return false;
  }
  count_.read += r.bytes;
  place(r, seen == Seen::kWritten ? State::kDirty : State::kClean);
  r.unseen = seen == Seen::kNo;
  if (r.freed) retire(r);
  return true;
}

// A thread touches what was read ahead by a guess, which was right.
bool Pager::see(Region& r) {
  if (!protect_pages(r.base, r.bytes, false)) {
    last_error_ = errno;
    return false;
  }
  r.unseen = false;
  note(r);
  return true;
}

// An operator whose tensors don't fit together would miss some at each of its steps, without end. Once one of them is
// missed too often, what the operator touches comes in, and nothing goes out for it: it can't be told of an error.
bool Pager::thrashes(Region& r) {
  const int64_t now = operation_;
  if (r.operation != now) r.misses = 0;
  r.operation = now;
  if (++r.misses > kOften && too_large_ != now) {
    too_large_ = now;
    more_at_once_ = 0;
  }
  return too_large_ == now;
}

// Gives this thread access. 'demand': a thread waits for it that can't be told of an error; where there is no
// room, the budget is exceeded.
bool Pager::bring_in(Lock& lock, Region& r, Access access, bool demand) {
  const bool changes = access == Access::kWrite || (access == Access::kUnknown && r.state == State::kClean);
  for (;;) {
    if (r.state == State::kFree || r.state == State::kCached || r.arena < 0) return true;
    if (r.busy == Busy::kReading || (r.busy == Busy::kWriting && changes && !r.yields)) {
      changed_.wait(lock);
      continue;
    }
    if (r.unseen && r.state == State::kClean) {
      if (!see(r)) return false;
      if (access == Access::kUnknown) return true;
    }
    if (r.state != State::kOut) {
      if (changes && (r.state == State::kClean || r.busy == Busy::kWriting)) {
        if (!protect_pages(r.base, r.bytes, true)) {
          last_error_ = errno;
          return false;
        }
        if (r.busy == Busy::kWriting) r.stop = true;
        if (r.state == State::kClean) place(r, State::kDirty);
        renew(r);
      }
      return true;
    }
    if (!fill(lock, r, changes, demand)) return false;
  }
}

// One try to bring a region in that is out; the lock may be given up before it begins.
bool Pager::fill(Lock& lock, Region& r, bool writable, bool demand) {
  Region* spare = nullptr;
  const uint64_t stamp = r.stamp;
  const Stopwatch watch(demand ? &count_.waited : nullptr);
  if (demand) {
    ++count_.demand_faults;
    count_.demand_bytes += r.bytes;
    note(r);
  }
  const bool too_large = demand && thrashes(r);
  if (!too_large && !make_room(lock, r.bytes, 0, &spare) && !demand) return false;
  if (r.state != State::kOut || r.busy != Busy::kNo || r.stamp != stamp) {  // another thread was faster
    if (spare != nullptr) keep(*spare);
    return true;
  }
  if (spare == nullptr && exceeds(r.bytes)) {
    const int64_t more = std::min(count_.resident + r.bytes - budget_, r.bytes);
    count_.overrun += more;
    if (too_large) more_at_once_ += more;
  }
  if (!read(lock, r, writable ? Seen::kWritten : Seen::kRead, spare)) return false;
  if (r.state == State::kClean || r.state == State::kDirty) renew(r);
  return true;
}

}  // namespace pyg_sar::pager

#endif
