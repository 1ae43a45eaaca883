// match and lookup: probe without the lock, pin with it.
#include <algorithm>

#include "cache.h"

namespace hostcache {

namespace {

constexpr size_t kBucketsAhead = 12;
constexpr size_t kEntriesAhead = 6;

struct Hashed {
  u64 key[4];
  Hash hash;
};

// Visits keys in order with their lines already on the way: buckets 12 keys ahead, entries 6.
template <class Visit>
void each_key(const Index& index, Keys keys, Visit visit) {
  constexpr size_t kWindow = 16;
  static_assert(kBucketsAhead < kWindow);
  Hashed window[kWindow];
  size_t hashed = 0;
  for (size_t i = 0; i < keys.count; ++i) {
    for (; hashed < keys.count && hashed <= i + kBucketsAhead; ++hashed) {
      Hashed& h = window[hashed % kWindow];
      load_key(h.key, keys[hashed]);
      h.hash = hash_key(h.key);
      index.prefetch_bucket(h.hash);
    }
    if (i + kEntriesAhead < hashed)
      index.prefetch_entry(window[(i + kEntriesAhead) % kWindow].hash);
    if (!visit(i, window[i % kWindow])) return;
  }
}

// What a lookup saw: for each key the page that was READY, or none.
struct Seen {
  std::vector<Ready> pages;  // of the leading run, or of all keys with gaps
  size_t run = 0;
  u32 epoch = 0;
};

// `locked`: then what is seen stays so.
Seen look(const Session& session, Keys keys, bool gaps, bool locked) {
  const Segment& s = session.segment();
  const Index& index = session.index();
  Seen seen;
  // Before the first probe: what was computed from cleared pages must not be held as current.
  seen.epoch = session.current_epoch();
  seen.pages.reserve(keys.count);
  bool leading = true;
  each_key(index, keys, [&](size_t, const Hashed& h) {
    Ready ready;
    if (locked) {
      const u32 page = index.find(h.key, h.hash);
      const Entry& e = s.entry(page);
      if (page != kNone && Use::state(e.use) == PageState::ready && s.current(e, e.use))
        ready = {page, e.version};
    } else {
      ready = index.probe(h.key, h.hash);
    }
    leading = leading && ready.page != kNone;
    if (!leading && !gaps) return false;
    seen.run += leading;
    seen.pages.push_back(ready);
    return true;
  });
  return seen;
}

// Positions whose page is pinned: the last of each run of pages that are linked to each other.
// Its ancestors are safe with it, for only childless pages are evicted.
std::vector<size_t> ends_of_runs(const Segment& s, const std::vector<Ready>& pages) {
  std::vector<size_t> ends;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i].page == kNone) continue;
    const bool followed = i + 1 < pages.size() && pages[i + 1].page != kNone &&
                          load(s.entry(pages[i + 1].page).parent) == pages[i].page;
    if (!followed) ends.push_back(i);
  }
  return ends;
}

// From the deepest page up to the head. Where the deepest has the same version again under the
// lock it was READY all the while, so none of its ancestors can have gone since this look.
bool still_ready(const Segment& s, const std::vector<Ready>& pages) {
  for (size_t i = pages.size(); i-- > 0;) {
    if (pages[i].page == kNone) continue;
    const Entry& e = s.entry(pages[i].page);
    if (Use::state(load(e.use)) != PageState::ready || load(e.version) != pages[i].version)
      return false;
  }
  return true;
}

bool ends_still_ready(const Segment& s, const Seen& seen, const std::vector<size_t>& ends) {
  return std::all_of(ends.begin(), ends.end(), [&](size_t i) {
    const Entry& e = s.entry(seen.pages[i].page);
    return Use::state(e.use) == PageState::ready && e.version == seen.pages[i].version;
  });
}

void give_up(Seen& seen) {
  seen.pages.clear();
  seen.run = 0;
}

std::vector<u32> page_numbers(const Seen& seen) {
  std::vector<u32> pages;
  for (const Ready& ready : seen.pages)
    if (ready.page != kNone) pages.push_back(ready.page);
  return pages;
}

std::shared_ptr<Handle> hold_pages(const std::shared_ptr<Session>& session, const Seen& seen,
                                   const std::vector<size_t>& ends, u32 parts) {
  const Holds& holds = session->holds();
  std::vector<u32> pins;
  pins.reserve(ends.size());
  for (const size_t i : ends) pins.push_back(seen.pages[i].page);
  Handle::What what;
  what.kind = HoldKind::read;
  what.parts = parts;
  what.part = parts == 0 ? 0 : -1;
  what.session = session->id();
  for (const Ready& ready : seen.pages) what.pages.push_back(ready.page);
  what.pages_check = check_pages(what.pages);
  Txn txn(session->segment());
  // A key may be named more than once, so that its page is pinned as often.
  const bool pinnable =
      std::all_of(pins.begin(), pins.end(), [&](u32 p) { return holds.can_pin(p, pins.size()); });
  what.number = pinnable ? holds.draw_number(txn, pins.size(), parts) : 0;
  if (what.number == 0) return nullptr;
  for (const u32 page : pins) holds.pin(txn, page);
  holds.publish_record(
      txn, what.number,
      {HoldKind::read, what.session, parts, session->ns(), seen.epoch, what.pages_check}, pins);
  txn.close();
  return Handle::make(session, std::move(what));
}

// Under the lock: what was seen without it, where it still stands, else all anew.
std::shared_ptr<Handle> hold_seen(const std::shared_ptr<Session>& session, Keys keys, u32 parts,
                                  bool gaps, Seen& seen, bool steady) {
  const Session::Guard guard(*session, Session::Guard::Patience::take);
  if (!guard) return nullptr;
  const Segment& s = session->segment();
  std::vector<size_t> ends = ends_of_runs(s, seen.pages);
  if (!steady || seen.epoch != session->current_epoch() || !ends_still_ready(s, seen, ends)) {
    seen = look(*session, keys, gaps, true);
    ends = ends_of_runs(s, seen.pages);
  }
  if (ends.empty()) return nullptr;
  return hold_pages(session, seen, ends, parts);
}

}  // namespace

size_t match_in(const Session& session, Keys keys) { return look(session, keys, false, false).run; }

Lookup lookup_in(const std::shared_ptr<Session>& session, Keys keys, u32 parts, bool gaps) {
  const Keys asked{keys.data, std::min<size_t>(keys.count, kMaxHoldPages)};
  Seen seen = look(*session, asked, gaps, false);
  Lookup out;
  const bool any = std::any_of(seen.pages.begin(), seen.pages.end(),
                               [](const Ready& r) { return r.page != kNone; });
  if (any) {
    const bool steady = still_ready(session->segment(), seen.pages);
    out.hold = hold_seen(session, asked, parts, gaps, seen, steady);
  }
  if (!out.hold) give_up(seen);
  out.run = static_cast<u32>(seen.run);
  out.epoch = seen.epoch;
  if (seen.run > 0) {
    out.parent = seen.pages[seen.run - 1].page;
    out.parent_version = seen.pages[seen.run - 1].version;
  }
  for (const Ready& ready : seen.pages) out.pages.push_back(static_cast<int>(ready.page));
  if (gaps) out.pages.resize(keys.count, -1);
  const size_t hits = gaps ? page_numbers(seen).size() : seen.run;
  session->count(Counter::hits, hits);
  session->count(Counter::misses, keys.count - hits);
  return out;
}

}  // namespace hostcache
