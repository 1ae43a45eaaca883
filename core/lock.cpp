#include "lock.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>

namespace hostcache {

namespace {

constexpr int kSpins = 100;          // about 2.7 us: longer than most sections
constexpr u64 kSleepNs = 1'000'000;  // a time-out always: the holder may die without a wake
constexpr u64 kStarvedAfterNs = 500'000;
constexpr u64 kStarvedFreshNs = 3'000'000;
constexpr u64 kNapNs = 100'000;

static_assert(sizeof(pthread_mutex_t) <= sizeof(Slot::mutex));

pthread_mutex_t* mutex_of(const Segment& s, const Identity& me) {
  return reinterpret_cast<pthread_mutex_t*>(s.slot(me.slot).mutex);
}

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Time namespaces shift the monotonic clock: a stamp from the future is not fresh.
bool somebody_starves(const Control& c) {
  const u64 stamp = load(c.starved);
  const u64 now = monotonic_ns();
  return stamp != 0 && now >= stamp && now - stamp < kStarvedFreshNs;
}

int lock_mutex(pthread_mutex_t* mutex, u64 deadline_ns) {
  const int rc = pthread_mutex_trylock(mutex);
  if (rc != EBUSY || deadline_ns == 0) return rc;
  const timespec until{static_cast<time_t>(deadline_ns / 1'000'000'000ULL),
                       static_cast<long>(deadline_ns % 1'000'000'000ULL)};
  return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
}

}  // namespace

// Other sessions read the futex word of this mutex and never lock it, so equal thread numbers in
// two PID namespaces do no harm. Where the word lies is glibc's business: we look for our number.
void TableLock::init_mutex(Slot& slot) {
  auto* mutex = reinterpret_cast<pthread_mutex_t*>(slot.mutex);
  std::memset(slot.mutex, 0, sizeof slot.mutex);
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  pthread_mutex_lock(mutex);
  const auto self = static_cast<u32>(syscall(SYS_gettid));
  u32 found = kNone;
  for (u32 at = 0; at + 4 <= sizeof(pthread_mutex_t) && found == kNone; at += 4) {
    u32 word = 0;
    std::memcpy(&word, slot.mutex + at, 4);
    if ((word & FUTEX_TID_MASK) == self) found = at;
  }
  pthread_mutex_unlock(mutex);
  put(slot.mutex_word, found);
}

bool TableLock::holder_dead(u64 id) const {
  if (id == lost_id_) return true;
  for (u32 i = 0; i < s_.geometry().slot_count; ++i) {
    const Slot& slot = s_.slot(i);
    if (load(slot.id) != id) continue;
    const u32 at = load(slot.mutex_word);
    if (at > sizeof(Slot::mutex) - 4 || at % 4 != 0) break;
    const u32 word = load(*reinterpret_cast<const u32*>(slot.mutex + at));
    // The id again: the slot may have gone to another session, whose mutex this then was.
    if ((word & FUTEX_OWNER_DIED) != 0 && load(slot.id) == id) return true;
    break;
  }
  return session_dead(id);
}

// From exactly the word that was seen: any number of waiters may try at once, and one wins.
bool TableLock::take_over(const Identity& me, u64 word, u64 waiters) {
  Control& c = s_.control();
  if (!holder_dead(word >> 1)) return false;
  if (!swap_if(c.lock, word, me.id << 1 | waiters | (word & 1))) return false;
  if (!roll_back(s_)) put(c.damaged, u64{1});
  add(c.counters[static_cast<u32>(Counter::repairs)], u64{1});
  return true;
}

bool TableLock::take_word(const Identity& me, u64 deadline_ns) {
  Control& c = s_.control();
  const u64 mine = me.id << 1;
  const u64 began = deadline_ns == 0 ? 0 : monotonic_ns();
  // The same holder in the same transaction as when we gave up: it has not moved, so we do not
  // wait for it again.
  const bool known_busy =
      busy_word_ != 0 && (load(c.lock) & ~u64{1}) == busy_word_ && load(c.txn) == busy_txn_;
  if (!somebody_starves(c) || deadline_ns == 0)
    for (int i = 0; i < (deadline_ns == 0 ? 1 : kSpins); ++i, pause_cpu())
      if (load(c.lock) == 0 && swap_if(c.lock, u64{0}, mine)) return true;
  u64 waiters = 0;  // whoever slept keeps the bit: others may sleep behind it
  for (;;) {
    const u64 word = load(c.lock);
    const u64 now = monotonic_ns();
    const bool starved = began != 0 && now - began > kStarvedAfterNs;
    if (word == 0) {
      if (!starved && somebody_starves(c) && deadline_ns > now)
        sleep_ns(kNapNs);
      else if (swap_if(c.lock, u64{0}, mine | waiters))
        return true;
      if (deadline_ns == 0) return false;
      continue;
    }
    if ((waiters != 0 || deadline_ns == 0 || known_busy) && take_over(me, word, waiters))
      return true;
    if (deadline_ns == 0 || known_busy || now >= deadline_ns) {
      if (deadline_ns != 0) {
        busy_word_ = word & ~u64{1};
        busy_txn_ = load(c.txn);
      }
      return false;
    }
    if (starved) put(c.starved, now);
    if ((word & 1) == 0 && !swap_if(c.lock, word, word | 1)) continue;
    futex_wait(low_half(&c.lock), static_cast<u32>(word | 1), starved ? kSleepNs / 2 : kSleepNs);
    waiters = 1;
  }
}

Acquired TableLock::acquire(const Identity& me, u64 deadline_ns) {
  if (me.slot == kNone) return take_word(me, deadline_ns) ? Acquired::yes : Acquired::busy;
  pthread_mutex_t* mutex = mutex_of(s_, me);
  const int rc = lock_mutex(mutex, deadline_ns);
  if (rc == EOWNERDEAD || rc == ENOTRECOVERABLE) {
    // Getting it took the kernel's mark away, so others can not see this death any more: we, under
    // a new id, take the word over. The mutex is never made consistent: nobody gets it again.
    lost_id_ = me.id;
    if (rc == EOWNERDEAD) pthread_mutex_unlock(mutex);
    return Acquired::owner_died;
  }
  if (rc != 0) return Acquired::busy;
  if (take_word(me, deadline_ns)) {
    busy_word_ = 0;
    return Acquired::yes;
  }
  pthread_mutex_unlock(mutex);
  return Acquired::busy;
}

void TableLock::release(const Identity& me) {
  Control& c = s_.control();
  const u64 word = swap_out(c.lock, u64{0});
  if (me.slot != kNone) pthread_mutex_unlock(mutex_of(s_, me));
  if ((word & 1) != 0) futex_wake_one(low_half(&c.lock));
}

namespace {

template <class T>
void restore(u8* place, u64 old) {
  put(*reinterpret_cast<T*>(place), static_cast<T>(old));
}

bool undo(const Segment& s, const LogRecord& record) {
  const u64 at = record.place >> 4;
  const u64 width = record.place & 15;
  if (record.txn != s.control().txn || (width != 1 && width != 2 && width != 4 && width != 8) ||
      at % width != 0 || at < kControlAt || at + width > s.geometry().pages_at)
    return false;
  u8* place = s.base() + at;
  if (width == 8) restore<u64>(place, record.old);
  if (width == 4) restore<u32>(place, record.old);
  if (width == 2) restore<u16>(place, record.old);
  if (width == 1) restore<u8>(place, record.old);
  return true;
}

}  // namespace

bool roll_back(const Segment& s) {
  Control& c = s.control();
  u64 count = load(c.log_count);
  bool whole = count <= s.geometry().log_capacity;
  if (!whole) count = s.geometry().log_capacity;
  while (count > 0) whole = undo(s, s.log(--count)) && whole;
  put(c.log_count, u64{0});
  return whole;
}

Txn::Txn(const Segment& segment) : s_(segment), exceptions_(std::uncaught_exceptions()) { begin(); }

Txn::~Txn() {
  if (std::uncaught_exceptions() == exceptions_)
    close();
  else if (open_)
    roll_back(s_);
}

void Txn::begin() {
  Control& c = s_.control();
  txn_ = c.txn + 1;
  put(c.txn, txn_);
  count_ = 0;
  ring_old = c.ring_old;
  ring_young = c.ring_young;
  free_count = free_before_ = c.free_count;
  chunk_free = chunk_before_ = c.chunk_free_count;
  reserved = c.reserved_count;
  holds = c.holds_used;
  open_ = true;
}

void Txn::close() {
  if (!open_) return;
  Control& c = s_.control();
  const std::pair<u64*, u64> words[] = {
      {&c.ring_old, ring_old},           {&c.ring_young, ring_young},   {&c.free_count, free_count},
      {&c.chunk_free_count, chunk_free}, {&c.reserved_count, reserved}, {&c.holds_used, holds}};
  for (const auto& [word, value] : words)
    if (*word != value) store(*word, value);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  put(c.log_count, u64{0});
  open_ = false;
}

}  // namespace hostcache
