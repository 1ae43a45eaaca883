// Every byte of a segment. Nothing else in the core names an offset.
//
//   0        4096       12288     16384                                        pages_at
//   | header | fragments | control | slots | namespaces | holds | chunks | chunk stack |
//   | log | entries | buckets | ring | free stack | (to the next 4 KiB) | page 0 | page 1 | ...
//   2^40 + id : one byte for each session, never stored, only locked (the liveness byte)
//
// Words are little-endian. A page is known by its number, 0 .. page_count - 1; page i lies at
// pages_at + i * page_bytes. Three kinds of words, and a word never changes its kind:
//
//   logged    stored only under the table lock, through Txn::store, which keeps the old value
//   rising    only ever grows, may be stored without the lock, is never undone
//   dead      nothing leads to it (a FREE page's entry, what lies beyond a cursor, an unpublished
//             record): written plainly, then published by one logged store
#pragma once

#include <cstddef>
#include <cstdint>

namespace hostcache {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u64 kMagic = 0x48434143'54534F48ULL;  // "HOSTCACH" as bytes in memory
constexpr u32 kFormat = 1;
constexpr u32 kKindPages = 1;  // what the segment holds: KV pages

constexpr u32 kNone = 0xFFFF'FFFFU;  // no page, no chunk
constexpr u64 kMemoryPage = 4096;
constexpr u64 kLivenessBase = u64{1} << 40;  // of the liveness bytes, in every format

constexpr u32 kKeyBytes = 32;
constexpr u32 kMaxFragments = 1024;
constexpr u32 kMaxParts = 64;
constexpr u32 kMaxHoldPages = 16384;  // of one hold
constexpr u32 kStepPages = 1024;      // given back, evicted or swept in one transaction
constexpr u32 kMaxPages = 1U << 30;
constexpr u32 kSlots = 256;
constexpr u32 kNamespaces = 256;
constexpr u32 kHolds = 4096;

// ---------------------------------------------------------------- header (written by the maker)

// The first 48 bytes lie here in every format for ever, so that any version can tell whose file
// this is and, with the liveness bytes, whether anybody lives in it.
struct Prefix {
  u64 magic;
  u32 format;
  u32 kind;
  u64 random;  // drawn by the maker: tells two segments of one name apart
  u64 size;    // of the file, bytes
  u8 boot_id[16];
};
static_assert(sizeof(Prefix) == 48);

// Follows from what the maker was asked for; nothing here changes afterwards.
struct Geometry {
  u64 page_bytes;
  u32 page_count;
  u32 page_tokens;
  u32 fragment_count;
  u32 slot_count;
  u32 namespace_count;
  u32 hold_count;
  u32 chunk_count;
  u32 log_capacity;
  u32 bucket_count;
  u32 ring_capacity;  // a power of two, at least twice page_count
  u64 slots_at;
  u64 namespaces_at;
  u64 holds_at;
  u64 chunks_at;
  u64 chunk_stack_at;
  u64 log_at;
  u64 entries_at;
  u64 buckets_at;
  u64 ring_at;
  u64 free_stack_at;
  u64 pages_at;
  u64 size;
};
static_assert(sizeof(Geometry) == 48 + 12 * 8 + 0);

struct Header {
  Prefix prefix;
  Geometry geometry;
  u64 check;  // of prefix, geometry and fragments: damage to any of them refuses the file
};
constexpr u64 kFragmentsAt = 4096;  // u64[kMaxFragments]: bytes of each fragment, in order
constexpr u64 kControlAt = kFragmentsAt + kMaxFragments * 8;
constexpr u64 kSlotsAt = kControlAt + 4096;
static_assert(sizeof(Header) <= kFragmentsAt);
static_assert(kSlotsAt == 16384);

// ---------------------------------------------------------------- control

// Each word that many touch has a cache line of its own.
struct Control {
  // rising or owned by the lock itself, never logged
  alignas(64) u64 lock;          // id << 1 | waiters; 0: free
  alignas(64) u64 starved;       // CLOCK_MONOTONIC ns written by a waiter older than 0.5 ms
  alignas(64) u64 txn;           // number of the transaction; each log record carries it
  u64 log_count;                 // records that a death would undo; 0: closed
  alignas(64) u64 epoch;         // of the cache, guarded (see Guarded)
  alignas(64) u64 next_id;       // of sessions; raised under the attach lock only
  u64 next_id_check;             // its complement
  u64 hold_counter;              // holds taken so far; half of a hold's number
  u64 hold_counter_check;        // its complement
  u64 stale_left;                // entries that a clear has not looked at yet (a hint)
  u64 damaged;                   // not 0: a log record or link could not be followed
  u64 replaced;                  // times that a damaged or older segment was replaced by this name
  alignas(64) u64 counters[16];  // see Counter
  // logged
  alignas(64) u64 ring_old;  // cursors of the ring: never wrapped, slot is cursor % capacity
  u64 ring_young;
  u64 free_count;
  u64 chunk_free_count;
  u64 reserved_count;  // pages RESERVED
  u64 holds_used;
};
static_assert(sizeof(Control) <= 4096);

enum class Counter : u32 {  // rising; pages or events since the cache was made
  hits,
  misses,
  commits,
  aborts,
  evictions,
  repairs,
  refused,
  lock_timeouts,
  count
};

// An epoch carries its complement in the upper half, so that one atomic add raises both and a
// flipped bit shows: adding 2^64 - 2^32 + 1 adds 1 below and takes 1 above.
struct Guarded {
  static constexpr u64 kRaise = 0xFFFF'FFFF'0000'0001ULL;
  static constexpr u32 kLast = 0x7FFF'0000U;  // an epoch at its end refuses to be raised
  static constexpr u64 make(u32 value) { return u64{~value} << 32 | value; }
  static constexpr u32 value(u64 word) { return static_cast<u32>(word); }
  static constexpr bool valid(u64 word) { return word == make(static_cast<u32>(word)); }
};
static_assert(Guarded::make(7) + Guarded::kRaise == Guarded::make(8));

// ---------------------------------------------------------------- sessions

struct Slot {
  u64 id;          // rising: taken by CAS from 0, freed by CAS to 0 after the sweep has closed
  u32 mutex_word;  // byte in `mutex` of the futex word, kNone: only the liveness byte tells death
  u32 pid;         // for people to read, never judged by
  u64 opened_ns;   // CLOCK_REALTIME, for people
  char command[32];
  u64 ns;            // logged: number of the session's namespace record
  u64 max_reserved;  // pages it may have RESERVED at a time; 0: no limit
  u64 spare[6];
  alignas(64) unsigned char mutex[64];  // the session's own robust pthread mutex
  u64 group;  // reserved for groups (sessions that hold together); 0: a session alone
  u64 spare2[7];
};
static_assert(sizeof(Slot) == 256);

struct NamespaceRecord {
  u64 epoch;      // rising, guarded
  u64 used;       // logged: 0 free, 1 in use; record 0 is "opened without" and always in use
  u64 digest[4];  // logged
  u64 label[8];   // logged: text for people
  u64 spare[2];
};
static_assert(sizeof(NamespaceRecord) == 128);

// ---------------------------------------------------------------- holds

enum class HoldKind : u32 { read = 1, write = 2 };

// A part is open (nobody has claimed it), claimed, or finished (in neither mask). In the
// transaction in which both masks become 0 the hold ends: what the index still leads to is
// published (write) or unpinned (read). A record with both masks 0 that anybody but the holder
// of the lock can see was left by a death, and whoever sweeps finishes it.
struct Hold {
  u64 number;       // logged: counter << 16 | record index; 0: free. Never used again
  u64 taker;        // session id
  u64 open;         // logged
  u64 claimed;      // logged
  u64 claimer;      // logged: session of part 0 while there is one part; else see claim_chunk
  u64 stamp;        // CLOCK_MONOTONIC ns at reserve
  u64 pages_check;  // mix of all page numbers: what a token must name
  u64 heir_number;  // logged: of the hold whose first page follows `heir_after` in its prompt
  u32 heir_after;
  u32 heir_page;
  u32 kind;  // logged (a commit that keeps turns write into read)
  u32 parts;
  u32 page_count;   // listed pages: those being written, or those pinned
  u32 left;         // logged: listed pages not yet given back
  u32 first_chunk;  // logged
  u32 claim_chunk;  // chunks of claimers, where there are two parts or more
  u32 ns;
  u32 epoch;  // of the miss that this was computed from
  u32 ended;  // logged: nothing is published any more
  u32 spare;
  u64 group;  // reserved for groups
  u64 spare2;
};
static_assert(sizeof(Hold) == 128);

constexpr u32 kChunkPages = 14;
constexpr u32 kChunkClaims = 7;
// A piece of a hold's list: page numbers, or the sessions that claimed its parts.
struct Chunk {
  u32 next;
  u32 spare;
  union {
    u32 pages[kChunkPages];
    u64 claims[kChunkClaims];
  };
};
static_assert(sizeof(Chunk) == 64);

// ---------------------------------------------------------------- undo log

struct LogRecord {
  u64 place;  // offset in the segment << 4 | width in bytes (1, 2, 4, 8)
  u64 old;
  u64 txn;
};
static_assert(sizeof(LogRecord) == 24);

// ---------------------------------------------------------------- pages

enum class PageState : u32 { free = 0, reserved = 1, ready = 2 };

// One cache line a page; its index is the page number.
//
//   use word, 64 bits, logged as one:
//   | epoch 32 | pins 20 | uses 6 | keyed 1 | unspilled 1 | used 1 | queued 1 | state 2 |
//    63      32 31     12 11    6     5          4           3       2         1      0
//
// keyed: the index leads to this page. queued: the page number stands in the ring, once; it may
// still do so when the page is FREE or RESERVED again, and the ring drops it when it meets it.
struct Entry {
  u64 key[4];   // written while the page is FREE; never changes while it is not
  u64 use;      // logged
  u32 parent;   // logged; the page before in the same prompt, kNone: none
  u32 kids;     // logged; pages whose parent this is
  u64 hold;     // number of the hold that fills or filled it
  u32 version;  // rising: after each leaving of READY or RESERVED, before the key may change
  u16 ns;       // namespace record whose epoch counts
  u16 spare;
};
static_assert(sizeof(Entry) == 64);

struct Use {
  static constexpr u64 kStateMask = 3;
  static constexpr u64 kQueued = 1 << 2;
  static constexpr u64 kUsed = 1 << 3;
  static constexpr u64 kUnspilled = 1 << 4;
  static constexpr u64 kKeyed = 1 << 5;
  static constexpr u32 kUsesShift = 6;
  static constexpr u64 kUsesMask = u64{63} << kUsesShift;
  static constexpr u32 kPinShift = 12;
  static constexpr u64 kPin = u64{1} << kPinShift;
  static constexpr u32 kMaxPins = (1U << 20) - 1;
  static constexpr u64 kPinMask = u64{kMaxPins} << kPinShift;

