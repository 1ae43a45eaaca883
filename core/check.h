// Every invariant of a table, read-only. Runs on a private copy while sessions live, on the
// mapping where none does.
#pragma once

#include <string>
#include <vector>

#include "segment.h"

namespace hostcache {

// Findings in words, at most 100; empty: all is well. Links and counts that lead nowhere are
// findings, never followed.
std::vector<std::string> check_table(const Segment& segment);

struct Stats {
  u64 page_count = 0, free = 0, reserved = 0, ready = 0, pinned = 0, evictable = 0, sessions = 0;
  u64 counters[static_cast<u32>(Counter::count)] = {};
};

// Plain reads: exact on a copy, or while nothing runs. pinned takes a scan of all entries.
Stats count_stats(const Segment& segment, bool count_pinned);

struct NamespaceInfo {
  u32 number = 0;
  std::string digest;
  std::string label;
  u32 epoch = 0;
  u64 ready_pages = 0;  // that a lookup can find
};
std::vector<NamespaceInfo> list_namespaces(const Segment& segment);

struct SlotInfo {
  u64 session = 0;
  u32 pid = 0;
  std::string command;
  double opened_s = 0;
  u32 ns = 0;
  bool alive = false;
  u64 holds = 0;
  u64 reserved_pages = 0;
  double oldest_hold_s = 0;
};
std::vector<SlotInfo> list_sessions(const Segment& segment, const Witness& witness);

}  // namespace hostcache
