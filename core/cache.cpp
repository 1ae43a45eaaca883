#include "cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "errors.h"
#include "keeper.h"

namespace hostcache {

namespace {

constexpr u64 kCheckBoundNs = 2'000'000'000;
constexpr u64 kAgainNs = 2'000'000;

Code code_of(Standing standing) {
  return standing == Standing::other_format ? Code::format_mismatch : Code::damaged;
}

// Whether the name leads to something, and what. `living`: sessions are in it.
struct Found {
  bool exists = false;
  Fd fd;
  Verdict verdict;
  bool living = false;
};

Found look_at(const std::string& path, const std::string& name) {
  Found found;
  try {
    found.fd = open_segment_file(path, name, true);
  } catch (const Error& e) {
    if (e.code() != Code::cache_not_found) throw;
    return found;
  }
  found.exists = true;
  found.verdict = judge(found.fd.get(), name, path);
  found.living = ofd_held(found.fd.get(), kLivenessBase, 0);
  return found;
}

u64 times_replaced(int fd) {
  u64 count = 0;
  const off_t at = kControlAt + offsetof(Control, replaced);
  return pread(fd, &count, sizeof count, at) == sizeof count && count < (u64{1} << 32) ? count : 0;
}

std::string fragments_text(const std::vector<u64>& fragments) {
  return std::to_string(fragments.size()) + " fragments";
}

}  // namespace

void Cache::refuse_other_shape(const Shape& found) const {
  const Shape& asked = options_.shape;
  if (asked.page_bytes == 0) return;
  const std::string what = "cache '" + options_.name + "' has pages of ";
  const std::string next = "; open it with its own format, or run: hostcache rm " + options_.name +
                           in_root(options_.root);
  if (asked.page_bytes != found.page_bytes)
    throw Error(Code::format_mismatch, what + std::to_string(found.page_bytes) + " bytes, " +
                                           std::to_string(asked.page_bytes) + " were asked for" +
                                           next);
  if (asked.page_tokens != found.page_tokens)
    throw Error(Code::format_mismatch, what + std::to_string(found.page_tokens) + " tokens, " +
                                           std::to_string(asked.page_tokens) + " were asked for" +
                                           next);
  if (asked.fragments != found.fragments)
    throw Error(Code::format_mismatch, what + fragments_text(found.fragments) + ", " +
                                           fragments_text(asked.fragments) +
                                           " of other sizes were asked for" + next);
}

void Cache::make(AttachLock& lock, int root_fd, u64 replaced) {
  try {
    make_segment(root_fd, options_.root, options_.name, options_.shape, replaced, lock,
                 options_.progress);
  } catch (...) {
    lock.remove_file();  // nothing of that name is left
    throw;
  }
  made_ = true;
}

// One try under the attach lock; false where the name was taken away meanwhile.
bool Cache::attach_once() {
  const Fd root = open_root(options_.root, options_.any_filesystem);
  const std::string path = options_.root + "/" + options_.name;
  AttachLock lock(options_.root, options_.name, options_.progress);
  Found found = look_at(path, options_.name);
  if (!found.exists && options_.mode == "attach")
    throw Error(Code::cache_not_found, "there is no cache '" + options_.name + "' in " +
                                           options_.root + "; hostcache ls" +
                                           in_root(options_.root) + " lists what there is");
  const bool usable = found.exists && found.verdict.standing == Standing::usable;
  if (usable && options_.mode == "create")
    throw Error(Code::cache_exists, "'" + options_.name + "' exists in " + options_.root +
                                        "; open or attach to it, or run: hostcache rm " +
                                        options_.name + in_root(options_.root));
  if (found.exists && !usable) {
    const Verdict& v = found.verdict;
    if (v.standing == Standing::foreign || options_.mode == "attach" || found.living)
      throw Error(code_of(v.standing), v.problem);
    replaced_ = v.problem;
  }
  if (!usable) {
    const u64 replaced = found.exists ? times_replaced(found.fd.get()) + 1 : 0;
    KILL_POINT();
    if (found.exists) unlink(path.c_str());
    found.fd.reset();  // there need not be room for both
    KILL_POINT();
    make(lock, root.get(), replaced);
    found = look_at(path, options_.name);
    if (!found.exists || found.verdict.standing != Standing::usable) return false;
  }
  refuse_other_shape(found.verdict.shape);
  auto map =
      std::make_shared<MappedSegment>(std::move(found.fd), path, options_.name, found.verdict);
  try {
    start(std::make_shared<Session>(map, lock));
    lock.keep_file();
  } catch (const Session::Moved&) {
    return false;
  } catch (const Error& e) {
    // It was verified because nobody lives in it, and the attach lock keeps it so.
    if (e.code() != Code::damaged || options_.mode == "attach") throw;
    replaced_ = e.what();
    const u64 replaced = load(map->segment().control().replaced) + 1;
    KILL_POINT();
    unlink(path.c_str());
    map.reset();  // there need not be room for both
    KILL_POINT();
    make(lock, root.get(), replaced);
    return false;
  }
  return true;
}

void Cache::start(std::shared_ptr<Session> session) {
  Keeper::add(session);
  const MappedSegment& map = session->map();
  facts_ = {map.path(), map.name(), map.shape(), map.segment().geometry(), map.random()};
  exchange_session(std::move(session));
  generation_ = fork_generation();
}

void Cache::attach_or_make() {
  // A name can be taken away and made again under us, but each time somebody else made progress.
  for (int tries = 0; tries < 100; ++tries) {
    if (!attach_once()) continue;
    name_session(*session());
    session()->sweep();
    return;
  }
  throw Error(Code::busy, "cache '" + options_.name +
                              "' was removed and made again 100 times "
                              "while this process attached to it");
}

std::shared_ptr<Cache> Cache::open(OpenOptions options) {
  std::shared_ptr<Cache> cache(new Cache);
  cache->options_ = std::move(options);
  if (cache->options_.shape.page_bytes != 0) plan(cache->options_.shape);
  cache->attach_or_make();
  return cache;
}

std::shared_ptr<Session> Cache::exchange_session(std::shared_ptr<Session> next) {
  const std::lock_guard<std::mutex> one(fork_mutex());
  session_.swap(next);
  return next;
}

Error Cache::closed_error() const {
  return Error(Code::lease_ended, "cache '" + options_.name + "' is closed; open it again");
}

std::shared_ptr<Session> Cache::session() {
  if (closed_) throw closed_error();
  if (generation_ != fork_generation()) adopt();
  const std::lock_guard<std::mutex> one(fork_mutex());
  auto session = session_;
  if (!session) throw closed_error();  // closed by another thread meanwhile
  return session;
}

// A forked child: what it inherited is its parent's, and it takes a session of its own. A mutex
// might be held by a thread that is not here, so one thread wins by an exchange.
void Cache::adopt() {
  const u32 now = fork_generation();
  while (generation_ != now) {
    u32 seen = adopting_;
    if (seen == now || !adopting_.compare_exchange_strong(seen, now)) {
      sleep_ns(100'000);
      continue;
    }
    try {
      if (inherited_ == nullptr)
        inherited_ = new std::shared_ptr<Session>(exchange_session(nullptr));
      const AttachLock lock(options_.root, options_.name, nullptr);
      auto session = std::make_shared<Session>((*inherited_)->map_ptr(), lock);
      name_session(*session);
      start(std::move(session));
    } catch (const Session::Moved&) {
      adopting_ = seen;
      throw Error(Code::cache_not_found, "cache '" + options_.name +
                                             "' was removed before this forked process used it; "
                                             "open it anew");
    } catch (...) {
      adopting_ = seen;
      throw;
    }
  }
}

void Cache::name_session(Session& session) const {
  if (options_.digest.has_value())
    session.join_namespace(reinterpret_cast<const u8*>(options_.digest->data()), options_.label);
  if (options_.max_reserved != 0) session.set_max_reserved(options_.max_reserved);
}

size_t Cache::match(Keys keys) { return match_in(*session(), keys); }

Lookup Cache::lookup(Keys keys, u32 parts, bool gaps) {
  return lookup_in(session(), keys, parts, gaps);
}

Reserved Cache::reserve(const ReserveRequest& request) {
  return reserve_in(session(), request, static_cast<u64>(options_.pending_bound_s * 1e9),
                    options_.max_reserved);
}

std::shared_ptr<Handle> Cache::claim(const std::string& bytes, u32 part) {
  const auto s = session();
  const Token token = read_token(bytes);
  if (token.random != s->map().random()) return nullptr;  // of another segment
  for (const u32 page : token.pages)
    if (page >= s->segment().geometry().page_count && page != kNone) return nullptr;
  Handle::What what{token.number, token.kind,
                    token.parts,  static_cast<int>(part),
                    s->id(),      check_pages(token.pages),
                    token.pages};
  const Session::Guard guard(*s, Session::Guard::Patience::take);
  if (!guard) return nullptr;
  Txn txn(s->segment());
  if (!s->holds().claim(txn, what.number, what.kind, what.parts, what.pages_check, part,
                        what.session))
    return nullptr;
  txn.close();
  return Handle::make(s, std::move(what));
}

size_t Cache::wait(Keys keys, double timeout_s, const std::function<bool()>& interrupted) {
  constexpr u64 kLongestNapNs = 2'000'000;
  constexpr u64 kAskEveryNs = 50'000'000;
  const u64 now = monotonic_ns();
  const u64 until =
      timeout_s >= 1e9 ? ~u64{0} : now + static_cast<u64>(std::max(timeout_s, 0.0) * 1e9);
  u64 nap = 50'000;
  u64 asked = now;
  for (;;) {
    const auto s = session();
    const size_t ready = match_in(*s, keys);
    if (ready == keys.count) return ready;
    u64 key[4];
    load_key(key, keys[ready]);
    // Seen after the match: what became ready in between is not pending, and is matched again.
    if (!s->index().pending(key, hash_key(key))) return match_in(*s, keys);
    const u64 t = monotonic_ns();
    if (t >= until || Keeper::ending()) return ready;
    if (t - asked > kAskEveryNs) {
      asked = t;
      s->sweep();  // its writer may be gone
      if (interrupted && interrupted()) return ready;
    }
    sleep_ns(std::min(nap, until - t));
    nap = std::min(nap * 2, kLongestNapNs);
  }
}

// One atomic add, without the lock; then what nobody can find any more is given back in steps.
void Cache::raise_epoch(u64& word) {
  const auto s = session();
  if (Guarded::value(load(word)) >= Guarded::kLast)
    throw Error(Code::no_room, "cache '" + options_.name + "' was cleared " +
                                   std::to_string(Guarded::kLast) +
                                   " times and can not be cleared again; remove and make it anew");
  add(word, Guarded::kRaise);
  u64& left = s->segment().control().stale_left;
  put(left, u64{s->segment().geometry().page_count});
  // Bounded: where the lock can not be had the hint does not move, and the timer goes on.
  for (u64 before = ~u64{0}; load(left) != 0 && load(left) != before;) {
    before = load(left);
    s->drop_stale();
  }
}

void Cache::clear(bool everything) {
  const auto s = session();
  if (everything || s->ns() == 0)
    raise_epoch(s->segment().control().epoch);
  else
    raise_epoch(s->segment().ns(s->ns()).epoch);
}

void Cache::clear_namespace(u32 number) {
  const auto s = session();
  if (number >= s->segment().geometry().namespace_count || s->segment().ns(number).used == 0)
    throw Error(Code::bad_value,
                "cache '" + options_.name + "' has no namespace " + std::to_string(number));
  raise_epoch(s->segment().ns(number).epoch);
}

Stats Cache::stats(bool count_pinned) {
  const auto s = session();
  s->sweep();
  s->drain(Session::Guard::Patience::try_once);
  return count_stats(s->segment(), count_pinned);
}

std::vector<SlotInfo> Cache::sessions() {
  const auto s = session();
  return list_sessions(s->segment(), s->map().witness());
}

std::vector<std::string> Cache::check() {
  const auto s = session();
  s->sweep();
  const Segment& live = s->segment();
  const u64 size = live.geometry().pages_at;
  std::vector<u64> copy(size / 8);  // its memory is touched here, before the lock is taken
  const u64 until = monotonic_ns() + kCheckBoundNs;
  do {
    {
      const Session::Guard guard(*s, Session::Guard::Patience::wait);
      if (guard) {
        std::memcpy(copy.data(), live.base(), size);
        break;
      }
    }
    if (monotonic_ns() > until)
      throw Error(Code::busy, "the table lock of cache '" + options_.name +
                                  "' could not be had in 2 s; is a process stopped inside it? "
                                  "hostcache stat " +
                                  options_.name + in_root(options_.root) + " lists the sessions");
    sleep_ns(kAgainNs);
  } while (true);
  const Segment still(reinterpret_cast<u8*>(copy.data()), live.geometry());
  // Who attached while we copied has a slot with a number above the copied counter, which only
  // rises and is not under the table lock: the later one holds.
  still.control().next_id = load(live.control().next_id);
  still.control().next_id_check = ~still.control().next_id;
  return check_table(still);
}

void Cache::close() {
  if (closed_.exchange(true)) return;
  // Ours goes: the memory goes with the last view, which keeps the session by its hold.
  const auto session = exchange_session(nullptr);
  if (session && session->ours()) close_session(*session);
  if (session && !session->ours()) new std::shared_ptr<Session>(session);  // the parent's: left
}

Peek peek(const std::string& root, const std::string& name) {
  Peek out;
  out.path = root + "/" + name;
  const Fd fd = open_segment_file(out.path, name, true);
  struct stat st{};
  if (fstat(fd.get(), &st) == 0) out.size_bytes = static_cast<u64>(st.st_size);
  out.verdict = judge(fd.get(), name, out.path);
  out.living = ofd_held(fd.get(), kLivenessBase, 0);
  return out;
}

Inspection inspect(const std::string& root, const std::string& name, bool any_filesystem,
                   bool living_too) {
  const Fd root_fd = open_root(root, any_filesystem);
  const AttachLock lock(root, name, nullptr);
  Found found = look_at(root + "/" + name, name);
  if (!found.exists)
    throw Error(Code::cache_not_found, "there is no cache '" + name + "' in " + root);
  if (found.verdict.standing != Standing::usable)
    throw Error(code_of(found.verdict.standing), found.verdict.problem);
  if (found.living && !living_too)
    throw Error(Code::busy, "sessions live in cache '" + name + "'; attach to it");
  const Geometry& g = found.verdict.header.geometry;
  std::vector<u64> copy(g.pages_at / 8);
  for (u64 at = 0; at < g.pages_at;) {
    const ssize_t n = pread(found.fd.get(), reinterpret_cast<u8*>(copy.data()) + at,
                            g.pages_at - at, static_cast<off_t>(at));
    if (n <= 0) throw os_error("read cache '" + name + "'", errno);
    at += static_cast<u64>(n);
  }
  const Segment still(reinterpret_cast<u8*>(copy.data()), g);
  Control& c = still.control();
  if (!found.living && c.lock != 0 && !roll_back(still)) c.damaged = 1;
  Inspection out;
  if (!found.living) out.findings = check_table(still);
  out.stats = count_stats(still, out.findings.empty());
  out.namespaces = list_namespaces(still);
  out.sessions = list_sessions(still, Witness(found.fd.get()));
  return out;
}

std::vector<std::string> list_names(const std::string& root) {
  std::vector<std::string> names;
  DIR* dir = opendir(root.c_str());
  if (dir == nullptr) throw os_error("list the root folder " + root, errno);
  while (const dirent* entry = readdir(dir))
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

void remove_name(const std::string& root, const std::string& name, bool force,
                 bool any_filesystem) {
  const Fd root_fd = open_root(root, any_filesystem);
  const std::string path = root + "/" + name;
  AttachLock lock(root, name, nullptr);
  struct stat st{};
  if (lstat(path.c_str(), &st) != 0) {
    lock.remove_file();
    throw Error(Code::cache_not_found, "there is no cache '" + name + "' in " + root);
  }
  if (!S_ISREG(st.st_mode) || st.st_uid != geteuid())
    throw Error(Code::not_allowed, "'" + name + "' is no regular file of user " +
                                       std::to_string(geteuid()) + " and is left alone (" + path +
                                       ")");
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!force && fd && ofd_held(fd.get(), kLivenessBase, 0))
    throw Error(Code::busy,
                "sessions live in cache '" + name +
                    "'; end them, or take the name away all the same: hostcache rm --force " +
                    name + in_root(root));
  KILL_POINT();
  if (unlink(path.c_str()) != 0) throw os_error("unlink " + path, errno);
  lock.remove_file();
}

}  // namespace hostcache
