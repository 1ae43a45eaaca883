#include "check.h"

#include <algorithm>
#include <cstring>

#include "index.h"

namespace hostcache {

namespace {

constexpr size_t kMaxFindings = 100;

class Checker {
 public:
  explicit Checker(const Segment& s) : s_(s), g_(s.geometry()), c_(s.control()) {}

  std::vector<std::string> run() {
    words();
    counts_in_range();
    // What follows walks by these counts: with one out of range there is nothing to walk by.
    if (!findings_.empty()) return findings_;
    list_.assign(g_.page_count, 0);
    pins_.assign(g_.page_count, 0);
    kids_.assign(g_.page_count, 0);
    chunk_seen_.assign(g_.chunk_count, 0);
    chunk_stack();
    holds();
    free_stack();
    entries();
    parents();
    index();
    ring();
    return findings_;
  }

 private:
  void say(const std::string& text) {
    if (findings_.size() < kMaxFindings) findings_.push_back(text);
  }
  void differ(const std::string& what, u64 stored, u64 found) {
    if (stored != found)
      say(what + ": " + std::to_string(stored) + " stored, " + std::to_string(found) + " found");
  }
  static std::string name(const char* what, u64 number) {
    return std::string(what) + " " + std::to_string(number);
  }

  void words() {
    if (c_.damaged != 0) say("an undo log could not be followed");
    if (c_.log_count != 0)
      say("the undo log is open (" + std::to_string(c_.log_count) +
          " records) and nobody is inside");
    if (!Guarded::valid(c_.epoch)) say("the epoch of the cache was altered");
    for (u32 i = 0; i < g_.namespace_count; ++i) {
      const NamespaceRecord& r = s_.ns(i);
      if (!Guarded::valid(r.epoch)) say("the epoch of " + name("namespace", i) + " was altered");
      if (r.used > 1 || (i == 0 && r.used != 1))
        say(name("namespace", i) + " is neither used nor free");
    }
    // Value first, complement second: a death between leaves them one apart.
    if (c_.next_id != ~c_.next_id_check && c_.next_id - 1 != ~c_.next_id_check)
      say("the counter of sessions was altered");
    if (c_.hold_counter != ~c_.hold_counter_check && c_.hold_counter - 1 != ~c_.hold_counter_check)
      say("the counter of holds was altered");
    for (u32 i = 0; i < g_.slot_count; ++i) {
      const Slot& slot = s_.slot(i);
      if (slot.id >= c_.next_id)
        say(name("slot", i) + " has a session number that was never given");
      if (slot.ns >= g_.namespace_count) say(name("slot", i) + " names no namespace");
    }
  }

  void counts_in_range() {
    if (c_.free_count > g_.page_count) differ("free pages, at most", g_.page_count, c_.free_count);
    if (c_.chunk_free_count > g_.chunk_count)
      differ("free chunks, at most", g_.chunk_count, c_.chunk_free_count);
    if (c_.reserved_count > g_.page_count)
      differ("reserved pages, at most", g_.page_count, c_.reserved_count);
    if (c_.ring_young < c_.ring_old || c_.ring_young - c_.ring_old > g_.page_count)
      say("the ring's cursors do not belong together");
  }

  void take_chunk(u32 chunk, const std::string& by) {
    if (chunk >= g_.chunk_count) return say(by + " names a chunk that does not exist");
    if (chunk_seen_[chunk]++ != 0) say(name("chunk", chunk) + " is used twice, again by " + by);
  }

  void chunk_stack() {
    for (u64 i = 0; i < c_.chunk_free_count; ++i) take_chunk(s_.chunk_stack(i), "the chunk stack");
  }

  std::vector<u32> chunks_of(u32 first, u64 expected, const std::string& by) {
    std::vector<u32> chunks;
    for (u32 at = first; at != kNone && chunks.size() < expected; at = s_.chunk(at).next) {
      take_chunk(at, by);
      if (at >= g_.chunk_count) break;
      chunks.push_back(at);
    }
    if (chunks.size() != expected || (expected != 0 && s_.chunk(chunks.back()).next != kNone))
      say(by + " has a list of the wrong length");
    return chunks;
  }

