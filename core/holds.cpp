#include "holds.h"

#include <algorithm>

namespace hostcache {

namespace {
constexpr u64 kRecordsEach = 2 * kProbeLimit + 16;  // log records that freeing one page can take

u32 record_of(u64 number) { return static_cast<u32>(number & 0xFFFF); }
u64 bit(u32 part) { return u64{1} << part; }
u64 all_parts(u32 parts) { return parts >= 64 ? ~u64{0} : bit(parts) - 1; }
u64 chunks_for(u64 count, u32 each) { return (count + each - 1) / each; }
}  // namespace

u64 check_pages(std::span<const u32> pages) {
  u64 h = 0x9E37'79B9'7F4A'7C15ULL ^ pages.size();
  for (const u32 page : pages) {
    h = (h ^ page) * 0xBF58'476D'1CE4'E5B9ULL;
    h ^= h >> 31;
  }
  return h;
}

u64 Holds::draw_number(const Txn& txn, u64 listed, u32 parts) const {
  const u64 chunks =
      chunks_for(listed, kChunkPages) + (parts > 1 ? chunks_for(parts, kChunkClaims) : 0);
  const u32 records = s_.geometry().hold_count;
  if (txn.holds >= records || chunks > txn.chunk_free) return 0;
  Control& c = s_.control();
  // The counter only rises: a number drawn for a transaction that is undone is never drawn again.
  const u64 count = c.hold_counter + 1;
  put(c.hold_counter, count);
  put(c.hold_counter_check, ~count);
  for (u32 i = 0; i < records; ++i) {
    const u32 record = static_cast<u32>((count + i) % records);
    if (s_.hold(record).number == 0) return count << 16 | record;
  }
  return 0;
}

namespace {

// Fills popped chunks, last to first, so that each names one that is written already.
template <class Fill>
u32 write_chunks(const Segment& s, Txn& txn, u64 count, u32 each, Fill fill) {
  u32 next = kNone;
  for (u64 piece = chunks_for(count, each); piece-- > 0;) {
    const u32 at = txn.pop_chunk();
    Chunk& chunk = s.chunk(at);
    chunk = {};
    chunk.next = next;
    for (u64 i = piece * each; i < std::min(count, (piece + 1) * each); ++i)
      fill(chunk, static_cast<u32>(i % each), i);
    next = at;
  }
  return next;
}

}  // namespace

void Holds::publish_record(Txn& txn, u64 number, const HoldRequest& request,
                           std::span<const u32> listed) const {
  Hold& h = s_.hold(record_of(number));
  const u32 parts = std::max(request.parts, 1U);
  h.taker = request.taker;
  h.open = request.parts == 0 ? 0 : all_parts(parts);
  h.claimed = request.parts == 0 ? 1 : 0;
  h.claimer = request.parts == 0 ? request.taker : 0;
  h.stamp = monotonic_ns();
  h.pages_check = request.pages_check;
  h.heir_number = 0;
  h.heir_after = h.heir_page = kNone;
  h.kind = static_cast<u32>(request.kind);
  h.parts = parts;
  h.page_count = h.left = static_cast<u32>(listed.size());
  h.first_chunk = write_chunks(s_, txn, listed.size(), kChunkPages,
                               [&](Chunk& c, u32 at, u64 i) { c.pages[at] = listed[i]; });
  h.claim_chunk = parts == 1 ? kNone
                             : write_chunks(s_, txn, parts, kChunkClaims,
                                            [](Chunk& c, u32 at, u64) { c.claims[at] = 0; });
  h.ns = request.ns;
  h.epoch = request.epoch;
  h.ended = 0;
  h.group = 0;
  txn.store(h.number, number);
  ++txn.holds;
}

Hold* Holds::find(u64 number) const {
  const u32 record = record_of(number);
  if (number == 0 || record >= s_.geometry().hold_count) return nullptr;
  Hold& h = s_.hold(record);
  return h.number == number ? &h : nullptr;
}

std::vector<u32> Holds::listed(const Hold& hold) const {
  std::vector<u32> pages;
  const u32 count = std::min(hold.page_count, kMaxHoldPages);
  pages.reserve(count);
  u32 at = hold.first_chunk;
  while (pages.size() < count && at < s_.geometry().chunk_count) {
    const Chunk& chunk = s_.chunk(at);
    for (u32 i = 0; i < kChunkPages && pages.size() < count; ++i) pages.push_back(chunk.pages[i]);
    at = chunk.next;
  }
  return pages;
}

bool Holds::worth_waiting(u64 number, u64 now_ns, u64 bound_ns) const {
  const Hold* h = find(number);
  return h != nullptr && h->ended == 0 && now_ns >= h->stamp && now_ns - h->stamp < bound_ns;
}

u64* Holds::claimer_word(const Hold& hold, u32 part) const {
  if (hold.parts == 1) return const_cast<u64*>(&hold.claimer);
  u32 at = hold.claim_chunk;
  for (u32 skip = part / kChunkClaims; skip > 0; --skip) at = s_.chunk(at).next;
  return &s_.chunk(at).claims[part % kChunkClaims];
}

u64 Holds::claimer(const Hold& hold, u32 part) const { return *claimer_word(hold, part); }

bool Holds::claim(Txn& txn, u64 number, HoldKind kind, u32 parts, u64 pages_check, u32 part,
                  u64 session) const {
  Hold* h = find(number);
  if (h == nullptr || h->kind != static_cast<u32>(kind) || h->parts != parts ||
      h->pages_check != pages_check || part >= parts || (h->open & bit(part)) == 0)
    return false;
  txn.store(h->open, h->open & ~bit(part));
  txn.store(h->claimed, h->claimed | bit(part));
  txn.store(*claimer_word(*h, part), session);
  return true;
}

void Holds::pin(Txn& txn, u32 page) const {
  Entry& e = s_.entry(page);
  u64 use = e.use + Use::kPin;
  if ((use & Use::kUsesMask) != Use::kUsesMask) use += u64{1} << Use::kUsesShift;
  txn.store(e.use, use | Use::kUsed);
}

// A key leaves only where the index leads to the hold's own page: it may lead to another's by now.
void Holds::take_keys(Txn& txn, const Hold& hold) const {
  for (const u32 page : listed(hold)) {
    Entry& e = s_.entry(page);
    if (Use::state(e.use) != PageState::reserved || e.hold != hold.number ||
        (e.use & Use::kKeyed) == 0)
      continue;
    // The hold is marked ended already: whoever finds it half done goes on here.
    if (!txn.room(kRecordsEach)) txn.next();
    index_.erase(txn, page);
    txn.store(e.use, e.use & ~Use::kKeyed);
  }
}

void Holds::link_heir(Txn& txn, const Hold& hold, u32 page) const {
  if (hold.heir_number == 0 || hold.heir_after != page) return;
  Entry& heir = s_.entry(hold.heir_page);
  if (Use::state(heir.use) != PageState::reserved || heir.hold != hold.heir_number ||
      heir.parent != kNone)
    return;
  txn.store(heir.parent, page);
  Entry& e = s_.entry(page);
  txn.store(e.kids, e.kids + 1);
}

// READY: the first `count` pages that the index leads to in the current epoch and whose parent,
// where it is in this hold, is published too.
u32 Holds::publish(Txn& txn, Hold& hold, std::span<const u32> pages, u32 count,
                   std::vector<u32>* pinned) const {
  std::vector<u8> made(pages.size(), 0);
  for (size_t i = 0; i < pages.size() && i < count; ++i) {
    const Entry& e = s_.entry(pages[i]);
    const bool child = i > 0 && e.parent == pages[i - 1];
    made[i] = Use::state(e.use) == PageState::reserved && e.hold == hold.number &&
              (e.use & Use::kKeyed) != 0 && s_.current(e, e.use) && (!child || made[i - 1] != 0);
  }
  u32 published = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (made[i] == 0) continue;
    Entry& e = s_.entry(pages[i]);
    link_heir(txn, hold, pages[i]);
    u64 use = order_.publish_word(txn, pages[i], e.use);
    const bool deepest =
        i + 1 == pages.size() || made[i + 1] == 0 || s_.entry(pages[i + 1]).parent != pages[i];
    if (pinned != nullptr && deepest) {
      pinned->push_back(pages[i]);
      use += Use::kPin;
    }
    txn.store(e.use, use);
    --txn.reserved;
    ++published;
  }
  return published;
}

