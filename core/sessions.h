// Who is attached: session ids, liveness, the calls that wait for the lock, the sweep of the dead.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "errors.h"
#include "holds.h"
#include "index.h"
#include "lock.h"
#include "maker.h"
#include "order.h"
#include "segment.h"

namespace hostcache {

// A finish or end that is made in order: at once, or by the session's next call or timer.
struct Op {
  enum class Kind { finish, keep, spoil, end, after_keep };
  Kind kind = Kind::end;
  u64 number = 0;
  u32 part = 0;
  u64 session = 0;
  bool ok = false;
  u32 count = 0;
  std::shared_ptr<Op> of;  // after_keep: the commit whose views are gone
  std::atomic<bool> done = false;
  Finished result;
};

class Session {
 public:
  // Rule: attach lock; ask whether anybody lives; take an id; lock the liveness byte; look
  // whether the name still leads here; verify if nobody lived; only then be seen in a slot.
  // Throws damaged, no_room (no slot); Moved where the name leads elsewhere now.
  Session(std::shared_ptr<MappedSegment> map, const AttachLock& lock);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  struct Moved {};

  // The table lock for one piece of work, after what was left over from earlier calls.
  class Guard {
   public:
    enum class Patience { take, wait, try_once, leave };  // take: for a new hold
    Guard(Session& session, Patience patience);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    explicit operator bool() const { return held_; }

   private:
    void enter(u64 deadline);

    Session& session_;
    const Identity* me_ = nullptr;
    bool held_ = false;
  };

  // Queues and makes it as soon as the lock can be had; false where that is later.
  bool submit(const std::shared_ptr<Op>& op, Guard::Patience patience);
  bool drain(Guard::Patience patience) { return static_cast<bool>(Guard(*this, patience)); }
  bool has_pending();

  // Takes back what dead sessions held, in steps, letting the lock go between them.
  u32 sweep();
  void finish_orphans();
  void drop_stale();  // one bounded step of giving back what a clear left

  // Joins, and if needed makes, the record of a namespace. Throws no_room, busy.
  void join_namespace(const u8 digest[32], const std::string& label);
  void set_max_reserved(u64 pages);

  // Ends the session: gives back what it holds, or, where the lock can not be had, leaves that
  // to whoever sweeps it. Twice is fine.
  void leave();
  bool left() const { return left_; }
  // Until no thread of ours is at or under the table lock; false after the bound.
  bool quiet() const;

  bool ours() const { return generation_ == fork_generation(); }
  u64 id() const { return identities_.back()->id; }
  u32 ns() const { return ns_; }
  u32 current_epoch() const { return s_.epoch_of(ns_); }
  const MappedSegment& map() const { return *map_; }
  const std::shared_ptr<MappedSegment>& map_ptr() const { return map_; }
  const Segment& segment() const { return s_; }
  const Index& index() const { return index_; }
  const Order& order() const { return order_; }
  const Holds& holds() const { return holds_; }
  void count(Counter counter, u64 by = 1) const {
    add(s_.control().counters[static_cast<u32>(counter)], by);
  }

  std::mutex handles_mutex;
  std::vector<std::weak_ptr<class Handle>> handles;
  size_t handles_limit = 64;  // from which on the expired ones are taken out
  std::atomic<bool> closing{false};
  std::atomic<int> inside{0};  // threads at or under the table lock

 private:
  void take_identity();
  Error no_slot() const;
  void verify_alone(const Identity& me) const;
  bool take_slot(Identity& me) const;
  void let_go(Identity& me, bool swept) const;
  bool give_back(const Identity& me);
  bool renew();
  void make(Op& op);
  void make_pending();
  void finish_kept(Txn& txn, const Op& op);
  void name_namespace(const Identity& me);
  bool sweep_one(u32 slot, u64 id);
  bool claim_namespace(const u8 digest[32], const std::string& label);

  std::shared_ptr<MappedSegment> map_;
  const Segment& s_;
  Index index_;
  Order order_;
  Holds holds_;
  TableLock lock_;
  u32 generation_;
  u32 ns_ = 0;
  u64 max_reserved_ = 0;
  // The last one is used for new calls; an earlier one lost a thread inside the lock and stays
  // until its holds have ended.
  std::vector<std::unique_ptr<Identity>> identities_;
  std::recursive_mutex identities_mutex_;  // a renewal sweeps, and so takes the lock
  std::atomic<bool> left_{false};
  std::mutex pending_mutex_;
  std::deque<std::shared_ptr<Op>> pending_;
};

}  // namespace hostcache
