// The attach lock of a name, and the making of a segment: all at once or not at all.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "segment.h"
#include "sys.h"

namespace hostcache {

using Progress = std::function<void(u64 done, u64 total)>;

// One process at a time makes, attaches to, verifies or removes a name. The lock dies with its
// holder. Who waits, waits as long as the holder makes progress: a counter in the lock file that
// stands still for 10 s is `busy`, and names the holder.
class AttachLock {
 public:
  AttachLock(const std::string& root, const std::string& name, const Progress& progress);
  AttachLock(const AttachLock&) = delete;
  AttachLock& operator=(const AttachLock&) = delete;
  ~AttachLock();

  void tick(u64 done, u64 total);  // tells those who wait
  // Takes the lock file away with the lock: nothing of that name is left.
  void remove_file();
  // The lock file stays. Without it one that we made goes with the lock, so that a call that
  // failed leaves nothing.
  void keep_file() { made_ = false; }

 private:
  struct Note;
  bool try_once(const std::string& name, const Progress& progress, Note& seen, u64& since);

  std::string path_;
  PrivateFd fd_;
  bool made_ = false;
  u64 ticks_ = 0;
};

// tmpfs, unless `any_filesystem` (tests). Returns a descriptor of the folder.
Fd open_root(const std::string& root, bool any_filesystem);

// Builds the segment without a name, in real memory, and links it. Throws cache_exists where the
// name is taken, no_room before the kernel would refuse or kill. A death at any step leaves
// nothing: the file has no name until it is whole.
void make_segment(int root_fd, const std::string& root, const std::string& name, const Shape& shape,
                  u64 replaced, AttachLock& lock, const Progress& progress);

// Writes an empty table into fresh, zeroed memory.
void format_segment(const Segment& segment, const Shape& shape, u64 replaced);

}  // namespace hostcache
