// reserve: pages for keys that nobody has, parents for pages, room by eviction.
#include <algorithm>

#include "cache.h"

namespace hostcache {

namespace {

constexpr int kEvictTries = 3;
constexpr u64 kRecordsEach = 2 * kProbeLimit + 32;  // log records that reserving one key can take

class Reserver {
 public:
  Reserver(const std::shared_ptr<Session>& session, const ReserveRequest& request,
           u64 pending_bound_ns, u64 max_reserved)
      : session_(session),
        request_(request),
        keys_(request.keys),
        s_(session->segment()),
        index_(session->index()),
        order_(session->order()),
        holds_(session->holds()),
        bound_(pending_bound_ns),
        max_reserved_(max_reserved) {
    hashed_.resize(keys_.count);
    for (size_t i = 0; i < keys_.count; ++i) {
      load_key(hashed_[i].key, keys_[i]);
      hashed_[i].hash = hash_key(hashed_[i].key);
    }
    out_.pages.assign(keys_.count, -1);
    out_.became.assign(keys_.count, static_cast<u8>(Became::refused));
  }

  // Under the table lock.
  Reserved run() {
    // Under the lock: a hold published while we waited for it would carry a later stamp.
    now_ = monotonic_ns();
    const u32 epoch = session_->current_epoch();
    if (request_.epoch.has_value() && *request_.epoch != epoch) return std::move(out_);
    epoch_ = epoch;
    const u64 need = std::min<u64>(classify(), room_of_session());
    if (need > 0) make_room(need);
    if (void_keys_) lose_keys();
    take(need);
    return std::move(out_);
  }

 private:
  struct Hashed {
    u64 key[4];
    Hash hash;
  };
  // What stands before a key in its prompt.
  struct Before {
    u32 page = kNone;  // its parent: READY, or of this hold
    u64 pending = 0;   // hold in which the page before is RESERVED
    u32 pending_page = kNone;
  };

  bool starts_prompt(size_t i) const {
    return !request_.linked || i == 0 ||
           std::binary_search(request_.starts.begin(), request_.starts.end(), static_cast<u32>(i));
  }

  Became state_of(size_t i, u32* page) const {
    *page = index_.find(hashed_[i].key, hashed_[i].hash);
    if (*page == kNone) return Became::reserved;
    const Entry& e = s_.entry(*page);
    if (!s_.current(e, e.use)) return Became::reserved;
    if (Use::state(e.use) == PageState::ready) return Became::present;
    return holds_.worth_waiting(e.hold, now_, bound_) ? Became::pending : Became::reserved;
  }

  // How many keys need a page. Keeps the deepest page of each run that is there already.
  u64 classify() {
    u64 need = 0;
    u32 run_end = kNone;
    for (size_t i = 0; i < keys_.count; ++i) {
      if (i + 8 < keys_.count) index_.prefetch_bucket(hashed_[i + 8].hash);
      u32 page = kNone;
      const Became state = state_of(i, &page);
      need += state == Became::reserved;
      void_keys_ = void_keys_ || (state == Became::reserved && page != kNone);
      const bool ready = state == Became::present;
      if (run_end != kNone && (!ready || s_.entry(page).parent != run_end)) kept_.add(run_end);
      run_end = ready ? page : kNone;
    }
    if (run_end != kNone) kept_.add(run_end);
    if (request_.parent != kNone) kept_.add(request_.parent);
    const Before before = before_first();
    if (before.page != kNone) kept_.add(before.page);
    kept_.seal();
    return std::min<u64>(need, kMaxHoldPages);
  }

  u64 room_of_session() const {
    if (max_reserved_ == 0) return kMaxHoldPages;
    const u64 taken = holds_.reserved_by(session_->id());
    return taken < max_reserved_ ? max_reserved_ - taken : 0;
  }

  // Evicts until `need` pages are free, in transactions of their own: a death between leaves
  // free pages. What the dead hold is taken back when nothing else is left.
  void make_room(u64 need) {
    for (int tries = 0; tries < kEvictTries; ++tries) {
      EvictBudget budget(need);
      for (;;) {
        Txn txn(s_);
        if (txn.free_count >= need) return;
        const u32 went = order_.evict(
            txn, static_cast<u32>(std::min<u64>(need - txn.free_count, kStepPages)), kept_, budget);
        txn.close();
        session_->count(Counter::evictions, went);
        if (went == 0) break;
      }
    }
  }

  Before before_first() const {
    Before before;
    if (!request_.linked) return before;
    if (request_.after != nullptr) {
      Hashed h;
      load_key(h.key, request_.after);
      h.hash = hash_key(h.key);
      return before_page(index_.find(h.key, h.hash));
    }
    if (request_.parent == kNone) return before;
    const Entry& e = s_.entry(request_.parent);
    if (Use::state(e.use) == PageState::ready && e.version == request_.parent_version &&
        (e.use & Use::kKeyed) != 0 && s_.current(e, e.use))
      before.page = request_.parent;
    return before;
  }

  Before before_page(u32 page) const {
    Before before;
    if (page == kNone) return before;
    const Entry& e = s_.entry(page);
    if (!s_.current(e, e.use)) return before;
    if (Use::state(e.use) == PageState::ready) before.page = page;
    if (Use::state(e.use) == PageState::reserved && e.hold != number_)
      before = {kNone, e.hold, page};
    return before;
  }

