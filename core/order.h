// Who is evicted next: a ring of the childless READY pages, with a second chance for the used.
//
// A policy is these four calls. Only READY pages without pins and without children may go, so a
// prompt's head never goes before its tail. A hit costs the policy nothing: it finds `used` set
// in the word that the pin is stored in. Policy: CLOCK (Corbato, 1968) over the leaves of the
// prompt trees; several prompts are climbed at once, from leaf to parent, so that the walks are
// prefetched.
#pragma once

#include <algorithm>
#include <vector>

#include "index.h"
#include "lock.h"
#include "segment.h"

namespace hostcache {

// Pages that a call may not evict although nothing pins them: ends of the runs that it names.
class Kept {
 public:
  void add(u32 page) { pages_.push_back(page); }
  void seal() { std::sort(pages_.begin(), pages_.end()); }
  bool has(u32 page) const { return std::binary_search(pages_.begin(), pages_.end(), page); }

 private:
  std::vector<u32> pages_;
};

// How long a call looks for victims: from `soft` pops on "used" no longer protects, at `hard` it
// gives up, and the next call goes on from there.
struct EvictBudget {
  explicit EvictBudget(u64 need) : soft(8 * need + 64), hard(4 * soft) {}
  u64 pops = 0;
  u64 soft;
  u64 hard;
};

class Order {
 public:
  Order(const Segment& segment, const Index& index) : s_(segment), index_(index) {}

  // A READY page has no children now: it becomes a candidate, if it is none yet.
  void childless(Txn& txn, u32 page) const;
  // The use word of a page that becomes READY (with its pins, if any), candidate where childless.
  u64 publish_word(Txn& txn, u32 page, u64 use) const;
  // Evicts up to `need` (at most kStepPages) in this transaction; how many went.
  u32 evict(Txn& txn, u32 need, const Kept& kept, EvictBudget& budget) const;
  // Frees what no lookup can find any more (older epoch, or no key), among entries
  // [from, from + count); how far it came before the log was full.
  u32 drop_stale(Txn& txn, u32 from, u32 count) const;

  // Any page that is not FREE becomes FREE, its key leaves the index, its parent loses a child.
  void free_page(Txn& txn, u32 page) const;
  void lose_child(Txn& txn, u32 parent) const;

 private:
  u32 pop(Txn& txn, const Kept& kept, EvictBudget& budget, u64& popped) const;
  u32 drop(Txn& txn, u32 page, const Kept& kept) const;
  void leave(Txn& txn, u32 page, u64 word_after) const;

  const Segment& s_;
  const Index& index_;
};

}  // namespace hostcache
