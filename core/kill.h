// Kill points: places where a test build can kill its own process, to prove what is found after.
//
// Every store that another process could see goes through put, add, swap_if or Txn::store, which
// take their caller's place as a default argument; system calls that change what others see have a
// KILL_POINT of their own. In the normal build all of this is an empty argument.
#pragma once

#ifdef HOSTCACHE_KILL_POINTS
#include <source_location>
#include <string>
#include <vector>

namespace hostcache {
using Where = std::source_location;
void kill_point(const Where& where);
// Of the calling thread, from now on: die at the n-th kill point (0: count only).
void kill_at(long n);
// "core/holds.cpp:12" for each kill point that the thread has passed since.
std::vector<std::string> kill_points_passed();
}  // namespace hostcache
#define KILL_POINT() ::hostcache::kill_point(::hostcache::Where::current())
#else
namespace hostcache {
struct Where {
  static constexpr Where current() { return {}; }
};
inline void kill_point(Where) {}
}  // namespace hostcache
#define KILL_POINT() static_cast<void>(0)
#endif
