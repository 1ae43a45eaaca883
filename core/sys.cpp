#include "sys.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>
#include <vector>

#include "errors.h"

namespace hostcache {

Error os_error(const std::string& doing, int error) {
  return Error(Code::os,
               doing + ": " + std::strerror(error) + " (errno " + std::to_string(error) + ")");
}

std::string in_root(const std::string& root) { return " --root " + root; }

std::string bytes_text(unsigned long long bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return std::to_string(bytes) + " bytes";
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 3) {
    value /= 1024;
    ++unit;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.1f %s (%llu bytes)", value, kUnits[unit], bytes);
  return text;
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void Fd::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

namespace {

std::atomic<u32> generation{0};

// Never destroyed: finalisers may come after static destruction.
struct PrivateFds {
  std::mutex mutex;
  std::vector<int> open;
};
PrivateFds& private_fds() {
  static auto* fds = [] {
    auto* made = new PrivateFds;
    pthread_atfork([] { private_fds().mutex.lock(); }, [] { private_fds().mutex.unlock(); },
                   [] {
                     generation.fetch_add(1);
                     for (const int fd : private_fds().open) ::close(fd);
                     private_fds().open.clear();
                     private_fds().mutex.unlock();
                   });
    return made;
  }();
  return *fds;
}

}  // namespace

u32 fork_generation() {
  private_fds();  // its handlers count the forks
  return generation;
}

std::mutex& fork_mutex() { return private_fds().mutex; }

PrivateFd::PrivateFd(const std::string& path, int flags) : generation_(fork_generation()) {
  PrivateFds& fds = private_fds();
  // No fork between open and the note of it.
  const std::lock_guard<std::mutex> one(fds.mutex);
  fd_ = ::open(path.c_str(), flags, 0600);
  if (fd_ >= 0) fds.open.push_back(fd_);
}

PrivateFd::PrivateFd(PrivateFd&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}

PrivateFd& PrivateFd::operator=(PrivateFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    generation_ = other.generation_;
  }
  return *this;
}

void PrivateFd::reset() {
  if (fd_ >= 0 && generation_ == generation) {
    PrivateFds& fds = private_fds();
    const int error = errno;  // callers look at that of the call before
    const std::lock_guard<std::mutex> one(fds.mutex);
    std::erase(fds.open, fd_);
    ::close(fd_);
    errno = error;
  }
  fd_ = -1;
}

namespace {
u64 clock_ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000ULL + static_cast<u64>(t.tv_nsec);
}

timespec to_timespec(u64 ns) {
  return {static_cast<time_t>(ns / 1'000'000'000ULL), static_cast<long>(ns % 1'000'000'000ULL)};
}
}  // namespace

u64 monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }
u64 realtime_ns() { return clock_ns(CLOCK_REALTIME); }

u64 random_word() {
  u64 word = 0;
  if (getrandom(&word, sizeof word, 0) != static_cast<ssize_t>(sizeof word))
    throw os_error("getrandom", errno);
  return word;
}

std::string read_text(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  char buffer[4096];
  while (fd) {
    const ssize_t n = ::read(fd.get(), buffer, sizeof buffer);
    if (n <= 0) break;
    text.append(buffer, static_cast<size_t>(n));
  }
  return text;
}

void boot_id(u8 out[16]) {
  std::memset(out, 0, 16);
  int digits = 0;
  for (const char c : read_text("/proc/sys/kernel/random/boot_id")) {
    if (c == '-') continue;
    const int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (value < 0 || digits == 32) break;
    out[digits / 2] = static_cast<u8>(out[digits / 2] << 4 | value);
    ++digits;
  }
}

void sleep_ns(u64 ns) {
  const timespec t = to_timespec(ns);
  nanosleep(&t, nullptr);
}

void futex_wait(u32* word, u32 expected, u64 timeout_ns) {
  const timespec t = to_timespec(timeout_ns);
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
}

void futex_wake_one(u32* word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0); }

namespace {
struct flock range(short type, u64 start, u64 length) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(start);
  lock.l_len = static_cast<off_t>(length);
  return lock;
}
}  // namespace

bool ofd_lock(int fd, u64 start, u64 length) {
  struct flock lock = range(F_WRLCK, start, length);
  int rc = 0;
  do {
    rc = fcntl(fd, F_OFD_SETLK, &lock);
  } while (rc != 0 && errno == EINTR);
  return rc == 0;
}

void ofd_unlock(int fd, u64 start, u64 length) {
  struct flock lock = range(F_UNLCK, start, length);
  fcntl(fd, F_OFD_SETLK, &lock);
}

bool ofd_held(int fd, u64 start, u64 length) {
  struct flock lock = range(F_WRLCK, start, length);
  if (fcntl(fd, F_OFD_GETLK, &lock) != 0) return true;
  return lock.l_type != F_UNLCK;
}

Witness::Witness(int fd) : fd_(fd) {
  struct stat st{};
  if (fstat(fd, &st) != 0) throw os_error("fstat of a segment", errno);
  device_ = st.st_dev;
  inode_ = st.st_ino;
}

bool Witness::gone(u64 start, u64 length) const {
  if (ofd_held(fd_, start, length)) return false;
  struct stat st{};
  return fstat(fd_, &st) == 0 && st.st_dev == device_ && st.st_ino == inode_;
}

}  // namespace hostcache
