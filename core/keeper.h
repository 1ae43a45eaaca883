// The sessions of this process, and the one thread that makes for them what could not be made at
// once. The thread never takes the GIL, is joined at exit, and starts anew in a forked child.
#pragma once

#include <memory>

#include "sessions.h"

namespace hostcache {

class Keeper {
 public:
  static void add(const std::shared_ptr<Session>& session);  // starts the thread
  static void wake();                                        // something waits for the lock
  static void announce_end();                                // of the process: waits return at once
  static bool ending();
  static void shutdown();  // ends every session, joins the thread; add() starts it again
};

}  // namespace hostcache