  // One transaction: new keys overwrite dead memory, their use words and tags are logged, and the
  // record is published last.
  void take(u64 need) {
    Txn txn(s_);
    const u64 room = std::min<u64>({need, txn.free_count, kMaxHoldPages});
    number_ = room == 0 ? 0 : holds_.draw_number(txn, room, request_.parts);
    Before before = before_first();
    bool full = false;
    for (size_t i = 0; i < keys_.count; ++i) {
      if (i > 0 && starts_prompt(i)) before = {};
      u32 page = kNone;
      Became state = state_of(i, &page);
      if (page != kNone && number_ != 0 && s_.entry(page).hold == number_ &&
          Use::state(s_.entry(page).use) == PageState::reserved) {
        state = Became::pending;  // named twice: one page, and nothing is linked to it again
        before = {};
      } else if (state != Became::reserved) {
        before = before_page(page);
      } else if (page != kNone) {
        state = Became::pending;  // cleared this very moment: its old page is in the way
        before = {};
      } else if (full || taken_.size() >= room || number_ == 0 || !txn.room(kRecordsEach) ||
                 !take_page(txn, i, before)) {
        full = true;  // room is given in key order: what is refused is the tail
        state = Became::refused;
        before = {};
      }
      out_.became[i] = static_cast<u8>(state);
    }
    if (!taken_.empty()) publish(txn);
  }

  bool take_page(Txn& txn, size_t i, Before& before) {
    const u32 page = txn.pop_free();
    Entry& e = s_.entry(page);
    std::copy(std::begin(hashed_[i].key), std::end(hashed_[i].key), std::begin(e.key));
    e.parent = request_.linked ? before.page : kNone;
    e.kids = 0;
    e.hold = number_;
    e.ns = static_cast<u16>(session_->ns());
    if (!index_.insert(txn, hashed_[i].hash, page)) {
      ++txn.free_count;  // the stack still names it there
      return false;
    }
    if (e.parent != kNone) adopt(txn, e.parent);
    txn.store(e.use,
              Use::fresh(PageState::reserved, epoch_) | Use::kKeyed | (e.use & Use::kQueued));
    ++txn.reserved;
    if (taken_.empty()) heir_of_ = before;
    taken_.push_back(page);
    out_.pages[i] = static_cast<int>(page);
    before = {page, 0, kNone};
    return true;
  }

  void adopt(Txn& txn, u32 parent) {
    Entry& p = s_.entry(parent);
    // A parent of this very hold is dead memory still: its use word is undone to FREE.
    if (p.hold == number_ && Use::state(p.use) == PageState::reserved)
      put(p.kids, p.kids + 1);
    else
      txn.store(p.kids, p.kids + 1);
  }

  // A page of an older epoch, or of a reservation that nobody waits for any more, gives up its
  // key. It stays what it is until whoever has it lets go, or it is evicted. In a transaction
  // before the one that inserts: a slot of the index that this one empties is dead memory only
  // once it has closed (a rollback would bring the tag back over another's page number).
  void lose_keys() {
    Txn txn(s_);
    for (const Hashed& h : hashed_) {
      const u32 page = index_.find(h.key, h.hash);
      if (page == kNone) continue;
      Entry& e = s_.entry(page);
      const bool current = s_.current(e, e.use);
      if (current && Use::state(e.use) == PageState::ready) continue;
      if (current && holds_.worth_waiting(e.hold, now_, bound_)) continue;
      if (!txn.room(kRecordsEach)) txn.next();
      index_.erase(txn, page);
      txn.store(e.use, e.use & ~Use::kKeyed);
    }
  }

  void publish(Txn& txn) {
    Handle::What what;
    what.number = number_;
    what.kind = HoldKind::write;
    what.parts = request_.parts;
    what.part = request_.parts == 0 ? 0 : -1;
    what.session = session_->id();
    what.pages = taken_;
    what.pages_check = check_pages(taken_);
    holds_.publish_record(
        txn, number_,
        {HoldKind::write, what.session, request_.parts, session_->ns(), epoch_, what.pages_check},
        taken_);
    if (heir_of_.pending != 0)
      holds_.set_heir(txn, heir_of_.pending, heir_of_.pending_page, number_, taken_.front());
    txn.close();
    out_.hold = Handle::make(session_, std::move(what));
  }

  const std::shared_ptr<Session>& session_;
  const ReserveRequest& request_;
  Keys keys_;
  const Segment& s_;
  const Index& index_;
  const Order& order_;
  const Holds& holds_;
  u64 now_ = 0;
  u64 bound_;
  u64 max_reserved_;
  u32 epoch_ = 0;
  u64 number_ = 0;
  bool void_keys_ = false;  // some key leads to a page that nobody can find or waits for
  std::vector<Hashed> hashed_;
  std::vector<u32> taken_;
  Before heir_of_;
  Kept kept_;
  Reserved out_;
};

}  // namespace

Reserved reserve_in(const std::shared_ptr<Session>& session, const ReserveRequest& request,
                    u64 pending_bound_ns, u64 max_reserved) {
  session->drop_stale();
  for (int tries = 0;; ++tries) {
    Reserved out;
    {
      Reserver reserver(session, request, pending_bound_ns, max_reserved);
      const Session::Guard guard(*session, Session::Guard::Patience::take);
      if (!guard) {
        out.pages.assign(request.keys.count, -1);
        out.became.assign(request.keys.count, static_cast<u8>(Became::refused));
        return out;
      }
      out = reserver.run();
    }
    const auto refused = static_cast<u64>(
        std::count(out.became.begin(), out.became.end(), static_cast<u8>(Became::refused)));
    // Nothing could be evicted: perhaps the dead hold what is missing.
    if (refused != 0 && !out.hold && tries == 0 && session->sweep() != 0) continue;
    session->count(Counter::refused, refused);
    return out;
  }
}

}  // namespace hostcache
