// The table lock, which survives its holder's death, and the undo log behind it.
//
// Word: id << 1 | waiters, 0 when free. Two signs tell a dead holder: the session's own robust
// mutex, whose futex word the kernel marks when the thread inside dies (1 ms, whatever the
// memory), and the liveness byte, which goes when the process is torn down. Either frees the
// lock; holds wait for the byte alone. Lock order: session mutex, then table lock, nothing else.
#pragma once

#include <memory>

#include "segment.h"
#include "sys.h"

namespace hostcache {

constexpr u64 kLockBoundNs = 20'000'000;  // the longest that a call waits for the table

// One session id: its slot, its mutex there, its liveness byte.
struct Identity {
  u64 id = 0;
  u32 slot = kNone;           // none while it attaches: then the byte alone tells its death
  PrivateFd live;             // holds the lock on the liveness byte
  void* live_page = nullptr;  // a mapping holds it too: foreign code may close descriptors
};

enum class Acquired { yes, busy, owner_died };

class TableLock {
 public:
  TableLock(const Segment& segment, const Witness& witness) : s_(segment), witness_(witness) {}

  // Waits until `deadline_ns` (CLOCK_MONOTONIC); 0 tries once. After a busy answer the same
  // holder is not waited for again. owner_died: a thread of this session died inside; its id is
  // never used again.
  Acquired acquire(const Identity& me, u64 deadline_ns);
  void release(const Identity& me);

  // Whether the holder of the word is gone: by its robust word, or by its liveness byte.
  bool holder_dead(u64 id) const;
  bool session_dead(u64 id) const { return witness_.gone(kLivenessBase + id, 1); }

  static void init_mutex(Slot& slot);

 private:
  bool take_word(const Identity& me, u64 deadline_ns);
  bool take_over(const Identity& me, u64 word, u64 waiters);

  const Segment& s_;
  const Witness& witness_;
  std::atomic<u64> busy_word_{0};
  std::atomic<u64> busy_txn_{0};
  std::atomic<u64> lost_id_{0};  // of ours, whose thread died inside
};

// Undoes what an open log lists, newest first, and closes it. False where a record can not be
// followed: that is damage. Repeating it is harmless, so a death inside repeats it.
bool roll_back(const Segment& segment);

// One transaction: every store to a logged word goes through it. Death before close() undoes all
// of it, after it nothing. Cursors and counts are kept here and stored, logged, by close().
class Txn {
 public:
  explicit Txn(const Segment& segment);
  ~Txn();  // closes; where an exception passes (no memory), undoes
  Txn(const Txn&) = delete;
  Txn& operator=(const Txn&) = delete;

  template <class T>
  void store(T& word, T value, Where where = Where::current()) {
    static_assert(sizeof(T) <= 8);
    if (!s_.contains(&word)) return;  // a sink: see Segment::entry
    LogRecord& record = s_.log(count_);
    record.place = static_cast<u64>(reinterpret_cast<u8*>(&word) - s_.base()) << 4 | sizeof(T);
    record.old = static_cast<u64>(word);
    record.txn = txn_;
    // Death needs order between stores of one thread only; the compiler is the one to hold back.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    put(s_.control().log_count, ++count_, where);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    put(word, value, where);
  }
  bool room(u64 records) const { return count_ + records + kCursors <= s_.geometry().log_capacity; }
  void close();  // the transaction is made; what follows is the next one
  void next() {
    close();
    begin();
  }

  u64 ring_old = 0, ring_young = 0, free_count = 0, chunk_free = 0, reserved = 0, holds = 0;

  void push_free(u32 page) {
    push(s_.free_stack(free_count), page, free_count < free_before_);
    free_count++;
  }
  u32 pop_free() { return s_.free_stack(--free_count); }
  void push_chunk(u32 chunk) {
    push(s_.chunk_stack(chunk_free), chunk, chunk_free < chunk_before_);
    chunk_free++;
  }
  u32 pop_chunk() { return s_.chunk_stack(--chunk_free); }
  void push_young(u32 page) { put(s_.ring(ring_young++), page); }
  void push_old(u32 page) {
    --ring_old;
    push(s_.ring(ring_old), page, true);
  }

 private:
  static constexpr u64 kCursors = 8;
  void begin();
  // What lies beyond a cursor is dead memory; below it, a slot that this transaction popped.
  void push(u32& slot, u32 value, bool live) {
    if (live)
      store(slot, value);
    else
      put(slot, value);
  }

  const Segment& s_;
  u64 txn_ = 0;
  u64 count_ = 0;
  u64 free_before_ = 0;
  u64 chunk_before_ = 0;
  bool open_ = false;
  int exceptions_;
};

}  // namespace hostcache
