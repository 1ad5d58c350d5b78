// The pager as PyTorch's allocator of CPU tensors, and the functions that Python calls.
#if defined(__linux__)

#include "pager.h"

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <type_traits>

namespace pyg_sar::pager {
namespace {

constexpr int64_t kLeast = 16 << 10;     // bytes; smaller tensors are not paged
constexpr int64_t kLeastKept = 1 << 20;  // smaller tensors are malloc's, which keeps them itself

struct Entered {
  uint64_t generation = 0;
  int64_t arena = -1;
};
thread_local Entered entered;

void release(void* data);

thread_local std::string failure;

// Tensors keep a pointer to their allocator: it lives as long as the process.
class PagedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Pager& pager = Pager::instance();
    const auto size = static_cast<int64_t>(bytes);
    void* data = nullptr;
    if (pager.keeps()) {
      if (size >= kLeastKept) data = pager.allocate(size, Pager::kKept);
    } else if (size >= kLeast && entered.arena >= 0 && pager.is_open() &&
               entered.generation == pager.generation()) {
      try {
        data = pager.allocate(size, entered.arena);
      } catch (const c10::Error& error) {  // Of which a caller by the stable ABI learns nothing.
        failure = error.what_without_backtrace();
        throw;
      }
    }
    if (data == nullptr) return usual_->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void free_usual(void* data) const { usual_->raw_deallocate(data); }
  bool install() {
    usual_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this);
    return c10::GetCPUAllocator() == this;
  }
  bool remove() {
    if (c10::GetCPUAllocator() == this) c10::SetCPUAllocator(usual_);
    return c10::GetCPUAllocator() == usual_;
  }

 private:
  c10::Allocator* usual_ = nullptr;
};

PagedAllocator& allocator() {
  static auto* const one = new PagedAllocator;
  return *one;
}

void release(void* data) {
  if (!Pager::instance().owns(data)) return allocator().free_usual(data);
  c10::profiledCPUMemoryReporter().Delete(data);
  Pager::instance().release(data);
}

// An operator of PyTorch, or of a kernel, that a part's thread calls.
struct Operation final : at::ObserverContext {
  int64_t before = Pager::instance().operation();
  int64_t mine = Pager::instance().begin_operation();
};

std::unique_ptr<at::ObserverContext> begin_operation(const at::RecordFunction&) {
  if (entered.arena < 0) return nullptr;
  return std::make_unique<Operation>();
}

// What an operator calls within itself are operators of their own; then it goes on.
void end_operation(const at::RecordFunction&, at::ObserverContext* context) {
  const auto* operation = static_cast<const Operation*>(context);
  if (operation != nullptr) Pager::instance().end_operation(operation->mine, operation->before);
}

at::CallbackHandle watched = 0;

void watch_operators() {
  watched = at::addGlobalCallback(at::RecordFunctionCallback(&begin_operation, &end_operation)
                                      .scopes({at::RecordScope::FUNCTION}));
}

bool keeping = false;  // pages of freed tensors are kept where no pager is open

bool stop_keeping() {
  if (!Pager::instance().keeps()) return true;
  if (!allocator().remove()) return false;
  Pager::instance().close();
  return true;
}

// Returns whether they are now.
bool keep_freed(bool on) {
  keeping = on;
  Pager& pager = Pager::instance();
  if (!on) return !stop_keeping();
  if (pager.is_open() || pager.forked()) return pager.keeps();
  if (!pager.keep()) return false;
  if (allocator().install()) return true;
  pager.close();
  return false;
}

void open(int64_t arenas, int64_t budget, const std::string& directory, int64_t threads) {
  if (!stop_keeping())
    throw std::runtime_error("another allocator of CPU tensors was installed after this one");
  Pager::instance().open(arenas, budget, directory, threads);
  if (allocator().install()) return watch_operators();
  Pager::instance().close();
  throw std::runtime_error("another allocator of CPU tensors has a higher priority");
}

void close() {
  if (!allocator().remove())
    throw std::runtime_error("another allocator of CPU tensors was installed after the pager's");
  try {
    Pager::instance().close();
  } catch (...) {
    allocator().install();
    throw;
  }
  at::removeCallback(std::exchange(watched, 0));
  if (keeping) keep_freed(true);
}

void enter(int64_t arena) { entered = {Pager::instance().generation(), arena}; }

// Returns what work does, a number from 0 on; -1 for an error, whose text is kept.
template <class Work>
int64_t tried(const Work& work) {
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      return work(), 0;
    } else {
      return work();
    }
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  return -1;
}

}  // namespace
}  // namespace pyg_sar::pager

// What Python calls. As operators of PyTorch these would take three times as long to compile.
#define PYG_SAR_CALL extern "C" __attribute__((visibility("default")))

using pyg_sar::pager::Pager;
using pyg_sar::pager::tried;

PYG_SAR_CALL const char* pager_built_with() { return TORCH_VERSION; }
PYG_SAR_CALL const char* pager_error() { return pyg_sar::pager::failure.c_str(); }
PYG_SAR_CALL int64_t pager_open(int64_t arenas, int64_t budget, const char* directory, int64_t threads) {
  return tried([&] { pyg_sar::pager::open(arenas, budget, directory, threads); });
}
PYG_SAR_CALL int64_t pager_close() { return tried(&pyg_sar::pager::close); }
PYG_SAR_CALL int64_t pager_keep_freed(int64_t on) {
  return tried([&] { return pyg_sar::pager::keep_freed(on != 0); });
}
PYG_SAR_CALL int64_t pager_enter(int64_t arena) {
  return tried([&] { pyg_sar::pager::enter(arena); });
}
PYG_SAR_CALL int64_t pager_turn(int64_t arena) {
  return tried([&] {
    pyg_sar::pager::install_handler();
    Pager::instance().turn(arena);
  });
}
PYG_SAR_CALL int64_t pager_move_out(int64_t arena) {
  return tried([&] { Pager::instance().move_out(arena); });
}
PYG_SAR_CALL int64_t pager_wait() {
  return tried([] { Pager::instance().wait(); });
}
PYG_SAR_CALL int64_t pager_budget(int64_t bytes) {
  return tried([&] { Pager::instance().set_budget(bytes); });
}
// Writes the numbers of PagerCounters, and returns how many.
PYG_SAR_CALL int64_t pager_counters(int64_t* out) {
  return tried([&] {
    const std::vector<int64_t> counters = Pager::instance().counters();
    std::copy(counters.begin(), counters.end(), out);
    return static_cast<int64_t>(counters.size());
  });
}
// Of the memory of a tensor's storage.
PYG_SAR_CALL int64_t pager_touch(void* data, int64_t write, int64_t pins) {
  return tried([&] { return Pager::instance().touch(static_cast<char*>(data), write != 0, pins); });
}

#endif
