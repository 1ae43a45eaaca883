// One hold as its caller sees it: ended by a call, by being dropped, or when its last view goes.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "sessions.h"

namespace hostcache {

class Handle : public std::enable_shared_from_this<Handle> {
 public:
  struct What {
    u64 number = 0;
    HoldKind kind = HoldKind::read;
    u32 parts = 0;  // 0: taken without parts, the taker is the only part
    int part = 0;   // the claimed part; -1: the taker of a hold with parts
    u64 session = 0;
    u64 pages_check = 0;
    std::vector<u32> pages;
    u64 random = 0;  // of the segment
  };
  static std::shared_ptr<Handle> make(std::shared_ptr<Session> session, What what);
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const What& what() const { return what_; }
  bool ended() const;
  // Throws lease_ended where nothing may be touched any more, unsupported on a taker with parts.
  u8* view(size_t i);
  void view_gone();
  // How many pages became ready now. A second call with ok throws lease_ended.
  u32 finish(bool ok, u32 count);
  void end();
  std::string token() const;

  // Ends it where it has not ended; whether a view lives on.
  bool close();

 private:
  Handle(std::shared_ptr<Session> session, What what);
  using Patience = Session::Guard::Patience;
  std::shared_ptr<Op> op(Op::Kind kind, bool ok, u32 count) const;
  static u32 make_now(Session& session, const std::shared_ptr<Op>& op, Patience patience);
  std::shared_ptr<Session> let_go();
  u32 finish_locked(bool ok, u32 count, Patience patience);
  [[noreturn]] void refuse_ended() const;

  bool ours() const { return generation_ == fork_generation(); }

  u32 generation_;
  // Let go once the hold has ended and no view lives: what remains of the handle keeps no memory.
  std::shared_ptr<Session> session_;
  What what_;
  mutable std::mutex mutex_;
  size_t views_ = 0;
  bool ended_ = false;
  std::shared_ptr<Op> after_views_;
};

struct Token {
  u64 random = 0;
  u64 number = 0;
  HoldKind kind = HoldKind::read;
  u32 parts = 0;
  std::vector<u32> pages;
};
std::string write_token(const Token& token);
Token read_token(const std::string& bytes);  // throws bad_value

// Ends every hold of the session; it leaves at once, or with its last view.
void close_session(Session& session);
void finish_closing(Session& session);

}  // namespace hostcache
