#include "keeper.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "handle.h"

namespace hostcache {

namespace {

using std::chrono::milliseconds;
constexpr milliseconds kPendingTick{20};
constexpr milliseconds kIdleTick{500};
constexpr int kTicksPerSweep = 4;  // of idle ones: a death outside the lock is noticed by nobody

std::atomic<bool> end_announced{false};

// Never destroyed: finalisers may come after static destruction. A forked child starts with a
// fresh one, since the parent's thread and whatever it held are not there.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<Session>> sessions;
  std::thread thread;
  bool stop = false;
  bool urgent = false;
};
State* state = nullptr;

std::vector<std::shared_ptr<Session>> living_sessions() {
  std::vector<std::shared_ptr<Session>> out;
  for (const auto& weak : state->sessions)
    if (auto session = weak.lock()) out.push_back(std::move(session));
  return out;
}

void look_after(Session& session, bool sweep) {
  if (session.left()) return;
  if (session.has_pending()) session.drain(Session::Guard::Patience::wait);
  session.drop_stale();
  if (sweep) {
    session.sweep();
    session.finish_orphans();
  }
  finish_closing(session);
}

void run(State* mine) {
  int ticks = 0;
  std::unique_lock<std::mutex> lock(mine->mutex);
  while (!mine->stop) {
    bool pending = mine->urgent;
    mine->changed.wait_for(lock, pending ? kPendingTick : kIdleTick,
                           [&] { return mine->stop || (mine->urgent && !pending); });
    if (mine->stop) return;
    mine->urgent = false;
    auto sessions = living_sessions();
    lock.unlock();
    const bool sweep = !pending && ++ticks % kTicksPerSweep == 0;
    bool more = false;
    for (const auto& session : sessions) {
      try {
        look_after(*session, sweep);
      } catch (const std::exception&) {
        continue;  // no memory now: the next tick tries again, the engine goes on
      }
      more = more || session->has_pending();
    }
    sessions.clear();  // may end a session: outside the mutex
    lock.lock();
    mine->urgent = mine->urgent || more;
  }
}

void before_fork() { state->mutex.lock(); }
void after_fork_in_parent() { state->mutex.unlock(); }
void after_fork_in_child() {
  state = new State;  // the old one is left behind, locked, with a thread that is not here
}

void start_thread() {
  // The thread must not be the one to get the engine's signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    state->thread = std::thread(run, state);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void prepare() {
  static const bool once = [] {
    state = new State;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return true;
  }();
  (void)once;
}

}  // namespace

void Keeper::add(const std::shared_ptr<Session>& session) {
  prepare();
  const std::lock_guard<std::mutex> one(state->mutex);
  std::erase_if(state->sessions, [](const auto& weak) { return weak.expired(); });
  state->sessions.push_back(session);
  if (!state->thread.joinable()) {
    state->stop = false;
    start_thread();
  }
}

void Keeper::announce_end() { end_announced = true; }
bool Keeper::ending() { return end_announced; }

void Keeper::wake() {
  prepare();
  const std::lock_guard<std::mutex> one(state->mutex);
  state->urgent = true;
  state->changed.notify_one();
}

void Keeper::shutdown() {
  prepare();
  std::thread thread;
  std::vector<std::shared_ptr<Session>> sessions;
  {
    const std::lock_guard<std::mutex> one(state->mutex);
    state->stop = true;
    state->changed.notify_one();
    thread.swap(state->thread);
    sessions = living_sessions();
  }
  if (thread.joinable()) thread.join();
  for (const auto& session : sessions) close_session(*session);
}

}  // namespace hostcache
