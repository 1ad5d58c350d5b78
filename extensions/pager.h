// The pager: tensors' memory that moves to a file and back, under a budget. See pyg_sar/store/pager.py.
#pragma once

#include "pager_memory.h"
#include "pager_store.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace pyg_sar::pager {

// Where a region's content is; [Note: States of a region] in pyg_sar/store/pager.py.
enum class State : uint8_t { kDirty, kClean, kOut, kCached, kFree };
enum class Busy : uint8_t { kNo, kWriting, kReading };
enum class Access : uint8_t { kRead, kWrite, kUnknown };

struct Region {
  char* base = nullptr;
  int64_t bytes = 0, slots = 0;
  int64_t place = -1;     // in the file; -1: none yet
  int64_t arena = -1;     // -1: of a pager that is closed
  uint64_t stamp = 0;     // when it was allocated, or missed, last
  int64_t born = 0;       // its number among all that its arena has allocated
  int64_t pins = 0;
  int64_t operation = 0, misses = 0;  // how often that one missed it
  State state = State::kFree;
  Busy busy = Busy::kNo;
  bool yields = false;    // the write under way gives way to a thread that changes the region
  bool freed = false;     // while busy: whoever is busy with it frees it
  bool unseen = false;    // read ahead, on a guess: the first thread that touches it stops, and is noted
  bool grown = false;     // of several of the kernel's mappings, which don't move together
  std::atomic<bool> stop{false};
};

// What a turn missed: a region's number, how many its arena had allocated after it when the turn began, its bytes.
struct Need {
  int64_t born, age, bytes;
};

// What turns of one key missed, and how many there were.
struct Needs {
  std::vector<Need> all;
  int64_t turns = 0;
};

// An arena's turns. All arenas run one program, again and again: the next turn needs what others needed before which
// as many regions were allocated, turn by turn. The more turns were alike, the surer: a deep model's layers are all
// alike. But the first epoch's turns are others than those of the second.
struct Turns {
  static constexpr size_t kLast = 64;
  static constexpr std::array<size_t, 3> kAlike{kLast, 16, 4};
  std::array<int64_t, kLast> allocated{};  // in the last turns
  size_t count = 0;
  int64_t births = 0;  // when the turn began; of an arena that waits, when its last one ended
  std::array<uint64_t, kAlike.size()> keys{};  // equal where so many turns before were alike
};

struct Counters {
  int64_t resident = 0, peak = 0, demand_faults = 0, demand_bytes = 0, prefetched = 0, evictions = 0;
  int64_t regions = 0, overrun = 0, waited = 0;
  std::atomic<int64_t> read{0}, written{0};
};

// Adds the nanoseconds until its end, at which the lock is held.
class Stopwatch {
 public:
  explicit Stopwatch(int64_t* total) : total_(total), begin_(std::chrono::steady_clock::now()) {}
  ~Stopwatch() {
    const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - begin_;
    if (total_ != nullptr) *total_ += passed.count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  int64_t* total_;
  std::chrono::steady_clock::time_point begin_;
};

class Pager {
 public:
  using Lock = std::unique_lock<std::mutex>;

  static Pager& instance();  // never destroyed: tensors may outlive everything

  // 'budget' 0: no limit; 'directory' empty: no store. Throws std::runtime_error.
  void open(int64_t arenas, int64_t budget, const std::string& directory, int64_t threads);
  // Brings everything in; what is alive stays where it is. Throws where memory or disk fail, still open.
  void close();
  // Without a budget and a store: all threads' allocations are taken, and pages of freed ones are kept for the next
  // ones, as many as were alive lately. Returns false where the system gives no addresses.
  bool keep();
  bool keeps() const { return keeps_; }
  bool is_open() const { return open_ && !forked_; }
  uint64_t generation() const { return generation_; }
  bool forked() const { return forked_; }

  // Throws c10::OutOfMemoryError. kKept: null where pages are not kept, or no more can be.
  static constexpr int64_t kKept = -1;
  void* allocate(int64_t bytes, int64_t arena);
  void release(void* data);
  bool owns(const void* address) const { return reservation_.find(address) != nullptr; }

  // A thread has no access to an address. False: not one of ours, or not to be had.
  bool fault(char* address, Access access);

  // An operator begins; ends. What threads touch meanwhile is what it touches. It is safe to call from any thread.
  int64_t begin_operation() { return operation_ = ++operations_; }
  int64_t operation() const { return operation_; }
  void end_operation(int64_t mine, int64_t before) { operation_.compare_exchange_strong(mine, before); }