  static constexpr PageState state(u64 use) { return static_cast<PageState>(use & kStateMask); }
  static constexpr u32 pins(u64 use) { return static_cast<u32>(use >> kPinShift) & kMaxPins; }
  static constexpr u32 epoch(u64 use) { return static_cast<u32>(use >> 32); }
  static constexpr u64 with_state(u64 use, PageState s) {
    return (use & ~kStateMask) | static_cast<u64>(s);
  }
  static constexpr u64 fresh(PageState s, u32 epoch) {
    return u64{epoch} << 32 | static_cast<u64>(s);
  }
};

// ---------------------------------------------------------------- index

constexpr u32 kBucketSlots = 10;
constexpr u32 kProbeLimit = 64;  // buckets looked at for one key, at most

// One cache line: ten tags and the pages they lead to. No tombstones and nothing moves, so a
// lock-free reader misses no key that is there all the time: `passed` counts the keys that found
// this bucket full, and a search ends at the first bucket that nobody passed.
struct Bucket {
  u16 tags[kBucketSlots];  // logged; 0: empty
  u16 passed;              // logged
  u16 spare;
  u32 pages[kBucketSlots];  // dead while the tag is 0
};
static_assert(sizeof(Bucket) == 64);

struct Hash {
  u64 spot;  // which bucket
  u16 tag;   // never 0
};

// All four words are mixed: callers' keys need not be random in each of them. Multiply and
// rotate by odd constants, then the finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
inline Hash hash_key(const u64 key[4]) {
  u64 h = key[0] * 0x9E37'79B9'7F4A'7C15ULL;
  h = (h ^ (h >> 29) ^ key[1]) * 0xBF58'476D'1CE4'E5B9ULL;
  h = (h ^ (h >> 31) ^ key[2]) * 0x94D0'49BB'1331'11EBULL;
  h = (h ^ (h >> 30) ^ key[3]) * 0xD6E8'FEB8'6659'FD93ULL;
  h ^= h >> 32;
  h *= 0xBF58'476D'1CE4'E5B9ULL;
  h ^= h >> 29;
  const u16 tag = static_cast<u16>(h & 0xFFFF);
  return {h, tag == 0 ? u16{1} : tag};
}

inline u32 home_bucket(u64 spot, u32 bucket_count) {
  return static_cast<u32>(((spot >> 32) * bucket_count) >> 32);
}

}  // namespace hostcache
