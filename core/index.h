// Which page has a key: buckets of ten tags, open addressing by the line.
//
// A page is led to, or it is not: the `keyed` bit of its entry changes in the transaction that
// sets or clears its slot here, by the callers of insert and erase.
#pragma once

#include "lock.h"
#include "segment.h"

namespace hostcache {

inline void load_key(u64 out[4], const u8* key) { __builtin_memcpy(out, key, kKeyBytes); }

struct Ready {
  u32 page = kNone;
  u32 version = 0;
};

class Index {
 public:
  explicit Index(const Segment& segment) : s_(segment) {}

  // Under the lock. The page that the index leads to for a key, kNone without one.
  u32 find(const u64 key[4], const Hash& hash) const;
  // False where the probe limit or a counter is reached: the key gets no page.
  bool insert(Txn& txn, const Hash& hash, u32 page) const;
  void erase(Txn& txn, u32 page) const;

  // Without the lock. A yes was true at some instant between call and return; a no may be false
  // while the page is being replaced. `version` is that of the entry when it was seen READY.
  Ready probe(const u64 key[4], const Hash& hash) const;
  // The same for what another session has RESERVED in the current epoch.
  bool pending(const u64 key[4], const Hash& hash) const;

  void prefetch_bucket(const Hash& hash) const { __builtin_prefetch(&s_.bucket(home(hash))); }
  // The entry that the first matching tag of the home bucket leads to.
  void prefetch_entry(const Hash& hash) const;

 private:
  u32 home(const Hash& hash) const { return home_bucket(hash.spot, s_.geometry().bucket_count); }
  u32 after(u32 bucket) const { return bucket + 1 == s_.geometry().bucket_count ? 0 : bucket + 1; }
  // Calls `visit(page)` for each slot with the tag until it answers true; whether one did.
  template <class Visit>
  bool each(const Hash& hash, Visit visit) const;

  const Segment& s_;
};

bool same_key(const Entry& entry, const u64 key[4]);

}  // namespace hostcache