  void set_budget(int64_t budget);
  void turn(int64_t arena);
  void move_out(int64_t arena);
  void wait();
  bool touch(char* address, bool write, int64_t pins);
  std::vector<int64_t> counters();

 private:
  using Queue = std::map<uint64_t, Region*>;  // by stamp: the oldest first
  using Arena = std::array<Queue, 3>;         // dirty, clean, out

  // pager.cpp
  Queue& queue(const Region& r) { return arenas_[r.arena][static_cast<int>(r.state)]; }
  void place(Region& r, State state);
  void renew(Region& r);
  void retire(Region& r);
  void forget(Region& r);
  Region* reuse(int64_t bytes, bool in_place);
  void keep(Region& r);
  void let_go(Region& r);
  bool drop_cached();
  int64_t live() const { return count_.resident - cached_bytes_; }
  int64_t limit(int64_t bytes) const;
  void see_live();
  Region* unused();
  void hold(int64_t bytes, int64_t maps = 1);
  std::string refusal(int64_t bytes) const;

  // pager_moves.cpp
  bool make_room(Lock& lock, int64_t bytes, int64_t nearest, Region** spare = nullptr,
                 bool in_place = false);
  Region* victim(int64_t nearest, bool has_place) const;
  bool evict(Lock& lock, Region& r, int64_t wanted);
  bool lift(Region& r);
  std::vector<Region*> together(Region& first);
  bool write(Lock& lock, Region& first, bool yields);
  bool read(Lock& lock, Region& r, Seen seen, Region* spare);
  bool bring_in(Lock& lock, Region& r, Access access, bool demand);
  bool fill(Lock& lock, Region& r, bool writable, bool demand);
  bool thrashes(Region& r);
  bool exceeds(int64_t bytes) const { return count_.resident + bytes > limit(bytes); }

  // pager_workers.cpp
  void work();
  void end_turn();
  bool matches(const Need& need, const Region& r) const;
  void note(const Region& r);
  bool see(Region& r);
  bool prefetch_one(Lock& lock);
  bool read_ahead(Lock& lock, int64_t distance, Region& r, Seen seen);
  bool write_one(Lock& lock);
  // What must be written before it can leave memory takes most of it.
  bool is_scarce() const { return count_.resident - cached_bytes_ - clean_ > budget_ / 5 * 4; }
  int64_t arena_at(int64_t distance) const { return (current_ + distance) % num_arenas(); }
  int64_t num_arenas() const { return static_cast<int64_t>(arenas_.size()); }
  void wake();
  void stop_workers();

  // Held by no thread that may miss a region: no code under it reads or writes one. So the handler may take it.
  std::mutex mutex_;
  std::condition_variable changed_, work_;
  std::atomic<bool> open_{false}, forked_{false}, keeps_{false};
  std::atomic<uint64_t> generation_{0};
  Reservation reservation_;
  std::unique_ptr<Store> store_;
  std::vector<Arena> arenas_;
  std::multimap<int64_t, Region*> cached_;
  std::vector<Region*> unused_;
  std::vector<int64_t> births_;  // by arena
  std::vector<Turns> turns_;     // by arena
  std::unordered_map<uint64_t, Needs> needs_;  // by each of the turns' keys
  // How many needs were looked at for this arena and for the next one.
  std::array<size_t, 2> looked_at_{};
  std::vector<std::thread> workers_;
  Counters count_;
  int64_t budget_ = 0, cached_bytes_ = 0, clean_ = 0, in_flight_ = 0, maps_ = 0, most_maps_ = 0;
  std::array<int64_t, 2> most_live_{};  // in this period and in the one before it
  int64_t allocations_ = 0;             // in this period
  int64_t current_ = 0;
  std::atomic<int64_t> operations_{0}, operation_{0};
  int64_t too_large_ = -1;     // the last operator whose tensors didn't fit together
  int64_t more_at_once_ = 0;   // bytes that it needed beyond the budget; 0: its refusal was raised
  uint64_t clock_ = 0, asked_ = 1;
  size_t idle_ = 0;  // workers that found nothing to do since they were asked last
  int last_error_ = 0;  // of the store
  bool stopping_ = false, write_failed_ = false;
};

// pager_signals.cpp: missing pages become calls of Pager::fault; all other faults go to who had them.
void install_handler();
void remove_handler();

}  // namespace pyg_sar::pager
