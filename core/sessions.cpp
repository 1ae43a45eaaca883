#include "sessions.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "check.h"
#include "errors.h"

namespace hostcache {

namespace {

constexpr u64 kJoinBoundNs = 2'000'000'000;
constexpr u64 kAgainNs = 2'000'000;
constexpr u64 kLeaveBoundNs = 1'000'000'000;

// Through the description that holds the liveness lock one memory page is mapped and nothing
// else: the mapping keeps a live session alive when foreign code closes all descriptors, and a
// forked child does not get it.
void hold_byte(const MappedSegment& map, Identity& me) {
  const std::string self = "/proc/self/fd/" + std::to_string(map.fd());
  KILL_POINT();
  me.live = PrivateFd(self, O_RDWR | O_CLOEXEC);
  if (!me.live) throw os_error("open the segment of '" + map.name() + "' again", errno);
  if (!ofd_lock(me.live.get(), kLivenessBase + me.id, 1) ||
      !ofd_held(map.fd(), kLivenessBase + me.id, 1))
    throw Error(Code::unsupported, "the file system of " + map.path() +
                                       " does not show open-file-description locks; use a tmpfs");
  KILL_POINT();
  // No fork between the two: a child that inherits the page would keep the byte.
  const std::lock_guard<std::mutex> no_fork(fork_mutex());
  me.live_page = mmap(nullptr, kMemoryPage, PROT_READ, MAP_SHARED, me.live.get(), 0);
  if (me.live_page == MAP_FAILED) {
    me.live_page = nullptr;
    throw os_error("mmap the header of '" + map.name() + "'", errno);
  }
  madvise(me.live_page, kMemoryPage, MADV_DONTFORK);
}

void let_byte_go(Identity& me) {
  KILL_POINT();
  if (me.live_page != nullptr) munmap(me.live_page, kMemoryPage);
  me.live_page = nullptr;
  KILL_POINT();
  me.live.reset();
  KILL_POINT();
}

std::unique_ptr<Identity> join(const MappedSegment& map) {
  Control& c = map.segment().control();
  auto me = std::make_unique<Identity>();
  // Under the attach lock: value first, complement second, so a death between shows as one apart.
  me->id = c.next_id;
  put(c.next_id, me->id + 1);
  put(c.next_id_check, ~(me->id + 1));
  try {
    hold_byte(map, *me);
  } catch (...) {
    let_byte_go(*me);
    throw;
  }
  return me;
}

}  // namespace

Session::Session(std::shared_ptr<MappedSegment> map, const AttachLock&)
    : map_(std::move(map)),
      s_(map_->segment()),
      index_(s_),
      order_(s_, index_),
      holds_(s_, index_, order_),
      lock_(s_, map_->witness()),
      generation_(fork_generation()) {
  take_identity();
}

Session::~Session() { leave(); }

void Session::take_identity() {
  // Asked before our own byte is taken: two that start together must not both see each other and
  // leave the table unverified. The attach lock keeps the second one waiting.
  const bool alone = !map_->anybody_lives();
  identities_.push_back(join(*map_));
  Identity& me = *identities_.back();
  try {
    if (!map_->name_leads_here()) throw Moved{};
    if (alone) verify_alone(me);
    if (!take_slot(me)) {
      sweep();  // under the table lock, which a session without a slot holds by its byte alone
      if (!take_slot(me)) throw no_slot();
    }
  } catch (...) {
    let_byte_go(me);
    identities_.pop_back();
    throw;
  }
}

Error Session::no_slot() const {
  const std::string slots = std::to_string(s_.geometry().slot_count);
  return Error(Code::no_room, slots + " of the " + slots + " session slots of cache '" +
                                  map_->name() +
                                  "' are taken by living sessions; close some (hostcache "
                                  "stat " +
                                  map_->name() + in_root(map_->root()) + " lists them)");
}

// Nobody lives: undo an open log, verify every invariant, and give back all that was held. Who
// dies in it leaves the next to verify.
void Session::verify_alone(const Identity& me) const {
  Control& c = s_.control();
  if (load(c.lock) != 0 && !roll_back(s_)) put(c.damaged, u64{1});
  put(c.lock, me.id << 1);  // a death from here on is the death of a lock holder
  const std::vector<std::string> findings = check_table(s_);
  if (!findings.empty()) {
    std::string what = "cache '" + map_->name() + "' does not verify: " + findings.front();
    if (findings.size() > 1) what += " (and " + std::to_string(findings.size() - 1) + " more)";
    throw Error(Code::damaged, what + "; hostcache check " + map_->name() + in_root(map_->root()) +
                                   " lists all, hostcache rm " + map_->name() +
                                   in_root(map_->root()) + " removes it");
  }
  u64 dead = 0;
  {
    Txn txn(s_);
    holds_.drop_all(txn);
    for (u32 i = 0; i < s_.geometry().slot_count; ++i) txn.store(s_.slot(i).ns, u64{0});
  }
  for (u32 i = 0; i < s_.geometry().slot_count; ++i) {
    Slot& slot = s_.slot(i);
    if (slot.id == 0) continue;
    ++dead;
    put(slot.mutex_word, kNone);
    put(slot.id, u64{0});
  }
  add(c.counters[static_cast<u32>(Counter::repairs)], dead);
  put(c.lock, u64{0});
}

bool Session::take_slot(Identity& me) const {
  for (u32 i = 0; i < s_.geometry().slot_count; ++i) {
    Slot& slot = s_.slot(i);
    if (load(slot.id) != 0 || !swap_if(slot.id, u64{0}, me.id)) continue;
    KILL_POINT();
    slot.pid = static_cast<u32>(getpid());
    slot.opened_ns = realtime_ns();
    slot.group = 0;
    slot.max_reserved = max_reserved_;
    std::memset(slot.command, 0, sizeof slot.command);
    const std::string command = read_text("/proc/self/comm");
    std::strncpy(slot.command, command.substr(0, command.find('\n')).c_str(),
                 sizeof slot.command - 1);
    TableLock::init_mutex(slot);
    me.slot = i;
    return true;
  }
  return false;
}

// A session leaves like a death in order: byte, then slot. `swept`: nothing of it is left in the
// table. Without it the slot stays for whoever sweeps.
void Session::let_go(Identity& me, bool swept) const {
  Slot& slot = s_.slot(me.slot);
  // Before the byte: afterwards the slot may be another's.
  put(slot.mutex_word, kNone);
  let_byte_go(me);
  if (swept) swap_if(slot.id, me.id, u64{0});
}

bool Session::quiet() const {
  const u64 until = monotonic_ns() + kLeaveBoundNs;
  while (inside != 0) {
    if (monotonic_ns() > until) return false;
    sleep_ns(kAgainNs / 20);
  }
  return true;
}

// In steps, letting the lock go between them; false where it can not be had.
bool Session::give_back(const Identity& me) {
  for (bool done = false; !done;) {
    const Guard guard(*this, Guard::Patience::leave);
    if (!guard || has_pending()) return false;
    Txn txn(s_);
    done = holds_.sweep_step(txn, me.id);
    if (done) txn.store(s_.slot(me.slot).ns, u64{0});
  }
  return true;
}

void Session::leave() {
  if (!ours() || left_.exchange(true)) return;
  // From here on no thread of ours begins a piece of work. Letting the byte go while one is inside
  // would make a living holder read as dead, so a thread that does not come out keeps the session.
  if (!quiet()) return;
  bool swept = true;
  for (const auto& me : identities_) swept = swept && give_back(*me);
  for (auto& me : identities_) let_go(*me, swept);
}

// A thread of this session died inside the lock. Its id may still stand in the lock word, so the
// session goes on under a new one; the old id is let go with the session.
bool Session::renew() {
  const std::lock_guard one(identities_mutex_);
  try {
    const AttachLock lock(map_->root(), map_->name(), nullptr);
    take_identity();
    return true;
  } catch (const Moved&) {
    return false;
  } catch (const Error&) {
    return false;  // busy for ever: every call answers as if the cache were empty
  }
}

Session::Guard::Guard(Session& session, Patience patience) : session_(session) {
  // Counted before the marks are looked at: who closes or leaves sets them first and then looks
  // at the count.
  ++session_.inside;
  if (session_.left_ && patience != Patience::leave) return;
  if (session_.closing && patience == Patience::take) return;
  try {
    enter(patience == Patience::try_once ? 0 : monotonic_ns() + kLockBoundNs);
  } catch (...) {  // no memory: the destructor will not run
    if (held_) session_.lock_.release(*me_);
    --session_.inside;
    throw;
  }
}

void Session::Guard::enter(u64 deadline) {
  for (int tries = 0; tries < 2 && !held_; ++tries) {
    {
      const std::lock_guard one(session_.identities_mutex_);
      me_ = session_.identities_.back().get();
    }
    const Acquired got = session_.lock_.acquire(*me_, deadline);
    held_ = got == Acquired::yes;
    if (got != Acquired::owner_died || deadline == 0 || !session_.renew()) break;
  }
  if (!held_) {
    if (deadline != 0) session_.count(Counter::lock_timeouts);
    return;
  }
  session_.name_namespace(*me_);
  session_.make_pending();
}

// In the order in which they were called; one that fails for want of memory stays the next.
void Session::make_pending() {
  for (;;) {
    std::shared_ptr<Op> op;
    {
      const std::lock_guard<std::mutex> one(pending_mutex_);
      if (pending_.empty()) return;
      op = pending_.front();
    }
    make(*op);
    const std::lock_guard<std::mutex> one(pending_mutex_);
    pending_.pop_front();
  }
}

// A session that goes on under a new id names its namespace again.
void Session::name_namespace(const Identity& me) {
  if (me.slot == kNone || s_.slot(me.slot).ns == ns_) return;
  Txn txn(s_);
  txn.store(s_.slot(me.slot).ns, u64{ns_});
}

Session::Guard::~Guard() {
  if (held_) session_.lock_.release(*me_);
  --session_.inside;
}

void Session::make(Op& op) {
  Txn txn(s_);
  switch (op.kind) {
    case Op::Kind::finish:
      op.result = holds_.finish(txn, op.number, op.part, op.session, op.ok, op.count);
      break;
    case Op::Kind::keep:
      op.result = holds_.finish_and_keep(txn, op.number, op.session, op.count);
      break;
    case Op::Kind::spoil:
      holds_.spoil(txn, op.number, op.part, op.session);
      break;
    case Op::Kind::end:
      holds_.end(txn, op.number);
      break;
    case Op::Kind::after_keep:
      finish_kept(txn, op);
      break;
  }
  txn.close();
  count(Counter::commits, op.result.published);
  op.done = true;
}

// The views that outlived a commit are gone: what it pinned, and what it could not publish, goes.
void Session::finish_kept(Txn& txn, const Op& op) {
  const Finished& kept = op.of->result;
  if (!kept.accepted) {
    op.of->result = holds_.finish(txn, op.number, op.part, op.session, true, op.count);
    count(Counter::commits, op.of->result.published);
    return;
  }
  if (kept.kept != 0) holds_.finish(txn, kept.kept, 0, op.session, true, 0);
  if (!kept.whole) holds_.finish(txn, op.number, op.part, op.session, false, 0);
}

bool Session::submit(const std::shared_ptr<Op>& op, Guard::Patience patience) {
  {
    const std::lock_guard<std::mutex> one(pending_mutex_);
    pending_.push_back(op);
  }
  return drain(patience) && op->done;
}

bool Session::has_pending() {
  const std::lock_guard<std::mutex> one(pending_mutex_);
  return !pending_.empty();
}

bool Session::sweep_one(u32 i, u64 id) {
  Slot& slot = s_.slot(i);
  for (;;) {
    const Guard guard(*this, Guard::Patience::wait);
    if (!guard) return false;
    if (load(slot.id) != id) return false;
    bool done = false;
    {
      Txn txn(s_);
      done = holds_.sweep_step(txn, id);
      if (done) txn.store(slot.ns, u64{0});
    }
    if (!done) continue;
    // The slot last, and after the transaction that emptied it has closed.
    put(slot.mutex_word, kNone);
    swap_if(slot.id, id, u64{0});
    count(Counter::repairs);
    return true;
  }
}

u32 Session::sweep() {
  u32 swept = 0;
  for (u32 i = 0; i < s_.geometry().slot_count; ++i) {
    const u64 id = load(s_.slot(i).id);
    // The liveness byte alone: other threads of the dead may still be storing bytes until it goes.
    if (id != 0 && lock_.session_dead(id) && sweep_one(i, id)) ++swept;
  }
  return swept;
}

// What a failed allocation left half given back while its session lives on.
void Session::finish_orphans() {
  for (bool done = false; !done;) {
    const Guard guard(*this, Guard::Patience::wait);
    if (!guard) return;
    Txn txn(s_);
    done = holds_.sweep_step(txn, 0);
  }
}

void Session::drop_stale() {
  Control& c = s_.control();
  const u64 left = load(c.stale_left);
  if (left == 0) return;
  const Guard guard(*this, Guard::Patience::wait);
  if (!guard) return;
  const u32 pages = s_.geometry().page_count;
  const u32 from = left > pages ? 0 : pages - static_cast<u32>(left);
  Txn txn(s_);
  const u32 reached = order_.drop_stale(txn, from, kStepPages);
  txn.close();
  // A clear in between starts anew: then the hint is not ours to lower.
  swap_if(c.stale_left, left, u64{pages - reached});
}

void Session::set_max_reserved(u64 pages) {
  max_reserved_ = pages;
  put(s_.slot(identities_.back()->slot).max_reserved, pages);
}

bool Session::claim_namespace(const u8 digest[32], const std::string& label) {
  u64 words[4];
  std::memcpy(words, digest, sizeof words);
  const u32 records = s_.geometry().namespace_count;
  u32 chosen = 0;
  for (u32 i = 1; i < records && chosen == 0; ++i)
    if (s_.ns(i).used != 0 && std::memcmp(s_.ns(i).digest, words, sizeof words) == 0) chosen = i;
  const bool known = chosen != 0;
  for (u32 i = 1; i < records && chosen == 0; ++i)
    if (s_.ns(i).used == 0) chosen = i;
  std::vector<bool> named(records, false);
  for (u32 i = 0; i < s_.geometry().slot_count; ++i)
    if (load(s_.slot(i).id) != 0) named[s_.slot(i).ns % records] = true;
  for (u32 i = 1; i < records && chosen == 0; ++i)
    if (!named[i] && Guarded::value(load(s_.ns(i).epoch)) < Guarded::kLast) chosen = i;
  if (chosen == 0) return false;
  NamespaceRecord& r = s_.ns(chosen);
  // Raised before the digest is written: pages of the former owner of the number are void.
  if (!known && r.used != 0) {
    add(r.epoch, Guarded::kRaise);
    put(s_.control().stale_left, u64{s_.geometry().page_count});
  }
  Txn txn(s_);
  if (!known) {
    u64 text[8] = {};
    std::memcpy(text, label.data(), std::min(label.size(), sizeof text));
    for (u32 i = 0; i < 4; ++i) txn.store(r.digest[i], words[i]);
    for (u32 i = 0; i < 8; ++i) txn.store(r.label[i], text[i]);
    txn.store(r.used, u64{1});
  }
  txn.store(s_.slot(identities_.back()->slot).ns, u64{chosen});
  ns_ = chosen;
  return true;
}

void Session::join_namespace(const u8 digest[32], const std::string& label) {
  const u64 until = monotonic_ns() + kJoinBoundNs;
  do {
    const Guard guard(*this, Guard::Patience::wait);
    if (!guard) {
      sleep_ns(kAgainNs);
      continue;
    }
    if (claim_namespace(digest, label)) return;
    const std::string records = std::to_string(s_.geometry().namespace_count - 1);
    throw Error(Code::no_room, records + " of the " + records + " namespace records of cache '" +
                                   map_->name() +
                                   "' are named by living sessions; close sessions of namespaces "
                                   "that are not needed");
  } while (monotonic_ns() < until);
  throw Error(Code::busy, "the table lock of cache '" + map_->name() +
                              "' could not be had in 2 s; is a process stopped inside it? "
                              "hostcache stat " +
                              map_->name() + in_root(map_->root()) + " lists the sessions");
}

}  // namespace hostcache
