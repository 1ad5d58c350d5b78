#if defined(__linux__)

#include "pager_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace pyg_sar::pager {
namespace {

constexpr int64_t kUnit = 4096;          // places and lengths in the file: what O_DIRECT asks for
constexpr size_t kPiece = 8 << 20;       // of one read or write
constexpr int64_t kStep = 256LL << 20;   // by which the file grows

int make_file(const std::string& directory) {
  const int file = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = directory + "/pyg-sar-store-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

}  // namespace

Store::Store(const std::string& directory) : file_(make_file(directory)) {
  if (file_ < 0) throw std::runtime_error(std::strerror(errno));
  direct_ = takes_direct();
}

Store::~Store() { close(file_); }

// A file system may take the flag and refuse the write.
bool Store::takes_direct() const {
  const int flags = fcntl(file_, F_GETFL);
  if (fcntl(file_, F_SETFL, flags | O_DIRECT) != 0) return false;
  void* page = mmap(nullptr, kUnit, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool done = page != MAP_FAILED && pwrite(file_, page, kUnit, 0) == kUnit &&
                    pread(file_, page, kUnit, 0) == kUnit;
  if (page != MAP_FAILED) munmap(page, kUnit);
  if (!done) fcntl(file_, F_SETFL, flags);
  return done;
}

// Space is claimed before it is needed: a full disk is an error of an allocation, which can be raised.
int Store::grow(int64_t bytes) {
  if (fallocate(file_, 0, size_, bytes) != 0) {
    if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
    if (ftruncate(file_, size_ + bytes) != 0) return errno;
  }
  free_.give(size_, bytes);
  size_ += bytes;
  return 0;
}

int64_t Store::take(int64_t bytes) {
  const int64_t units = (bytes + kUnit - 1) / kUnit * kUnit;
  const int64_t place = free_.take(units);
  if (place >= 0) stored_ += units;
  return place;
}

int64_t Store::reserve(int64_t wanted) {
  const int64_t bytes = (wanted + kUnit - 1) / kUnit * kUnit;
  const int64_t place = take(bytes);
  if (place >= 0) return place;
  error_ = grow(std::max(bytes, kStep));
  if (error_ != 0 && bytes < kStep) error_ = grow(bytes);
  return error_ != 0 ? -1 : take(bytes);
}

void Store::give(int64_t place, int64_t bytes) {
  const int64_t units = (bytes + kUnit - 1) / kUnit * kUnit;
  stored_ -= units;
  free_.give(place, units);
}

int Store::write(std::vector<iovec> pieces, int64_t place, const std::atomic<bool>* stop,
                 std::atomic<int64_t>& moved) const {
  int64_t at = place;
  for (size_t next = 0; next < pieces.size() && !(stop != nullptr && stop->load(std::memory_order_relaxed));) {
    iovec* const first = &pieces[next];
    iovec part = *first;
    part.iov_len = std::min(part.iov_len, kPiece);
    const bool whole = part.iov_len == first->iov_len;
    ssize_t n = pwritev(file_, whole ? first : &part, whole ? static_cast<int>(pieces.size() - next) : 1, at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    at += n;
    moved += n;
    for (; n > 0; next += pieces[next].iov_len == 0 ? 1 : 0) {
      iovec& piece = pieces[next];
      const size_t done = std::min(piece.iov_len, static_cast<size_t>(n));
      piece.iov_base = static_cast<char*>(piece.iov_base) + done;
      piece.iov_len -= done;
      n -= static_cast<ssize_t>(done);
    }
  }
  if (!direct_ && at > place) {  // pages can leave the cache only once they are on the disk
    sync_file_range(file_, place, at - place,
                    SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(file_, place, at - place, POSIX_FADV_DONTNEED);
  }
  return 0;
}

int Store::read(char* to, int64_t bytes, int64_t place) const {
  for (int64_t at = 0; at < bytes;) {
    const ssize_t n = pread(file_, to + at, std::min(static_cast<int64_t>(kPiece), bytes - at), place + at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    at += n;
  }
  if (!direct_) posix_fadvise(file_, place, bytes, POSIX_FADV_DONTNEED);
  return 0;
}

}  // namespace pyg_sar::pager

#endif
