#if defined(__linux__)

#include "pager.h"

#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace pyg_sar::pager {
namespace {

struct sigaction before;          // who had the signal
std::atomic<void*> passed{nullptr};  // the last fault that was not ours, and how often it came
std::atomic<int> times{0};

Access access_of(const void* context) {
#if defined(__x86_64__)
  const auto* frame = static_cast<const ucontext_t*>(context);
  return (frame->uc_mcontext.gregs[REG_ERR] & 2) != 0 ? Access::kWrite : Access::kRead;
#else
  (void)context;
  return Access::kUnknown;
#endif
}

// As if there were no pager. The instruction runs again after it, so that a real crash stays one.
void pass_on(int signal, siginfo_t* info, void* context) {
  const bool usual = (before.sa_flags & SA_SIGINFO) == 0 &&
                     (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN);
  // One that was installed later, and calls this one in turn, may leave the two in a circle.
  times = passed.exchange(info->si_addr) == info->si_addr ? times + 1 : 1;
  if (usual || times > 3) {
    ::signal(signal, SIG_DFL);
    if (info->si_code <= 0) raise(signal);  // sent by kill(): doesn't come again by itself
  } else if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(signal, info, context);
  } else {
    before.sa_handler(signal);
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const bool ours = info->si_code > 0 &&
                    Pager::instance().fault(static_cast<char*>(info->si_addr), access_of(context));
  errno = error;
  if (!ours) pass_on(signal, info, context);
}

void say(const char* text) {
  if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

bool is_installed() {
  struct sigaction now;
  return sigaction(SIGSEGV, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
         now.sa_sigaction == &handle;
}

}  // namespace

void install_handler() {
  if (is_installed()) return;
  struct sigaction mine;
  std::memset(&mine, 0, sizeof(mine));
  mine.sa_sigaction = &handle;
  mine.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&mine.sa_mask);
  sigaction(SIGSEGV, &mine, &before);
}

// Where another handler came after this one it may call it still: then it stays, and passes all on.
void remove_handler() {
  if (is_installed()) sigaction(SIGSEGV, &before, nullptr);
}

// A fault comes from an instruction that reads or writes a tensor: not from within malloc or the pager, and
// with no lock of theirs held. So it may do what any code may, as long as it needs little stack.
bool Pager::fault(char* address, Access access) {
  Region* r = reservation_.find(address);
  if (r == nullptr || !open_) return false;
  if (forked_) {
    if (r->state == State::kOut) {
      say("pyg_sar's pager: a forked process reads a tensor that waits in its parent's store\n");
      return false;
    }
    return address < r->base + r->bytes && protect_pages(r->base, r->bytes, true);
  }
  Lock lock(mutex_);
  if (r->arena < 0 || r->state == State::kFree || r->state == State::kCached) return false;
  if (address >= r->base + r->bytes) return false;
  if (bring_in(lock, *r, access, true)) return true;
  lock.unlock();
  say("pyg_sar's pager: a tensor can't be brought in: ");
  say(std::strerror(last_error_));
  say("\n");
  return false;
}

}  // namespace pyg_sar::pager

#endif
