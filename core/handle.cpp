#include "handle.h"

#include <cstring>
#include <new>
#include <stdexcept>

#include "errors.h"
#include "keeper.h"

namespace hostcache {

namespace {
constexpr u32 kAll = kMaxHoldPages;
}

Handle::Handle(std::shared_ptr<Session> session, What what)
    : generation_(fork_generation()), session_(std::move(session)), what_(std::move(what)) {
  what_.random = session_->map().random();
}

// To be destroyed by the caller, outside the mutex: it may be the session's last.
std::shared_ptr<Session> Handle::let_go() {
  return ended_ && views_ == 0 ? std::move(session_) : nullptr;
}

std::shared_ptr<Handle> Handle::make(std::shared_ptr<Session> session, What what) {
  std::shared_ptr<Handle> handle(new Handle(std::move(session), std::move(what)));
  Session& s = *handle->session_;
  const std::lock_guard<std::mutex> one(s.handles_mutex);
  if (s.handles.size() >= s.handles_limit) {
    std::erase_if(s.handles, [](const auto& weak) { return weak.expired(); });
    s.handles_limit = 2 * s.handles.size() + 64;
  }
  s.handles.push_back(handle);
  return handle;
}

// Views hold the handle, so none lives here. A finaliser: the lock is tried once, and what can
// not be made now is left to the timer.
Handle::~Handle() {
  if (!ours() || ended_) return;
  try {
    finish_locked(what_.kind == HoldKind::read, kAll, Patience::try_once);
  } catch (const std::bad_alloc&) {
    return;  // no memory to remember it by: the session's end gives it back
  }
}

bool Handle::ended() const {
  if (!ours()) return true;
  const std::lock_guard<std::mutex> one(mutex_);
  return ended_;
}

void Handle::refuse_ended() const {
  throw Error(Code::lease_ended,
              std::string(what_.kind == HoldKind::read ? "the lease" : "the reservation") + " of " +
                  std::to_string(what_.pages.size()) + " pages has ended" +
                  (ours() ? "" : " for this process: it was taken before a fork") +
                  "; look its keys up again");
}

u8* Handle::view(size_t i) {
  if (!ours()) refuse_ended();
  const std::lock_guard<std::mutex> one(mutex_);
  if (ended_) refuse_ended();
  if (what_.part < 0)
    throw Error(Code::unsupported, "this hold was taken with parts=" + std::to_string(what_.parts) +
                                       ": who takes it holds no part; claim one by its token");
  const u32 page = what_.pages.at(i);
  if (page == kNone) throw std::out_of_range("key " + std::to_string(i) + " is a gap: no page");
  ++views_;
  return session_->segment().page(page);
}

void Handle::view_gone() {
  if (!ours()) return;
  std::shared_ptr<Op> due;
  std::shared_ptr<Session> session;
  {
    const std::lock_guard<std::mutex> one(mutex_);
    if (--views_ != 0) return;
    due = std::move(after_views_);
    session = let_go();
  }
  if (!due) return;
  try {
    make_now(*session, due, Patience::try_once);
    if (session->closing) Keeper::wake();
  } catch (const std::bad_alloc&) {
    return;  // as in the destructor
  }
}

std::shared_ptr<Op> Handle::op(Op::Kind kind, bool ok, u32 count) const {
  auto made = std::make_shared<Op>();
  made->kind = kind;
  made->number = what_.number;
  made->part = what_.part < 0 ? 0 : static_cast<u32>(what_.part);
  made->session = what_.session;
  made->ok = ok;
  made->count = count;
  return made;
}

u32 Handle::make_now(Session& session, const std::shared_ptr<Op>& op, Patience patience) {
  if (session.left()) return 0;
  if (session.submit(op, patience)) return op->result.published;
  Keeper::wake();
  return 0;
}

// What is remembered is made before `ended_` is set: without memory for it nothing has happened.
u32 Handle::finish_locked(bool ok, u32 count, Patience patience) {
  const bool write = what_.kind == HoldKind::write;
  const bool taker = what_.part < 0;
  const auto last = op(taker ? Op::Kind::end : Op::Kind::finish, ok, taker ? 0 : count);
  if (taker || views_ == 0) {
    ended_ = true;
    return make_now(*session_, last, patience);
  }
  if (write && ok && what_.parts == 0) {
    const auto keep = op(Op::Kind::keep, true, count);
    last->kind = Op::Kind::after_keep;
    last->of = keep;
    ended_ = true;
    after_views_ = last;
    return make_now(*session_, keep, patience);
  }
  const auto spoil = write && !ok ? op(Op::Kind::spoil, false, 0) : nullptr;
  ended_ = true;
  after_views_ = last;
  if (spoil) make_now(*session_, spoil, patience);
  return 0;
}

u32 Handle::finish(bool ok, u32 count) {
  if (!ours()) {
    if (ok && what_.kind == HoldKind::write) refuse_ended();
    return 0;
  }
  std::shared_ptr<Session> last;  // destroyed after the mutex is let go
  const std::lock_guard<std::mutex> one(mutex_);
  const bool write = what_.kind == HoldKind::write;
  if (ended_ && ok && write) refuse_ended();
  if (ended_) return 0;
  if (what_.part < 0 && ok)
    throw Error(Code::unsupported, "this hold was taken with parts=" + std::to_string(what_.parts) +
                                       ": its parts are committed by those who claim them");
  if (!ok || what_.parts != 0) count = kAll;
  const u32 published = finish_locked(ok, count, Patience::wait);
  last = let_go();
  return published;
}

void Handle::end() {
  if (!ours()) return;
  std::shared_ptr<Session> last;  // destroyed after the mutex is let go
  const std::lock_guard<std::mutex> one(mutex_);
  if (!ended_) finish_locked(what_.kind == HoldKind::read, kAll, Patience::wait);
  last = let_go();
}

bool Handle::close() {
  std::shared_ptr<Session> last;  // destroyed after the mutex is let go
  const std::lock_guard<std::mutex> one(mutex_);
  if (!ended_) finish_locked(what_.kind == HoldKind::read, kAll, Patience::wait);
  last = let_go();
  return views_ != 0;
}

std::string Handle::token() const {
  if (what_.parts == 0 || what_.part >= 0)
    throw Error(Code::unsupported,
                "only a hold taken with parts= has a token: its taker hands the parts out");
  return write_token({what_.random, what_.number, what_.kind, what_.parts, what_.pages});
}

namespace {

constexpr u64 kTokenMagic = 0x31'4E4B'5448'5348ULL;  // "HSHTKN1"

struct TokenHead {
  u64 magic;
  u64 random;
  u64 number;
  u32 kind;
  u32 parts;
  u64 pages;
};

}  // namespace

std::string write_token(const Token& token) {
  const TokenHead head{kTokenMagic, token.random,      token.number, static_cast<u32>(token.kind),
                       token.parts, token.pages.size()};
  std::string bytes(sizeof head + token.pages.size() * 4, '\0');
  std::memcpy(bytes.data(), &head, sizeof head);
  std::memcpy(bytes.data() + sizeof head, token.pages.data(), token.pages.size() * 4);
  return bytes;
}

Token read_token(const std::string& bytes) {
  TokenHead head{};
  if (bytes.size() >= sizeof head) std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != kTokenMagic || head.pages > kMaxHoldPages ||
      bytes.size() != sizeof head + head.pages * 4)
    throw Error(Code::bad_value, "these " + std::to_string(bytes.size()) +
                                     " bytes are no token of a hold, or not all of one");
  Token token{head.random, head.number, static_cast<HoldKind>(head.kind), head.parts, {}};
  token.pages.resize(head.pages);
  std::memcpy(token.pages.data(), bytes.data() + sizeof head, head.pages * 4);
  return token;
}

void close_session(Session& session) {
  if (!session.ours() || session.closing.exchange(true)) return;
  finish_closing(session);
}

// "With its last view": a page under a live view stays held, so the session stays too.
void finish_closing(Session& session) {
  // Once it is quiet, whoever was taking a hold has it in the list, and nobody takes one any more
  // (see Guard). Otherwise the timer comes again.
  if (!session.closing || session.left() || !session.quiet()) return;
  std::vector<std::shared_ptr<Handle>> handles;
  {
    const std::lock_guard<std::mutex> one(session.handles_mutex);
    for (const auto& weak : session.handles)
      if (auto handle = weak.lock()) handles.push_back(std::move(handle));
  }
  bool viewed = false;
  for (const auto& handle : handles) viewed = handle->close() || viewed;
  if (!viewed) session.leave();
}

}  // namespace hostcache
