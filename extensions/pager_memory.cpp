#if defined(__linux__)

#include "pager_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

namespace pyg_sar::pager {
namespace {

constexpr int kAnonymous = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
constexpr int kReadWrite = PROT_READ | PROT_WRITE;
constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED;
constexpr int kKeepAddresses = 4;  // MREMAP_DONTUNMAP, since Linux 5.7: no hole is left to others
constexpr int kPopulate = 23;      // MADV_POPULATE_WRITE, since Linux 5.14

// In one step. What was at 'to' may be gone where that fails.
bool remap(char* from, char* to, int64_t bytes, int flags) {
  if (mremap(from, bytes, bytes, flags, to) != MAP_FAILED) return true;
  drop_pages(to, bytes);
  return false;
}

int64_t slots_of(int64_t bytes) { return (bytes + kSlot - 1) / kSlot; }

}  // namespace

int64_t whole_pages(int64_t bytes) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

// Reservation ##################################################################

void Reservation::make() {
  for (int64_t bytes = int64_t{1} << 40; bytes >= int64_t{1} << 30; bytes /= 2) {
    void* base = mmap(nullptr, bytes + kHugePage, PROT_NONE, kAnonymous, -1, 0);
    if (base == MAP_FAILED) continue;
    const int64_t slots = bytes / kSlot;
    void* owners = mmap(nullptr, slots * sizeof(*owners_), kReadWrite, kAnonymous, -1, 0);
    if (owners == MAP_FAILED) {
      munmap(base, bytes + kHugePage);
      continue;
    }
    const auto number = reinterpret_cast<uintptr_t>(base);
    base_ = reinterpret_cast<char*>((number + kHugePage - 1) / kHugePage * kHugePage);
    owners_ = static_cast<std::atomic<Region*>*>(owners);
    slots_ = slots;
    free_.give(0, slots);
    return;
  }
  throw std::runtime_error("the system reserves no gigabyte of addresses (ulimit -v?)");
}

char* Reservation::take(int64_t bytes, Region* region, int64_t* slots) {
  *slots = slots_of(bytes + bytes / 8);  // to grow
  const int64_t at = free_.take(*slots, bytes >= kHugeRegion ? kHugePage / kSlot : 1);
  if (at < 0) return nullptr;
  assign(base_ + at * kSlot, *slots, region);
  return base_ + at * kSlot;
}

void Reservation::give(char* base, int64_t slots) {
  assign(base, slots, nullptr);
  free_.give((base - base_) / kSlot, slots);
}

void Reservation::assign(char* base, int64_t slots, Region* region) {
  const int64_t begin = (base - base_) / kSlot;
  for (int64_t i = 0; i < slots; ++i) owners_[begin + i].store(region, std::memory_order_release);
}

Region* Reservation::find(const void* address) const {
  const int64_t slot = (static_cast<const char*>(address) - base_) / kSlot;
  if (base_ == nullptr || address < base_ || slot >= slots_) return nullptr;
  return owners_[slot].load(std::memory_order_acquire);
}

// Pages ########################################################################

bool protect_pages(char* base, int64_t bytes, bool writable) {
  return mprotect(base, bytes, writable ? kReadWrite : PROT_READ) == 0;
}

bool fresh_pages(char* base, int64_t bytes) {
  if (mprotect(base, bytes, kReadWrite) != 0) return false;
  // A region's end need not be a huge page's: what lies beyond has no access, and gets none.
  const int64_t huge = bytes >= kHugeRegion ? bytes / kHugePage * kHugePage : 0;
  if (huge > 0) madvise(base, bytes, MADV_HUGEPAGE);
  // The other pages in one call: a fault for each takes longer. Older kernels refuse, and fault.
  if (bytes > huge) madvise(base + huge, bytes - huge, kPopulate);
  return true;
}

// A fresh mapping instead of mprotect and madvise: the kernel joins it with its neighbours again.
bool drop_pages(char* base, int64_t bytes) {
  return mmap(base, bytes, PROT_NONE, kAnonymous | MAP_FIXED, -1, 0) != MAP_FAILED;
}

bool move_pages(char* from, char* to, int64_t bytes) {
  if (mprotect(from, bytes, PROT_NONE) != 0 || !remap(from, to, bytes, kMove | kKeepAddresses)) return false;
  drop_pages(from, bytes);
  return true;
}

// Huge pages, and whole tables of pages, move at once where both places lie alike.
Scratch::Scratch(char* target, int64_t bytes, char* spare)
    : target_(target), data_(spare), bytes_(bytes), own_(spare == nullptr) {
  if (!own_) {
    madvise(data_, bytes, MADV_DONTFORK);
    return;
  }
  void* all = mmap(nullptr, bytes + kHugePage, kReadWrite, kAnonymous, -1, 0);
  if (all == MAP_FAILED) return;
  const auto here = reinterpret_cast<uintptr_t>(all), there = reinterpret_cast<uintptr_t>(target);
  const int64_t before = (there - here) % kHugePage;
  data_ = static_cast<char*>(all) + before;
  if (before > 0) munmap(all, before);
  if (before < kHugePage) munmap(data_ + bytes, kHugePage - before);
  // A fork while the disk writes here would leave one of both processes without the data.
  madvise(data_, bytes, MADV_DONTFORK);
  if (bytes >= kHugeRegion) madvise(data_, bytes, MADV_HUGEPAGE);
}

Scratch::~Scratch() {
  if (own_ && data_ != nullptr) munmap(data_, bytes_);
}

bool Scratch::move(Seen seen) {
  const int access = seen == Seen::kNo ? PROT_NONE : PROT_READ;
  if (seen != Seen::kWritten && mprotect(data_, bytes_, access) != 0) return false;
  if (!remap(data_, target_, bytes_, own_ ? kMove : kMove | kKeepAddresses)) return false;
  data_ = nullptr;
  madvise(target_, bytes_, MADV_DOFORK);
  return true;
}

}  // namespace pyg_sar::pager

#endif
