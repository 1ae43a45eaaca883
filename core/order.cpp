#include "order.h"

namespace hostcache {

namespace {
constexpr u32 kClimbs = 16;
constexpr u32 kAhead = 20;
// Records that one victim, with the pops before it, can take at the most: a safe place to stop.
constexpr u64 kRecordsEach = 2 * kProbeLimit + 64;
}  // namespace

void Order::childless(Txn& txn, u32 page) const {
  Entry& e = s_.entry(page);
  if (Use::state(e.use) != PageState::ready || (e.use & Use::kQueued) != 0) return;
  txn.push_young(page);
  txn.store(e.use, e.use | Use::kQueued);
}

u64 Order::publish_word(Txn& txn, u32 page, u64 use) const {
  use = Use::with_state(use, PageState::ready);
  if (s_.entry(page).kids != 0) return use;
  // Its number may stand in the ring still, from an earlier life: "used" sends it to the young end.
  if ((use & Use::kQueued) != 0) return use | Use::kUsed;
  txn.push_young(page);
  return use | Use::kQueued;
}

// Leaving READY or RESERVED: state, then version, then (in a later transaction) the key.
void Order::leave(Txn& txn, u32 page, u64 word_after) const {
  Entry& e = s_.entry(page);
  const u64 before = e.use;
  txn.store(e.use, word_after);
  put(e.version, e.version + 1);
  if ((before & Use::kKeyed) != 0) index_.erase(txn, page);
  if (Use::state(before) == PageState::reserved) --txn.reserved;
  txn.push_free(page);
}

void Order::free_page(Txn& txn, u32 page) const {
  const Entry& e = s_.entry(page);
  const u32 parent = e.parent;
  leave(txn, page, e.use & Use::kQueued);
  lose_child(txn, parent);
}

void Order::lose_child(Txn& txn, u32 parent) const {
  if (parent >= s_.geometry().page_count) return;
  Entry& e = s_.entry(parent);
  if (e.kids == 0) return;
  txn.store(e.kids, e.kids - 1);
  if (e.kids == 0) childless(txn, parent);
}

// The oldest candidate that may go, taken out of the ring; kNone where none was met.
u32 Order::pop(Txn& txn, const Kept& kept, EvictBudget& budget, u64& popped) const {
  // No more pops than pages in one transaction: what is pushed again must not reach the slots
  // that a rollback would bring back.
  while (txn.ring_old < txn.ring_young && popped < s_.geometry().page_count &&
         budget.pops < budget.hard && txn.room(kRecordsEach)) {
    ++popped;
    ++budget.pops;
    if (txn.ring_old + kAhead < txn.ring_young)
      __builtin_prefetch(&s_.entry(s_.ring(txn.ring_old + kAhead)));
    const u32 page = s_.ring(txn.ring_old++);
    Entry& e = s_.entry(page);
    const u64 use = e.use;
    if ((use & Use::kQueued) == 0) continue;
    if (Use::state(use) != PageState::ready || e.kids != 0) {
      txn.store(e.use, use & ~Use::kQueued);
    } else if (Use::pins(use) != 0 || kept.has(page)) {
      txn.push_young(page);
    } else if ((use & Use::kKeyed) == 0 || !s_.current(e, use)) {
      return page;
    } else if ((use & Use::kUsed) != 0 && budget.pops < budget.soft) {
      txn.store(e.use, use & ~Use::kUsed);
      txn.push_young(page);
    } else {
      return page;
    }
  }
  return kNone;
}

// Evicts a page that is in no ring slot; its parent, where that is the next to go.
u32 Order::drop(Txn& txn, u32 page, const Kept& kept) const {
  const u32 parent = s_.entry(page).parent;
  leave(txn, page, 0);
  if (parent >= s_.geometry().page_count) return kNone;
  Entry& e = s_.entry(parent);
  if (e.kids == 0) return kNone;
  txn.store(e.kids, e.kids - 1);
  if (e.kids != 0 || Use::state(e.use) != PageState::ready || (e.use & Use::kQueued) != 0)
    return kNone;
  const bool stale = (e.use & Use::kKeyed) == 0 || !s_.current(e, e.use);
  if (Use::pins(e.use) == 0 && !kept.has(parent) && (stale || (e.use & Use::kUsed) == 0))
    return parent;
  txn.push_young(parent);
  txn.store(e.use, (e.use & ~Use::kUsed) | Use::kQueued);
  return kNone;
}

u32 Order::evict(Txn& txn, u32 need, const Kept& kept, EvictBudget& budget) const {
  need = std::min(need, kStepPages);
  const u32 width = std::clamp(need / 8, 1U, kClimbs);
  u32 climbs[kClimbs];
  u32 climbing = 0;
  u32 freed = 0;
  u64 popped = 0;
  while (freed < need && txn.room(kClimbs * kRecordsEach)) {
    while (climbing < width && climbing + freed < need) {
      const u32 page = pop(txn, kept, budget, popped);
      if (page == kNone) break;
      __builtin_prefetch(&s_.entry(s_.entry(page).parent));
      climbs[climbing++] = page;
    }
    if (climbing == 0) break;
    for (u32 i = 0; i < climbing && freed < need;) {
      const u32 next = drop(txn, climbs[i], kept);
      ++freed;
      if (next == kNone) {
        climbs[i] = climbs[--climbing];
        continue;
      }
      __builtin_prefetch(&s_.entry(s_.entry(next).parent));
      climbs[i++] = next;
    }
  }
  while (climbing > 0) {
    const u32 page = climbs[--climbing];
    Entry& e = s_.entry(page);
    txn.push_old(page);
    if ((e.use & Use::kQueued) == 0) txn.store(e.use, e.use | Use::kQueued);
  }
  return freed;
}

u32 Order::drop_stale(Txn& txn, u32 from, u32 count) const {
  const u32 end = std::min(from + count, s_.geometry().page_count);
  for (u32 start = from; start < end; ++start) {
    // Its parents become leaves one after another: each tree goes with the last leaf looked at.
    for (u32 page = start; page < s_.geometry().page_count;) {
      if (!txn.room(kRecordsEach)) return start;
      const Entry& e = s_.entry(page);
      if (Use::state(e.use) != PageState::ready || Use::pins(e.use) != 0 || e.kids != 0) break;
      if ((e.use & Use::kKeyed) != 0 && s_.current(e, e.use)) break;
      const u32 parent = e.parent;
      free_page(txn, page);
      page = parent;
    }
  }
  return end;
}

}  // namespace hostcache
