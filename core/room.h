// Is there memory for a segment? Beyond a cgroup's limit the kernel kills the process that
// touches tmpfs instead of refusing it, so this is asked before each step.
#pragma once

#include <string>

#include "layout.h"

namespace hostcache {

struct Room {
  u64 available = 0;  // bytes, the least of all that limit us
  std::string limit;  // what limits: the file system, the machine's memory, a cgroup
  std::string remedy;
};

// `fs_fd` is an open descriptor in the root.
Room room_at(int fs_fd, const std::string& root);

// Throws no_room, with both numbers and the remedy, where `bytes` more do not fit.
void require_room(int fs_fd, const std::string& root, const std::string& name, u64 bytes,
                  u64 total);

}  // namespace hostcache
