#include "room.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "errors.h"
#include "sys.h"

namespace hostcache {

namespace {

constexpr u64 kUnlimited = ~u64{0};
// What the process and its neighbours need while we fill: a segment never takes the last of it.
constexpr u64 kMargin = u64{64} << 20;

u64 number_after(const std::string& text, const std::string& word, u64 otherwise) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.compare(0, word.size(), word) != 0) continue;
    std::istringstream rest(line.substr(word.size()));
    u64 value = 0;
    if (rest >> value) return value;
  }
  return otherwise;
}

u64 number_in(const std::string& path, u64 otherwise) {
  std::istringstream text(read_text(path));
  u64 value = 0;
  return text >> value ? value : otherwise;  // "max" is no number: no limit
}

void take_least(Room& room, u64 available, const std::string& limit, const std::string& remedy) {
  if (available >= room.available) return;
  room = {available, limit, remedy};
}

struct CgroupFiles {
  const char* controller;  // as /proc/self/cgroup names it
  std::vector<std::string> mounts;
  const char* limit;
  const char* usage;
  const char* reclaimable[2];
};

// Memory that the kernel would give back before it kills: file pages on its lists. Shared memory
// is not among them.
void ask_group(Room& room, const std::string& folder, const CgroupFiles& files) {
  const u64 limit = number_in(folder + "/" + files.limit, kUnlimited);
  if (limit >= kUnlimited / 2) return;
  const u64 usage = number_in(folder + "/" + files.usage, 0);
  const std::string stat = read_text(folder + "/memory.stat");
  u64 reclaimable = 0;
  for (const char* field : files.reclaimable) reclaimable += number_after(stat, field, 0);
  const u64 used = usage > reclaimable ? usage - reclaimable : 0;
  const u64 left = limit > used ? limit - used : 0;
  take_least(room, left > kMargin ? left - kMargin : 0,
             "the memory cgroup " + folder + " (limit " + bytes_text(limit) + ")",
             "raise the container's memory limit or ask for a smaller capacity");
}

// The group of this process and every one above it: any of them may be the tightest.
void ask_groups(Room& room, const CgroupFiles& files) {
  std::istringstream lines(read_text("/proc/self/cgroup"));
  std::string line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (line.substr(first + 1, second - first - 1) != files.controller) continue;
    std::string path = line.substr(second + 1);
    for (;;) {
      for (const std::string& mount : files.mounts)
        ask_group(room, path == "/" ? mount : mount + path, files);
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/') == 0 ? 1 : path.rfind('/'));
    }
  }
}

}  // namespace

Room room_at(int fs_fd, const std::string& root) {
  Room room{kUnlimited, "nothing", ""};
  struct statvfs fs{};
  if (fstatvfs(fs_fd, &fs) == 0 && fs.f_blocks != 0)
    take_least(room, u64{fs.f_bavail} * fs.f_frsize,
               "the file system of " + root + " (" + bytes_text(u64{fs.f_blocks} * fs.f_frsize) +
                   " in all)",
               "enlarge it (mount -o remount,size=..., docker --shm-size), name another tmpfs by "
               "root= or HOSTCACHE_ROOT, or ask for a smaller capacity");
  const u64 memory = number_after(read_text("/proc/meminfo"), "MemAvailable:", kUnlimited / 1024);
  if (memory != kUnlimited / 1024)
    take_least(room, memory * 1024 > kMargin ? memory * 1024 - kMargin : 0,
               "the machine's memory (MemAvailable)", "free memory or ask for a smaller capacity");
  ask_groups(room, {"memory",
                    {"/sys/fs/cgroup/memory"},
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    {"total_inactive_file ", "total_active_file "}});
  ask_groups(room, {"",
                    {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"},
                    "memory.max",
                    "memory.current",
                    {"inactive_file ", "active_file "}});
  return room;
}

void require_room(int fs_fd, const std::string& root, const std::string& name, u64 bytes,
                  u64 total) {
  const Room room = room_at(fs_fd, root);
  if (bytes <= room.available) return;
  throw Error(Code::no_room, "cache '" + name + "' needs " + bytes_text(bytes) +
                                 (bytes == total ? "" : " more of its " + bytes_text(total)) +
                                 ", " + bytes_text(room.available) + " are left by " + room.limit +
                                 "; " + room.remedy);
}

}  // namespace hostcache