u64 Holds::keep_as_lease(Txn& txn, const Hold& hold, std::span<const u32> pinned) const {
  const u64 number = draw_number(txn, pinned.size(), 0);
  const HoldRequest request{HoldKind::read, hold.taker, 0, hold.ns, hold.epoch, hold.pages_check};
  publish_record(txn, number, request, pinned);
  return number;
}

// Both masks are 0 in this transaction: the hold ends. What it can not publish stays RESERVED,
// in the record and waited for by nobody, until it is given back in steps.
u32 Holds::settle(Txn& txn, Hold& hold, u32 count) const {
  u32 published = 0;
  if (hold.kind == static_cast<u32>(HoldKind::write) && hold.ended == 0) {
    const std::vector<u32> pages = listed(hold);
    published = publish(txn, hold, pages, count, nullptr);
    if (published == pages.size()) {
      free_record(txn, hold);
      txn.next();
      return published;
    }
    txn.store(hold.ended, u32{1});
    txn.next();
  }
  while (!give_back_step(txn, hold)) txn.next();
  txn.next();
  return published;
}

Hold* Holds::claimed_by(u64 number, u32 part, u64 session) const {
  Hold* h = find(number);
  const bool ours = h != nullptr && part < h->parts && (h->claimed & bit(part)) != 0 &&
                    claimer(*h, part) == session;
  return ours ? h : nullptr;
}

