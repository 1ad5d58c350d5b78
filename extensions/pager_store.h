// A file without a name that takes the contents of regions: past the page cache where it can.
#pragma once

#include "pager_extents.h"

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace pyg_sar::pager {

class Store {
 public:
  // Throws std::runtime_error where no file can be made in 'directory'.
  explicit Store(const std::string& directory);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // A place for 'bytes', -1 where the file system has none (error() says what it said). Not thread-safe.
  int64_t reserve(int64_t bytes);
  int64_t take(int64_t bytes);  // -1 where the file would have to grow
  void give(int64_t place, int64_t bytes);

  // 0, or the number of the error. 'stop' ends a write early, if given; 'moved' counts what went over. Thread-safe.
  int write(std::vector<iovec> pieces, int64_t place, const std::atomic<bool>* stop,
            std::atomic<int64_t>& moved) const;
  int read(char* to, int64_t bytes, int64_t place) const;

  int error() const { return error_; }
  int64_t stored() const { return stored_; }
  bool direct() const { return direct_; }

 private:
  int grow(int64_t bytes);
  bool takes_direct() const;

  int file_ = -1, error_ = 0;
  bool direct_ = false;
  int64_t size_ = 0, stored_ = 0;
  Extents free_;
};

}  // namespace pyg_sar::pager
