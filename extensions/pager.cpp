#if defined(__linux__)

#include "pager.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>

namespace pyg_sar::pager {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 2;
constexpr int64_t kMostCached = 1LL << 30;
constexpr int64_t kPeriod = 4096;  // allocations: some steps of a training

// A region in memory is up to two of the kernel's mappings, and the gap to the next one a third.
int64_t most_maps() {
  int64_t most = 65530;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  return most / 4;
}

}  // namespace

Pager& Pager::instance() {
  static Pager* const pager = new Pager;
  return *pager;
}

// Opening and closing ##########################################################

void Pager::open(int64_t arenas, int64_t budget, const std::string& directory, int64_t threads) {
  if (forked_) throw std::runtime_error("this process was forked from one with an open pager");
  if (open_) throw std::runtime_error("this process has an open pager already: close it first");
  std::unique_ptr<Store> store;
  if (!directory.empty()) store = std::make_unique<Store>(directory);
  Lock lock(mutex_);
  if (!reservation_.made()) {
    reservation_.make();
    // A child finds all states as they are between two steps.
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] {
                     instance().forked_ = instance().open_ && !instance().keeps_;
                     instance().mutex_.unlock();
                   });
  }
  store_ = std::move(store);
  arenas_.assign(arenas, Arena());
  births_.assign(arenas, 0);
  turns_.assign(arenas, Turns());
  needs_.clear();
  const int64_t regions = count_.regions;
  count_.resident = count_.peak = count_.demand_faults = count_.demand_bytes = 0;
  count_.prefetched = count_.evictions = count_.overrun = count_.waited = 0;
  count_.read = count_.written = 0;
  count_.regions = regions;
  budget_ = budget > 0 ? budget : kNoLimit;
  maps_ = current_ = last_error_ = 0;
  clean_ = 0;
  too_large_ = -1;
  more_at_once_ = 0;
  idle_ = 0;
  most_maps_ = most_maps();
  stopping_ = write_failed_ = false;
  ++generation_;
  install_handler();
  most_live_ = {};
  open_ = true;
  if (store_)
    for (int64_t i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

// What is kept needs no handler and no threads: a forked process goes on with it.
bool Pager::keep() {
  rlimit addresses;
  if (getrlimit(RLIMIT_AS, &addresses) != 0 || addresses.rlim_cur != RLIM_INFINITY) return false;
  try {
    open(1, 0, "", 0);
  } catch (const std::runtime_error&) {
    return false;
  }
  keeps_ = true;
  remove_handler();
  return true;
}

void Pager::stop_workers() {
  {
    Lock lock(mutex_);
    stopping_ = true;
    wake();
  }
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Pager::close() {
  if (!open_ || forked_) return;
  keeps_ = false;
  stop_workers();
  Lock lock(mutex_);
  const int64_t budget = std::exchange(budget_, kNoLimit);
  most_maps_ = kNoLimit;
  for (Arena& arena : arenas_) {
    for (const int state : {2, 1, 0}) {
      while (!arena[state].empty()) {
        Region& r = *arena[state].begin()->second;
        if (!bring_in(lock, r, Access::kWrite, false)) {
          budget_ = budget;
          throw std::runtime_error("a tensor can't be brought in: " +
                                   std::string(std::strerror(last_error_)));
        }
        if (r.state != State::kDirty) continue;
        if (r.busy != Busy::kNo) {
          changed_.wait(lock);
          continue;
        }
        forget(r);
      }
    }
  }
  while (drop_cached()) {
  }
  changed_.wait(lock, [this] { return in_flight_ == 0; });
  open_ = false;
  store_.reset();
  lock.unlock();
  remove_handler();
}

// From here on it is memory like any other.
void Pager::forget(Region& r) {
  queue(r).erase(r.stamp);
  if (r.place >= 0) store_->give(r.place, r.bytes);
  r.place = r.arena = -1;
  count_.resident -= r.bytes;
  --maps_;
}

// Queues #######################################################################

void Pager::place(Region& r, State state) {
  queue(r).erase(r.stamp);
  clean_ += (state == State::kClean ? r.bytes : 0) - (r.state == State::kClean ? r.bytes : 0);
  r.state = state;
  queue(r).emplace(r.stamp, &r);
}

void Pager::renew(Region& r) {
  queue(r).erase(r.stamp);
  r.stamp = ++clock_;
  queue(r).emplace(r.stamp, &r);
}

void Pager::hold(int64_t bytes, int64_t maps) {
  count_.resident += bytes;
  count_.peak = std::max(count_.peak, count_.resident);
  maps_ += maps;
}

// Allocation ###################################################################

std::string Pager::refusal(int64_t bytes) const {
  std::string why;
  if (last_error_ != 0) {
    why = std::string("the store takes no more (") + std::strerror(last_error_) + ")";
  } else if (bytes > budget_) {
    why = "it is larger than the whole budget";
  } else if (!store_) {
    why = "there is no store to move others to";
  } else {
    why = "what is resident is pinned";
  }
  return "pyg_sar's pager has no room for a tensor of " + std::to_string(bytes) +
         " bytes: the budget is " + std::to_string(budget_) + " bytes, " +
         std::to_string(count_.resident) + " are resident, " +
         std::to_string(store_ ? store_->stored() : 0) + " are in the store, and " + why +
         ". Cut the graph into more parts, or give more memory" +
         (last_error_ != 0 ? ", or a directory with more space" : "");
}

Region* Pager::unused() {
  if (unused_.empty()) unused_.push_back(new Region);
  return unused_.back();
}

// A freed region with its pages, at most an eighth larger; 'in_place', a smaller one may get fresh pages besides.
Region* Pager::reuse(int64_t bytes, bool in_place) {
  auto found = cached_.lower_bound(bytes);
  while (!in_place && found != cached_.end() && found->second->grown) ++found;
  if (found == cached_.end() || found->first > bytes + bytes / 8) {
    if (!in_place || found == cached_.begin()) return nullptr;
    const auto& [size, one] = *--found;
    if (size < bytes - bytes / 8 || one->slots * kSlot < bytes || exceeds(bytes - size)) return nullptr;
  }
  Region* r = found->second;
  if (!keeps_ && !protect_pages(r->base, std::min(r->bytes, bytes), true)) return nullptr;
  if (r->bytes > bytes && !drop_pages(r->base + bytes, r->bytes - bytes)) return nullptr;
  if (r->bytes < bytes && !fresh_pages(r->base + r->bytes, bytes - r->bytes)) return nullptr;
  r->grown |= r->bytes < bytes;
  cached_.erase(found);
  cached_bytes_ -= r->bytes;
  hold(bytes - r->bytes, 0);
  r->bytes = bytes;
  return r;
}

bool Pager::drop_cached() {
  if (cached_.empty()) return false;
  auto last = std::prev(cached_.end());
  if (keeps_)  // the one that was freed first: steps of a training free the same sizes again
    last = std::ranges::min_element(cached_, {}, [](const auto& one) { return one.second->stamp; });
  Region& r = *last->second;
  if (!drop_pages(r.base, r.bytes)) return false;
  cached_.erase(last);
  cached_bytes_ -= r.bytes;
  count_.resident -= r.bytes;
  --maps_;
  let_go(r);
  return true;
}

// Resident bytes that 'bytes' more may make. What is kept never makes more than were alive at once, lately.
int64_t Pager::limit(int64_t bytes) const {
  return keeps_ ? std::max({most_live_[0], most_live_[1], live() + bytes}) : budget_;
}

void Pager::see_live() {
  if (++allocations_ > kPeriod) {
    allocations_ = 0;
    most_live_ = {live(), most_live_[0]};
    while (exceeds(0) && drop_cached()) {
    }
  }
  most_live_[0] = std::max(most_live_[0], live());
}

// Its pages stay for others.
void Pager::keep(Region& r) {
  r.state = State::kCached;
  r.stamp = ++clock_;
  cached_.emplace(r.bytes, &r);
  cached_bytes_ += r.bytes;
}

// Its pages are gone.
void Pager::let_go(Region& r) {
  r.state = State::kFree;
  reservation_.give(r.base, r.slots);
  unused_.push_back(&r);
}

void* Pager::allocate(int64_t wanted, int64_t arena) {
  const int64_t bytes = whole_pages(wanted);
  Lock lock(mutex_);
  if (arena == kKept) {
    if (!open_ || !keeps_ || (maps_ >= most_maps_ && cached_.empty())) return nullptr;
    arena = 0;
  }
  Region* r = nullptr;
  last_error_ = 0;
  if (more_at_once_ > 0) {  // the first place after the operator where an error can be raised
    C10_THROW_ERROR(OutOfMemoryError,
                    "an operator needed " + std::to_string(std::exchange(more_at_once_, 0)) +
                        " bytes more at once: pyg_sar's pager has " + std::to_string(budget_) +
                        " bytes for the tensors that it reads and writes");
  }
  {
    const Stopwatch watch(exceeds(bytes) ? &count_.waited : nullptr);
    if (!make_room(lock, bytes, 0, &r, !keeps_)) {
      if (keeps_) return nullptr;
      C10_THROW_ERROR(OutOfMemoryError, refusal(bytes));
    }
  }
  if (r == nullptr) {
    r = unused();
    r->base = reservation_.take(bytes, r, &r->slots);
    if (r->base == nullptr || !fresh_pages(r->base, bytes)) {
      const int error = errno;
      if (r->base != nullptr) reservation_.give(r->base, r->slots);
      if (keeps_) return nullptr;
      C10_THROW_ERROR(OutOfMemoryError, "pyg_sar's pager: the system gives no pages for a tensor of " +
                                            std::to_string(bytes) + " bytes: " + std::strerror(error));
    }
    unused_.pop_back();
    r->bytes = bytes;
    r->grown = false;
    hold(bytes);
  }
  if (keeps_) see_live();
  r->arena = arena;
  r->stamp = ++clock_;
  r->born = births_[arena]++;
  r->place = -1;
  r->pins = r->operation = r->misses = 0;
  r->freed = r->yields = r->stop = r->unseen = false;
  r->state = State::kDirty;
  queue(*r).emplace(r->stamp, r);
  ++count_.regions;
  if (store_ && is_scarce()) wake();
  return r->base;
}

void Pager::release(void* data) {
  Region* r = reservation_.find(data);
  if (forked_) {  // the parent's: only this copy of the pages goes
    if (r != nullptr) madvise(r->base, r->bytes, MADV_DONTNEED);
    return;
  }
  Lock lock(mutex_);
  if (r->busy != Busy::kNo) {
    r->freed = r->stop = true;
    return;
  }
  retire(*r);
}

void Pager::retire(Region& r) {
  --count_.regions;
  if (r.arena >= 0) {
    queue(r).erase(r.stamp);
    if (r.state == State::kClean) clean_ -= r.bytes;
    if (r.place >= 0) store_->give(r.place, r.bytes);
    r.place = -1;
    if (r.state != State::kOut) {
      keep(r);
      const bool all = keeps_ || count_.evictions > 0;  // where memory is short
      while (!all && cached_bytes_ > std::min(budget_ / 8, kMostCached) && drop_cached()) {
      }
      changed_.notify_all();
      return;
    }
  } else if (!drop_pages(r.base, r.bytes)) {
    madvise(r.base, r.bytes, MADV_DONTNEED);
  }
  let_go(r);
}

// From Python ##################################################################

void Pager::set_budget(int64_t budget) {
  Lock lock(mutex_);
  budget_ = budget > 0 ? budget : kNoLimit;
  const Stopwatch watch(exceeds(0) ? &count_.waited : nullptr);
  make_room(lock, 0, 0);
}

bool Pager::touch(char* address, bool write, int64_t pins) {
  Region* r = reservation_.find(address);
  if (r == nullptr || forked_) return false;
  Lock lock(mutex_);
  if (r->arena < 0) return false;
  last_error_ = 0;
  if (pins >= 0 && !bring_in(lock, *r, write ? Access::kWrite : Access::kRead, false))
    throw std::runtime_error(refusal(r->bytes));
  r->pins += pins;
  return true;
}

void Pager::move_out(int64_t arena) {
  if (!store_) throw std::runtime_error("the pager has no store: it was opened without a directory");
  Lock lock(mutex_);
  last_error_ = 0;
  const uint64_t last = clock_;
  for (const int state : {1, 0, 1}) {  // dirty ones are written several at a time, and are clean then
    for (uint64_t from = 0;;) {
      const Queue& queue = arenas_[arena][state];
      const auto next = queue.lower_bound(from);
      if (next == queue.end() || next->first > last) break;
      Region& r = *next->second;
      if (r.busy != Busy::kNo) {
        changed_.wait(lock);
        continue;
      }
      from = next->first + 1;
      if (r.pins == 0 && !evict(lock, r, 0))
        throw std::runtime_error("the store takes no more: " +
                                 std::string(std::strerror(last_error_)));
    }
  }
}

std::vector<int64_t> Pager::counters() {
  Lock lock(mutex_);
  return {count_.resident,      count_.peak,          store_ ? store_->stored() : 0,
          count_.read,          count_.written,       count_.demand_faults,
          count_.demand_bytes,  count_.prefetched,    count_.evictions,
          count_.regions,       count_.overrun,       count_.waited};
}

}  // namespace pyg_sar::pager

#endif
