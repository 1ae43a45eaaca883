#include "maker.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "errors.h"
#include "room.h"

namespace hostcache {

namespace {
constexpr u64 kStallNs = 10'000'000'000ULL;
constexpr u64 kWaitStepNs = 2'000'000ULL;
constexpr u64 kMakeStep = u64{64} << 20;
constexpr u32 kTmpfsMagic = 0x0102'1994;
}  // namespace

// What the holder writes into the lock file. Nothing is decided by it but the patience of others.
struct AttachLock::Note {
  u64 ticks = 0;
  u64 done = 0;
  u64 total = 0;
  u32 pid = 0;
  char command[32] = {};
};

bool AttachLock::try_once(const std::string& name, const Progress& progress, Note& seen,
                          u64& since) {
  if (!fd_) {
    fd_ = PrivateFd(path_, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    // Never O_CREAT on what exists: in a sticky folder that fails even for root.
    if (!fd_ && errno == ENOENT) {
      fd_ = PrivateFd(path_, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW);
      made_ = static_cast<bool>(fd_);
      if (fd_ && fchmod(fd_.get(), 0600) != 0) throw os_error("fchmod " + path_, errno);
    }
    if (!fd_ && errno != EEXIST) throw os_error("open the lock file " + path_, errno);
    if (!fd_) return false;
    since = monotonic_ns();
  }
  KILL_POINT();
  if (ofd_lock(fd_.get(), 0, 1)) {
    KILL_POINT();
    struct stat named{};
    struct stat ours{};
    const bool leads_here = stat(path_.c_str(), &named) == 0 && fstat(fd_.get(), &ours) == 0 &&
                            named.st_ino == ours.st_ino && named.st_dev == ours.st_dev;
    if (leads_here) return true;
    made_ = false;
    fd_.reset();  // removed while we waited: start again with the file that has the name now
    return false;
  }
  Note now;
  if (pread(fd_.get(), &now, sizeof now, 0) == static_cast<ssize_t>(sizeof now) &&
      now.ticks != seen.ticks) {
    seen = now;
    since = monotonic_ns();
    if (progress && now.total != 0) progress(now.done, now.total);
  }
  if (monotonic_ns() - since > kStallNs) {
    seen.command[sizeof seen.command - 1] = 0;
    throw Error(Code::busy, "the attach lock of cache '" + name +
                                "' made no progress for 10 s; "
                                "its holder is process " +
                                std::to_string(seen.pid) + " (" + seen.command +
                                "): resume or end it");
  }
  return false;
}

AttachLock::AttachLock(const std::string& root, const std::string& name, const Progress& progress)
    : path_(root + "/." + name + ".lock") {
  Note seen;
  u64 since = monotonic_ns();
  while (!try_once(name, progress, seen, since)) sleep_ns(kWaitStepNs);
  tick(0, 0);
}

AttachLock::~AttachLock() {
  if (made_) remove_file();
}  // closing the descriptor lets go

void AttachLock::tick(u64 done, u64 total) {
  Note note;
  // Starts from the clock, so that two holders in a row are two different counts.
  ticks_ = ticks_ == 0 ? monotonic_ns() : ticks_ + 1;
  note.ticks = ticks_;
  note.done = done;
  note.total = total;
  note.pid = static_cast<u32>(getpid());
  const std::string command = read_text("/proc/self/comm");
  std::strncpy(note.command, command.substr(0, command.find('\n')).c_str(),
               sizeof note.command - 1);
  KILL_POINT();
  if (pwrite(fd_.get(), &note, sizeof note, 0) < 0) return;  // a full tmpfs: others see a stall
}

void AttachLock::remove_file() {
  KILL_POINT();
  unlink(path_.c_str());
  made_ = false;
}

Fd open_root(const std::string& root, bool any_filesystem) {
  Fd fd(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw os_error("open the root folder " + root, errno);
  struct statfs fs{};
  if (fstatfs(fd.get(), &fs) != 0) throw os_error("statfs " + root, errno);
  if (!any_filesystem && static_cast<u32>(fs.f_type) != kTmpfsMagic) {
    char type[16];
    std::snprintf(type, sizeof type, "0x%x", static_cast<unsigned>(fs.f_type));
    throw Error(Code::unsupported, "the root " + root + " is a file system of type " + type +
                                       ", a cache needs tmpfs (0x1021994): a disk file would "
                                       "survive a power cut half written; name a folder under "
                                       "/dev/shm or another tmpfs by root= or HOSTCACHE_ROOT");
  }
  return fd;
}

namespace {

// Real memory, never sparse: on a full tmpfs the first store to a hole is SIGBUS, inside the lock.
void reserve_memory(int fd, int root_fd, const std::string& root, const std::string& name, u64 size,
                    AttachLock& lock, const Progress& progress) {
  for (u64 at = 0; at < size;) {
    const u64 step = size - at < kMakeStep ? size - at : kMakeStep;
    require_room(root_fd, root, name, at == 0 ? size : step, size);
    KILL_POINT();
    int rc = 0;
    do {
      rc = fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(step));
    } while (rc != 0 && errno == EINTR);
    if (rc != 0 && (errno == ENOSPC || errno == ENOMEM))
      throw Error(Code::no_room, "cache '" + name + "' needs " + bytes_text(size) + " in " + root +
                                     ", the kernel gave " + bytes_text(at) + " (" +
                                     std::strerror(errno) +
                                     "); free memory or ask for a smaller capacity");
    if (rc != 0) throw os_error("fallocate " + bytes_text(size) + " in " + root, errno);
    at += step;
    lock.tick(at, size);
    if (progress) progress(at, size);
  }
}

}  // namespace

void format_segment(const Segment& s, const Shape& shape, u64 replaced) {
  const Geometry& g = s.geometry();
  Header& h = s.header();
  h.prefix = {kMagic, kFormat, kKindPages, random_word(), g.size, {}};
  boot_id(h.prefix.boot_id);
  h.geometry = g;
  auto* fragments = reinterpret_cast<u64*>(s.base() + kFragmentsAt);
  std::memcpy(fragments, shape.fragments.data(), shape.fragments.size() * sizeof(u64));
  h.check = header_check(h, fragments);
  Control& c = s.control();
  c.epoch = Guarded::make(0);
  c.next_id = 1;
  c.next_id_check = ~u64{1};
  c.hold_counter_check = ~u64{0};
  c.replaced = replaced;
  c.free_count = g.page_count;
  c.chunk_free_count = g.chunk_count;
  for (u32 i = 0; i < g.slot_count; ++i) s.slot(i).mutex_word = kNone;
  for (u32 i = 0; i < g.namespace_count; ++i) s.ns(i).epoch = Guarded::make(0);
  s.ns(0).used = 1;
  for (u32 i = 0; i < g.page_count; ++i) {
    s.entry(i).parent = kNone;
    s.free_stack(i) = g.page_count - 1 - i;  // page 0 is given out first
  }
  for (u32 i = 0; i < g.chunk_count; ++i) s.chunk_stack(i) = g.chunk_count - 1 - i;
}

void make_segment(int root_fd, const std::string& root, const std::string& name, const Shape& shape,
                  u64 replaced, AttachLock& lock, const Progress& progress) {
  const Geometry g = plan(shape);
  KILL_POINT();
  Fd fd(openat(root_fd, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!fd) throw os_error("make a file without a name in " + root, errno);
  KILL_POINT();
  if (fchmod(fd.get(), 0600) != 0) throw os_error("fchmod in " + root, errno);
  reserve_memory(fd.get(), root_fd, root, name, g.size, lock, progress);
  KILL_POINT();
  void* base = mmap(nullptr, g.pages_at, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (base == MAP_FAILED) throw os_error("mmap the table of '" + name + "'", errno);
  format_segment(Segment(static_cast<u8*>(base), g), shape, replaced);
  KILL_POINT();
  munmap(base, g.pages_at);
  KILL_POINT();
  const std::string self = "/proc/self/fd/" + std::to_string(fd.get());
  if (linkat(AT_FDCWD, self.c_str(), root_fd, name.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    if (errno == EEXIST)
      throw Error(Code::cache_exists, "'" + name + "' exists in " + root +
                                          "; open or attach to it, or run: hostcache rm " + name +
                                          in_root(root));
    throw os_error("link '" + name + "' into " + root, errno);
  }
  KILL_POINT();
}

}  // namespace hostcache
