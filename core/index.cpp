#include "index.h"

namespace hostcache {

bool same_key(const Entry& e, const u64 key[4]) {
  // Word by word and atomically: a reader without the lock may race with a writer, whose version
  // then tells.
  const auto word = [&e](int i) {
    return std::atomic_ref<u64>(const_cast<u64&>(e.key[i])).load(std::memory_order_relaxed);
  };
  return word(0) == key[0] && word(1) == key[1] && word(2) == key[2] && word(3) == key[3];
}

template <class Visit>
bool Index::each(const Hash& hash, Visit visit) const {
  u32 at = home(hash);
  for (u32 step = 0; step < kProbeLimit; ++step, at = after(at)) {
    const Bucket& b = s_.bucket(at);
    for (u32 i = 0; i < kBucketSlots; ++i)
      if (load(b.tags[i]) == hash.tag && visit(load(b.pages[i]))) return true;
    if (load(b.passed) == 0) return false;
  }
  return false;
}

u32 Index::find(const u64 key[4], const Hash& hash) const {
  u32 found = kNone;
  each(hash, [&](u32 page) {
    const Entry& e = s_.entry(page);
    if (page >= s_.geometry().page_count || (e.use & Use::kKeyed) == 0 || !same_key(e, key))
      return false;
    found = page;
    return true;
  });
  return found;
}

Ready Index::probe(const u64 key[4], const Hash& hash) const {
  Ready ready;
  each(hash, [&](u32 page) {
    if (page >= s_.geometry().page_count) return false;
    const Entry& e = s_.entry(page);
    // Version first and last: it rises after the page leaves READY and before its key changes,
    // so an equal version means that state and key belong together.
    const u32 version = load(e.version);
    const u64 use = load(e.use);
    if (Use::state(use) != PageState::ready || (use & Use::kKeyed) == 0) return false;
    if (!s_.current(e, use) || !same_key(e, key)) return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (load(e.version) != version) return false;
    ready = {page, version};
    return true;
  });
  return ready;
}

bool Index::pending(const u64 key[4], const Hash& hash) const {
  return each(hash, [&](u32 page) {
    if (page >= s_.geometry().page_count) return false;
    const Entry& e = s_.entry(page);
    const u64 use = load(e.use);
    return Use::state(use) == PageState::reserved && (use & Use::kKeyed) != 0 &&
           s_.current(e, use) && same_key(e, key);
  });
}

void Index::prefetch_entry(const Hash& hash) const {
  const Bucket& b = s_.bucket(home(hash));
  for (u32 i = 0; i < kBucketSlots; ++i)
    if (load(b.tags[i]) == hash.tag) return __builtin_prefetch(&s_.entry(load(b.pages[i])));
}

bool Index::insert(Txn& txn, const Hash& hash, u32 page) const {
  const u32 first = home(hash);
  u32 at = first;
  for (u32 step = 0; step < kProbeLimit; ++step, at = after(at)) {
    Bucket& b = s_.bucket(at);
    for (u32 i = 0; i < kBucketSlots; ++i) {
      if (b.tags[i] != 0) continue;
      put(b.pages[i], page);  // dead until the tag is there
      for (u32 full = first; full != at; full = after(full)) {
        Bucket& passed = s_.bucket(full);
        txn.store(passed.passed, static_cast<u16>(passed.passed + 1));
      }
      txn.store(b.tags[i], hash.tag);
      return true;
    }
    if (b.passed == 0xFFFF) return false;
  }
  return false;
}

void Index::erase(Txn& txn, u32 page) const {
  const Hash hash = hash_key(s_.entry(page).key);
  const u32 first = home(hash);
  u32 at = first;
  for (u32 step = 0; step < kProbeLimit; ++step, at = after(at)) {
    Bucket& b = s_.bucket(at);
    for (u32 i = 0; i < kBucketSlots; ++i) {
      if (b.tags[i] != hash.tag || b.pages[i] != page) continue;
      txn.store(b.tags[i], u16{0});
      for (u32 full = first; full != at; full = after(full)) {
        Bucket& passed = s_.bucket(full);
        if (passed.passed != 0) txn.store(passed.passed, static_cast<u16>(passed.passed - 1));
      }
      return;
    }
    if (b.passed == 0) return;
  }
}

}  // namespace hostcache