  void hold(u32 record) {
    const Hold& h = s_.hold(record);
    const std::string by = name("hold", h.number);
    if ((h.number & 0xFFFF) != record || h.number >> 16 > c_.hold_counter)
      say(by + " has a number that record " + std::to_string(record) + " can not have");
    const bool write = h.kind == static_cast<u32>(HoldKind::write);
    if (!write && h.kind != static_cast<u32>(HoldKind::read)) say(by + " is of no kind");
    if (h.parts == 0 || h.parts > kMaxParts || h.page_count > kMaxHoldPages ||
        h.left > h.page_count)
      return say(by + " has impossible counts");
    const u64 parts = h.parts == 64 ? ~u64{0} : (u64{1} << h.parts) - 1;
    if ((h.open & h.claimed) != 0 || ((h.open | h.claimed) & ~parts) != 0)
      say(by + " has impossible masks");
    if (h.ns >= g_.namespace_count) say(by + " names no namespace");
    u64 listed = 0;
    for (const u32 at :
         chunks_of(h.first_chunk, (h.page_count + kChunkPages - 1) / kChunkPages, by))
      for (u32 i = 0; i < kChunkPages && listed < h.page_count; ++i, ++listed)
        hold_page(h, write, s_.chunk(at).pages[i], listed < h.left, by);
    if (h.parts > 1) chunks_of(h.claim_chunk, (h.parts + kChunkClaims - 1) / kChunkClaims, by);
  }

  void hold_page(const Hold& h, bool write, u32 page, bool still_held, const std::string& by) {
    if (page >= g_.page_count) return say(by + " lists a page that does not exist");
    if (!still_held) return;
    const Entry& e = s_.entry(page);
    if (!write) {
      ++pins_[page];
      return;
    }
    // Records are trusted over states: what a write hold lists is not READY, unless it has
    // published it and is giving back the rest (then the page may be another's by now).
    if (Use::state(e.use) == PageState::reserved && e.hold == h.number)
      ++list_[page];
    else if (h.ended == 0)
      say(name("page", page) + " is being written by " + by + " and says otherwise");
  }

  void holds() {
    u64 used = 0;
    for (u32 i = 0; i < g_.hold_count; ++i) {
      if (s_.hold(i).number == 0) continue;
      ++used;
      hold(i);
    }
    differ("hold records in use", c_.holds_used, used);
    const u64 chunks = static_cast<u64>(std::count(chunk_seen_.begin(), chunk_seen_.end(), u8{0}));
    if (chunks != 0) say(std::to_string(chunks) + " chunks are neither free nor in a list");
  }

  void free_stack() {
    for (u64 i = 0; i < c_.free_count; ++i) {
      const u32 page = s_.free_stack(i);
      if (page >= g_.page_count)
        say("the free stack names a page that does not exist");
      else if (Use::state(s_.entry(page).use) != PageState::free)
        say(name("page", page) + " is on the free stack and not FREE");
      else if (list_[page]++ != 0)
        say(name("page", page) + " is on the free stack twice");
    }
  }

  void entry(u32 page) {
    const Entry& e = s_.entry(page);
    const PageState state = Use::state(e.use);
    const u64 pins = Use::pins(e.use);
    if (e.ns >= g_.namespace_count) say(name("page", page) + " names no namespace");
    if (state == PageState::ready) {
      if (Use::epoch(e.use) > s_.epoch_of(e.ns))
        say(name("page", page) + " is of an epoch to come");
      if (pins != pins_[page]) differ("pins of " + name("page", page), pins, pins_[page]);
      if (e.kids == 0 && (e.use & Use::kQueued) == 0)
        say(name("page", page) + " could be evicted and is not in the ring");
      return;
    }
    if (static_cast<u32>(state) > 2) return say(name("page", page) + " is in no state");
    if (pins != 0 || pins_[page] != 0) say(name("page", page) + " is pinned and not READY");
    if (list_[page] != 1) say(name("page", page) + " is in no list, or in two");
    if (state == PageState::free && (e.use & ~Use::kQueued) != 0)
      say(name("page", page) + " is FREE with marks of its former life");
  }