Finished Holds::finish(Txn& txn, u64 number, u32 part, u64 session, bool ok, u32 count) const {
  Hold* h = claimed_by(number, part, session);
  if (h == nullptr) return {};
  if (!ok) spoil(txn, number, part, session);
  Finished finished{true, 0, 0, true};
  txn.store(h->claimed, h->claimed & ~bit(part));
  if (h->open == 0 && h->claimed == 0) finished.published = settle(txn, *h, count);
  txn.next();
  return finished;
}

Finished Holds::finish_and_keep(Txn& txn, u64 number, u64 session, u32 count) const {
  Hold* h = claimed_by(number, 0, session);
  if (h == nullptr || h->parts != 1 || txn.holds >= s_.geometry().hold_count ||
      chunks_for(h->page_count, kChunkPages) > txn.chunk_free)
    return {};
  Finished finished{true, 0, 0, true};
  if (h->ended == 0) {
    const std::vector<u32> pages = listed(*h);
    std::vector<u32> pinned;
    finished.published = publish(txn, *h, pages, count, &pinned);
    if (!pinned.empty()) finished.kept = keep_as_lease(txn, *h, pinned);
    if (finished.published == pages.size()) {
      free_record(txn, *h);
      txn.next();
      return finished;
    }
  }
  // Views of what was not published live on too: the part stays claimed until they are gone.
  finished.whole = false;
  spoil(txn, number, 0, session);
  return finished;
}

void Holds::spoil(Txn& txn, u64 number, u32 part, u64 session) const {
  Hold* h = claimed_by(number, part, session);
  if (h == nullptr || h->kind != static_cast<u32>(HoldKind::write)) return;
  txn.store(h->ended, u32{1});
  txn.next();
  take_keys(txn, *h);
  txn.next();
}

void Holds::end(Txn& txn, u64 number) const {
  Hold* h = find(number);
  if (h == nullptr) return;
  txn.store(h->ended, u32{1});
  txn.store(h->open, u64{0});
  if (h->kind == static_cast<u32>(HoldKind::write)) take_keys(txn, *h);
  if (h->claimed == 0) settle(txn, *h, 0);
  txn.next();
}

