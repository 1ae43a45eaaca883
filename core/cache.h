// The facade: one session of one cache, as the bindings see it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "handle.h"
#include "maker.h"
#include "sessions.h"

namespace hostcache {

struct OpenOptions {
  std::string root;
  std::string name;
  std::string mode = "open";          // "create": only make, "attach": only attach
  Shape shape;                        // page_bytes 0: whatever is there (attach)
  std::optional<std::string> digest;  // 32 bytes
  std::string label;
  u64 max_reserved = 0;
  double pending_bound_s = 5.0;  // a key reserved longer ago may be reserved anew
  bool any_filesystem = false;
  Progress progress;
};

struct Keys {
  const u8* data = nullptr;
  size_t count = 0;
  const u8* operator[](size_t i) const { return data + i * kKeyBytes; }
};

struct Lookup {
  std::shared_ptr<Handle> hold;
  std::vector<int> pages;
  u32 run = 0;
  u32 parent = kNone;  // last page of the leading run, and its version
  u32 parent_version = 0;
  u32 epoch = 0;
};

struct ReserveRequest {
  Keys keys;
  std::vector<u32> starts;  // positions where a prompt begins, besides 0; sorted
  bool linked = true;
  std::optional<u32> epoch;  // of the miss; none: now
  u32 parent = kNone;
  u32 parent_version = 0;
  const u8* after = nullptr;  // key of the page before keys[0]
  u32 parts = 0;
};

enum class Became : u8 { reserved, present, pending, refused };

struct Reserved {
  std::shared_ptr<Handle> hold;
  std::vector<int> pages;
  std::vector<u8> became;
};

class Cache {
 public:
  static std::shared_ptr<Cache> open(OpenOptions options);

  u32 epoch() { return session()->current_epoch(); }
  size_t match(Keys keys);
  Lookup lookup(Keys keys, u32 parts, bool gaps);
  Reserved reserve(const ReserveRequest& request);
  std::shared_ptr<Handle> claim(const std::string& token, u32 part);
  // Until the keys are ready or nobody writes them. `interrupted` is asked now and then.
  size_t wait(Keys keys, double timeout_s, const std::function<bool()>& interrupted);
  void clear(bool everything);
  void clear_namespace(u32 number);
  Stats stats(bool count_pinned);
  std::vector<SlotInfo> sessions();
  std::vector<NamespaceInfo> namespaces() { return list_namespaces(session()->segment()); }
  std::vector<std::string> check();
  u32 sweep() { return session()->sweep(); }
  void close();

  bool closed() const { return closed_; }
  bool orphaned() { return !closed_ && !session()->map().name_leads_here(); }
  // What was attached to; stays known after close.
  struct Facts {
    std::string path;
    std::string name;
    Shape shape;
    Geometry geometry{};
    u64 random = 0;
  };
  const Facts& facts() const { return facts_; }
  bool made() const { return made_; }
  const std::string& replaced() const { return replaced_; }
  u64 session_id() { return session()->id(); }

 private:
  Cache() = default;
  std::shared_ptr<Session> session();  // a forked child gets its own on first use
  void attach_or_make();
  bool attach_once();
  void make(AttachLock& lock, int root_fd, u64 times_replaced);
  void refuse_other_shape(const Shape& found) const;
  void start(std::shared_ptr<Session> session);
  void adopt();
  void name_session(Session& session) const;
  void raise_epoch(u64& word);

  OpenOptions options_;
  Facts facts_;
  // Under the fork mutex. (libstdc++'s atomic shared_ptr spins on a bit that a child could inherit
  // set.)
  std::shared_ptr<Session> session_;
  std::shared_ptr<Session> exchange_session(std::shared_ptr<Session> next);
  Error closed_error() const;
  std::shared_ptr<Session>* inherited_ = nullptr;  // the parent's: left behind, never ended here
  std::atomic<u32> generation_{0};
  std::atomic<u32> adopting_{0};
  bool made_ = false;
  std::atomic<bool> closed_{false};
  std::string replaced_;
};

// The two calls that change the table; each is one piece of work under the lock.
Lookup lookup_in(const std::shared_ptr<Session>& session, Keys keys, u32 parts, bool gaps);
Reserved reserve_in(const std::shared_ptr<Session>& session, const ReserveRequest& request,
                    u64 pending_bound_ns, u64 max_reserved);
size_t match_in(const Session& session, Keys keys);

struct Peek {
  std::string path;
  Verdict verdict;
  bool living = false;
  u64 size_bytes = 0;
};
Peek peek(const std::string& root, const std::string& name);

struct Inspection {
  Stats stats;
  std::vector<NamespaceInfo> namespaces;
  std::vector<SlotInfo> sessions;
  std::vector<std::string> findings;
};
// `living_too`: numbers as they are, without a check, where sessions live; else busy there.
Inspection inspect(const std::string& root, const std::string& name, bool any_filesystem,
                   bool living_too);
std::vector<std::string> list_names(const std::string& root);
void remove_name(const std::string& root, const std::string& name, bool force, bool any_filesystem);

}  // namespace hostcache