  void entries() {
    u64 reserved = 0;
    u64 freed = 0;
    for (u32 page = 0; page < g_.page_count; ++page) {
      const PageState state = Use::state(s_.entry(page).use);
      reserved += state == PageState::reserved;
      freed += state == PageState::free;
      entry(page);
    }
    differ("reserved pages", c_.reserved_count, reserved);
    differ("free pages", c_.free_count, freed);
  }

  bool linked(u32 page) const { return Use::state(s_.entry(page).use) != PageState::free; }

  // Kids are counted; cycles are what is left when leaves are taken away again and again.
  void parents() {
    u64 in_trees = 0;
    for (u32 page = 0; page < g_.page_count; ++page) {
      if (!linked(page)) continue;
      ++in_trees;
      const u32 parent = s_.entry(page).parent;
      if (parent == kNone) continue;
      if (parent >= g_.page_count || !linked(parent))
        say(name("page", page) + " has a parent that is FREE or does not exist");
      else
        ++kids_[parent];
    }
    std::vector<u32> leaves;
    for (u32 page = 0; page < g_.page_count; ++page) {
      if (!linked(page)) continue;
      if (s_.entry(page).kids != kids_[page])
        differ("children of " + name("page", page), s_.entry(page).kids, kids_[page]);
      if (kids_[page] == 0) leaves.push_back(page);
    }
    u64 taken = 0;
    while (!leaves.empty()) {
      const u32 parent = s_.entry(leaves.back()).parent;
      leaves.pop_back();
      ++taken;
      if (parent < g_.page_count && linked(parent) && --kids_[parent] == 0)
        leaves.push_back(parent);
    }
    if (taken != in_trees) say("parents lead in a circle");
  }

  void index() {
    std::vector<u16> passed(g_.bucket_count, 0);
    u64 slots = 0;
    for (u32 at = 0; at < g_.bucket_count; ++at)
      for (u32 i = 0; i < kBucketSlots; ++i)
        if (s_.bucket(at).tags[i] != 0) slots += index_slot(at, i, passed);
    u64 keyed = 0;
    for (u32 page = 0; page < g_.page_count; ++page)
      keyed += (s_.entry(page).use & Use::kKeyed) != 0;
    differ("pages with a key", keyed, slots);
    for (u32 at = 0; at < g_.bucket_count; ++at)
      if (s_.bucket(at).passed != passed[at])
        differ("keys that passed " + name("bucket", at), s_.bucket(at).passed, passed[at]);
  }

  u64 index_slot(u32 at, u32 i, std::vector<u16>& passed) {
    const u32 page = s_.bucket(at).pages[i];
    if (page >= g_.page_count) {
      say(name("bucket", at) + " leads to a page that does not exist");
      return 0;
    }
    const Entry& e = s_.entry(page);
    const Hash hash = hash_key(e.key);
    if ((e.use & Use::kKeyed) == 0 || hash.tag != s_.bucket(at).tags[i])
      say(name("bucket", at) + " leads to " + name("page", page) + ", which has another key");
    u32 step = 0;
    for (u32 b = home_bucket(hash.spot, g_.bucket_count); b != at && step < kProbeLimit; ++step) {
      ++passed[b];
      b = b + 1 == g_.bucket_count ? 0 : b + 1;
    }
    if (step == kProbeLimit) say(name("page", page) + " is too far from its bucket");
    if (Index(s_).find(e.key, hash) != page)
      say("the key of " + name("page", page) + " leads to another page");
    return 1;
  }

  void ring() {
    std::vector<u8> seen(g_.page_count, 0);
    for (u64 at = c_.ring_old; at < c_.ring_young; ++at) {
      const u32 page = s_.ring(at);
      if (page >= g_.page_count)
        say("the ring names a page that does not exist");
      else if (seen[page]++ != 0)
        say(name("page", page) + " is in the ring twice");
      else if ((s_.entry(page).use & Use::kQueued) == 0)
        say(name("page", page) + " is in the ring without its mark");
    }
    for (u32 page = 0; page < g_.page_count; ++page)
      if ((s_.entry(page).use & Use::kQueued) != 0 && seen[page] == 0)
        say(name("page", page) + " has the ring's mark and is not in it");
  }

