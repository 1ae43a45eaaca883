// The system calls that the core rests on, each with its errors told apart.
#pragma once

#include <mutex>
#include <string>
#include <utility>

#include "layout.h"

namespace hostcache {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

// Raised in the child handler of fork: what was made before it is the parent's.
u32 fork_generation();

// Held by the forking thread through every fork: what it guards is never seen half changed in the
// child. For short pieces without calls into anything else.
std::mutex& fork_mutex();

// A descriptor whose lock must die with this process: a forked child closes it at once, whichever
// thread opened it, and what the child inherits of this object does nothing. Opened 0600.
class PrivateFd {
 public:
  PrivateFd() = default;
  PrivateFd(const std::string& path, int flags);  // not open where open() fails: see errno
  PrivateFd(PrivateFd&& other) noexcept;
  PrivateFd& operator=(PrivateFd&& other) noexcept;
  ~PrivateFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  u32 generation_ = 0;
};

u64 monotonic_ns();
u64 realtime_ns();
u64 random_word();
void boot_id(u8 out[16]);                        // zeros where the kernel does not tell
std::string read_text(const std::string& path);  // "" where it can not be read
void sleep_ns(u64 ns);

// Futex of the low half of a lock word: shared between processes, always with a time-out.
void futex_wait(u32* word, u32 expected, u64 timeout_ns);
void futex_wake_one(u32* word);

// Open-file-description locks. They live as long as any descriptor *or mapping* made from the
// description, die with the process, and work across PID namespaces.
bool ofd_lock(int fd, u64 start, u64 length);
void ofd_unlock(int fd, u64 start, u64 length);
// Whether another description holds a lock in the range (length 0: to the end). Only a call that
// succeeds and says unlocked is death: every error answers true.
bool ofd_held(int fd, u64 start, u64 length);

// Asks who holds what of one file. Foreign code may close our descriptor and open another file
// under its number: then every answer is "held".
class Witness {
 public:
  explicit Witness(int fd);
  bool gone(u64 start, u64 length) const;  // nobody holds a lock in the range

 private:
  int fd_;
  u64 device_ = 0;
  u64 inode_ = 0;
};

inline u32* low_half(u64* word) {
  return reinterpret_cast<u32*>(word);  // little-endian: the half with the waiters bit
}

}  // namespace hostcache