void Holds::drop_all(Txn& txn) const {
  for (u32 i = 0; i < s_.geometry().hold_count; ++i) {
    Hold& h = s_.hold(i);
    if (h.number == 0) continue;
    txn.store(h.ended, u32{1});
    txn.store(h.open, u64{0});
    txn.store(h.claimed, u64{0});
    txn.next();
    while (!give_back_step(txn, h)) txn.next();
    txn.next();
  }
}

void Holds::free_chunks(Txn& txn, u32 first) const {
  u64 bound = s_.geometry().chunk_count;
  for (u32 at = first; at < s_.geometry().chunk_count && bound > 0; --bound) {
    const u32 next = s_.chunk(at).next;
    txn.push_chunk(at);
    at = next;
  }
}

void Holds::free_record(Txn& txn, Hold& hold) const {
  free_chunks(txn, hold.first_chunk);
  free_chunks(txn, hold.claim_chunk);
  txn.store(hold.number, u64{0});
  --txn.holds;
}

// Up to kStepPages pages, deepest first, so that no page is FREE before its children are.
bool Holds::give_back_step(Txn& txn, Hold& hold) const {
  const std::vector<u32> pages = listed(hold);
  u32 left = std::min(hold.left, static_cast<u32>(pages.size()));
  if (hold.kind == static_cast<u32>(HoldKind::read)) {
    for (; left > 0; --left) {
      Entry& e = s_.entry(pages[left - 1]);
      if (Use::pins(e.use) != 0) txn.store(e.use, e.use - Use::kPin);
    }
  }
  for (u32 step = 0; left > 0 && step < kStepPages && txn.room(kRecordsEach); ++step, --left) {
    const Entry& e = s_.entry(pages[left - 1]);
    if (Use::state(e.use) != PageState::reserved || e.hold != hold.number) continue;
    order_.free_page(txn, pages[left - 1]);
    add(s_.control().counters[static_cast<u32>(Counter::aborts)], u64{1});
  }
  if (left == 0) {
    free_record(txn, hold);
    return true;
  }
  txn.store(hold.left, left);
  return false;
}

bool Holds::sweep_record(Txn& txn, Hold& hold, u64 session) const {
  const bool write = hold.kind == static_cast<u32>(HoldKind::write);
  u64 dead = 0;  // parts that the session claimed
  for (u32 part = 0; part < hold.parts && session != 0; ++part)
    if ((hold.claimed & bit(part)) != 0 && claimer(hold, part) == session) dead |= bit(part);
  const bool took = session != 0 && hold.taker == session;
  if ((took && (hold.ended == 0 || hold.open != 0)) || (write && dead != 0)) {
    txn.store(hold.ended, u32{1});
    if (took) txn.store(hold.open, u64{0});
    txn.next();
    if (write) take_keys(txn, hold);
  }
  if (dead != 0) txn.store(hold.claimed, hold.claimed & ~dead);
  if (hold.open != 0 || hold.claimed != 0) return true;
  return give_back_step(txn, hold);
}

bool Holds::sweep_step(Txn& txn, u64 session) const {
  u64 handled = 0;
  for (u32 i = 0; i < s_.geometry().hold_count; ++i) {
    Hold& hold = s_.hold(i);
    if (hold.number == 0) continue;
    const u64 pages = hold.left;
    const bool done = sweep_record(txn, hold, session);
    txn.next();
    if (!done) return false;
    if (hold.number == 0) handled += pages;
    // Many small holds are one large one: the lock is let go after as many pages.
    if (handled >= kStepPages) return false;
  }
  return true;
}

u64 Holds::reserved_by(u64 session) const {
  u64 pages = 0;
  for (u32 i = 0; i < s_.geometry().hold_count; ++i) {
    const Hold& h = s_.hold(i);
    if (h.number != 0 && h.taker == session && h.kind == static_cast<u32>(HoldKind::write))
      pages += h.left;
  }
  return pages;
}

void Holds::set_heir(Txn& txn, u64 of, u32 after, u64 heir, u32 heir_page) const {
  Hold* h = find(of);
  if (h == nullptr) return;
  txn.store(h->heir_number, heir);
  txn.store(h->heir_after, after);
  txn.store(h->heir_page, heir_page);
}

}  // namespace hostcache