  const Segment& s_;
  const Geometry& g_;
  const Control& c_;
  std::vector<std::string> findings_;
  std::vector<u8> list_;   // times on the free stack or in a write hold's list
  std::vector<u32> pins_;  // by read holds
  std::vector<u32> kids_;
  std::vector<u8> chunk_seen_;
};

}  // namespace

std::vector<std::string> check_table(const Segment& segment) { return Checker(segment).run(); }

Stats count_stats(const Segment& s, bool count_pinned) {
  const Geometry& g = s.geometry();
  const Control& c = s.control();
  Stats stats;
  stats.page_count = g.page_count;
  stats.free = std::min<u64>(load(c.free_count), g.page_count);
  stats.reserved = std::min<u64>(load(c.reserved_count), g.page_count - stats.free);
  stats.ready = g.page_count - stats.free - stats.reserved;
  for (u32 i = 0; i < g.slot_count; ++i) stats.sessions += load(s.slot(i).id) != 0;
  for (u32 i = 0; i < static_cast<u32>(Counter::count); ++i)
    stats.counters[i] = load(c.counters[i]);
  std::vector<bool> seen(count_pinned ? g.page_count : 0);
  for (u32 start = 0; start < seen.size(); ++start) {
    const Entry& e = s.entry(start);
    const u64 use = load(e.use);
    const bool reserved = Use::state(use) == PageState::reserved;
    if (!reserved && (Use::state(use) != PageState::ready || Use::pins(use) == 0)) continue;
    // What a pin or a reservation stands on can not be evicted before it goes.
    for (u32 page = reserved ? e.parent : start; page < g.page_count && !seen[page];) {
      seen[page] = true;
      stats.pinned += Use::state(load(s.entry(page).use)) == PageState::ready;
      page = s.entry(page).parent;
    }
  }
  stats.pinned = std::min(stats.pinned, stats.ready);
  stats.evictable = stats.ready - stats.pinned;
  return stats;
}

std::vector<NamespaceInfo> list_namespaces(const Segment& s) {
  const Geometry& g = s.geometry();
  std::vector<u64> pages(g.namespace_count, 0);
  for (u32 page = 0; page < g.page_count; ++page) {
    const Entry& e = s.entry(page);
    const u64 use = load(e.use);
    if (Use::state(use) == PageState::ready && (use & Use::kKeyed) != 0 && s.current(e, use) &&
        e.ns < g.namespace_count)
      ++pages[e.ns];
  }
  std::vector<NamespaceInfo> out;
  for (u32 i = 0; i < g.namespace_count; ++i) {
    const NamespaceRecord& r = s.ns(i);
    if (r.used == 0) continue;
    char label[sizeof r.label + 1] = {};
    std::memcpy(label, r.label, sizeof r.label);
    out.push_back({i, std::string(reinterpret_cast<const char*>(r.digest), 32), label,
                   Guarded::value(r.epoch), pages[i]});
  }
  return out;
}

std::vector<SlotInfo> list_sessions(const Segment& s, const Witness& witness) {
  std::vector<SlotInfo> out;
  const u64 now = monotonic_ns();
  for (u32 i = 0; i < s.geometry().slot_count; ++i) {
    const Slot& slot = s.slot(i);
    const u64 id = load(slot.id);
    if (id == 0) continue;
    char command[sizeof slot.command + 1] = {};
    std::memcpy(command, slot.command, sizeof slot.command);
    SlotInfo info{id,
                  slot.pid,
                  command,
                  static_cast<double>(slot.opened_ns) * 1e-9,
                  static_cast<u32>(slot.ns),
                  !witness.gone(kLivenessBase + id, 1),
                  0,
                  0,
                  0};
    for (u32 r = 0; r < s.geometry().hold_count; ++r) {
      const Hold& h = s.hold(r);
      if (load(h.number) == 0 || h.taker != id) continue;
      ++info.holds;
      if (h.kind == static_cast<u32>(HoldKind::write)) info.reserved_pages += h.left;
      if (now > h.stamp)
        info.oldest_hold_s =
            std::max(info.oldest_hold_s, static_cast<double>(now - h.stamp) * 1e-9);
    }
    out.push_back(info);
  }
  return out;
}

}  // namespace hostcache
