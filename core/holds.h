// Hold records: who may read, write, publish and give back a page.
//
// All of it runs under the table lock. A function that takes a Txn by reference may close it and
// go on in the next one; what is found in between is said beside it.
#pragma once

#include <span>
#include <vector>

#include "index.h"
#include "lock.h"
#include "order.h"
#include "segment.h"

namespace hostcache {

struct HoldRequest {
  HoldKind kind = HoldKind::read;
  u64 taker = 0;
  u32 parts = 0;  // 0: one part, claimed by the taker itself
  u32 ns = 0;
  u32 epoch = 0;
  u64 pages_check = 0;
};

struct Finished {
  bool accepted = false;  // false: not this session's claim; nothing was changed
  u32 published = 0;
  u64 kept = 0;        // number of the read hold that a commit with live views became; 0: none
  bool whole = false;  // the record is gone, or waits for other parts; false: still claimed
};

u64 check_pages(std::span<const u32> pages);

class Holds {
 public:
  Holds(const Segment& segment, const Index& index, const Order& order)
      : s_(segment), index_(index), order_(order) {}

  // A free record with room for its lists, and the number that it will have; 0: none left.
  u64 draw_number(const Txn& txn, u64 listed, u32 parts) const;
  // Writes the record behind its number and publishes it by storing the number.
  void publish_record(Txn& txn, u64 number, const HoldRequest& request,
                      std::span<const u32> listed) const;

  Hold* find(u64 number) const;
  std::vector<u32> listed(const Hold& hold) const;
  // A reservation that others wait for: not ended, and younger than the bound (a stamp from the
  // future counts as old: to move a key is safe at any time, only wasteful).
  bool worth_waiting(u64 number, u64 now_ns, u64 bound_ns) const;

  bool claim(Txn& txn, u64 number, HoldKind kind, u32 parts, u64 pages_check, u32 part,
             u64 session) const;
  // The last part to finish publishes the first `count` pages, unless one failed.
  Finished finish(Txn& txn, u64 number, u32 part, u64 session, bool ok, u32 count) const;
  // The same for a hold with one part whose views live on: what is published is pinned by a new
  // read hold in that transaction, what is not stays claimed. Not accepted where there is no
  // record for it.
  Finished finish_and_keep(Txn& txn, u64 number, u64 session, u32 count) const;
  // A claimed part will not be written: the keys leave now, the pages stay until it finishes.
  void spoil(Txn& txn, u64 number, u32 part, u64 session) const;
  // Nothing is published any more, open parts close; claimed ones finish by themselves.
  void end(Txn& txn, u64 number) const;

  // One bounded piece of taking back what a dead session held; true when nothing is left.
  // session 0: only what a death left half given back, whoever took it.
  bool sweep_step(Txn& txn, u64 session) const;
  // Where no session lives: every hold goes, whoever took it.
  void drop_all(Txn& txn) const;

  void pin(Txn& txn, u32 page) const;
  bool can_pin(u32 page, u64 times) const {
    return Use::pins(s_.entry(page).use) + times <= Use::kMaxPins;
  }
  u64 reserved_by(u64 session) const;
  void set_heir(Txn& txn, u64 of, u32 after, u64 heir, u32 heir_page) const;

 private:
  u64 claimer(const Hold& hold, u32 part) const;
  u64* claimer_word(const Hold& hold, u32 part) const;
  void take_keys(Txn& txn, const Hold& hold) const;
  u32 publish(Txn& txn, Hold& hold, std::span<const u32> pages, u32 count,
              std::vector<u32>* pinned) const;
  void link_heir(Txn& txn, const Hold& hold, u32 page) const;
  u32 settle(Txn& txn, Hold& hold, u32 count) const;
  u64 keep_as_lease(Txn& txn, const Hold& hold, std::span<const u32> pinned) const;
  Hold* claimed_by(u64 number, u32 part, u64 session) const;
  bool give_back_step(Txn& txn, Hold& hold) const;
  void free_record(Txn& txn, Hold& hold) const;
  void free_chunks(Txn& txn, u32 first) const;
  bool sweep_record(Txn& txn, Hold& hold, u64 session) const;

  const Segment& s_;
  const Index& index_;
  const Order& order_;
};

}  // namespace hostcache
