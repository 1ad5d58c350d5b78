// Addresses of regions: a reservation of the process's addresses, and what may be done with its pages.
#pragma once

#include "pager_extents.h"

#include <atomic>
#include <cstdint>

namespace pyg_sar::pager {

struct Region;
enum class Seen : uint8_t { kNo, kRead, kWritten };  // what threads may do with pages that were read

constexpr int64_t kSlot = 64 << 10;          // addresses are given out in slots
constexpr int64_t kHugePage = 2 << 20;       // huge pages are asked for ...
constexpr int64_t kHugeRegion = kHugePage;   // ... from this size on

int64_t whole_pages(int64_t bytes);

// Made once in a process and never given back: tensors may outlive a pager.
class Reservation {
 public:
  // Reserves what the system allows, up to 1 TiB; throws std::runtime_error below 1 GiB.
  void make();
  bool made() const { return base_ != nullptr; }

  // Addresses for 'bytes', or null; they belong to 'region' until they are given back. Not thread-safe.
  char* take(int64_t bytes, Region* region, int64_t* slots);
  void give(char* base, int64_t slots);

  // Whose address it is. Lock-free.
  Region* find(const void* address) const;

 private:
  void assign(char* base, int64_t slots, Region* region);

  char* base_ = nullptr;
  int64_t slots_ = 0;
  Extents free_;
  std::atomic<Region*>* owners_ = nullptr;
};

// Pages of addresses that are whole pages. False: the system refused, and nothing has changed.
bool protect_pages(char* base, int64_t bytes, bool writable);
bool fresh_pages(char* base, int64_t bytes);  // of no access before: readable, writable, zero
bool drop_pages(char* base, int64_t bytes);   // gives the memory back; no access after
bool move_pages(char* from, char* to, int64_t bytes);  // no access from then on, at either place

// Memory at another place that is filled first and moved in one step: no thread sees a page half filled.
class Scratch {
 public:
  // At 'spare', whose pages are used, or at a place of its own where there is none.
  Scratch(char* target, int64_t bytes, char* spare);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return data_; }  // null: no memory
  bool move(Seen seen);

 private:
  char *target_, *data_ = nullptr;
  int64_t bytes_;
  bool own_;
};

}  // namespace pyg_sar::pager
