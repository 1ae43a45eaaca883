// Python's view of the core: types translated, the GIL let go, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstring>

#include "cache.h"
#include "errors.h"
#include "keeper.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hostcache {
namespace {

using KeyArray = nb::ndarray<const u8, nb::shape<-1, kKeyBytes>, nb::c_contig, nb::device::cpu>;
using IntArray = nb::ndarray<const int, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Without the GIL. A daemon thread that comes back for it while the interpreter ends would be
// unwound through C++ and end the process, so none is let out once the end has begun, and
// shutdown() waits for those who are.
std::atomic<bool> ending{false};
std::atomic<int> outside{0};
std::atomic<bool> too_late{false};  // a thread that comes back now stays outside for ever

class Outside {
 public:
  Outside() {
    if (ending) throw Error(Code::lease_ended, "the interpreter is exiting: its caches are closed");
    ++outside;
    state_ = PyEval_SaveThread();
  }
  ~Outside() {
    while (too_late) pause();
    PyEval_RestoreThread(state_);
    --outside;
  }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  PyThreadState* state_;
};
using Unlocked = nb::call_guard<Outside>;

void shut_down() {
  constexpr int kPatienceMs = 2000;  // beyond every bound of a call but those of open
  if (ending.exchange(true)) return;
  Keeper::announce_end();  // those who wait for keys come back
  for (int ms = 0; outside != 0 && ms < kPatienceMs; ++ms) {
    const nb::gil_scoped_release unlocked;
    sleep_ns(1'000'000);
  }
  {
    const nb::gil_scoped_release unlocked;
    Keeper::shutdown();
  }
  too_late = true;
}

Keys keys_of(const KeyArray& array) { return {array.data(), array.shape(0)}; }

template <class T>
nb::object numpy_array(const T* data, size_t count) {
  T* copy = new T[count == 0 ? 1 : count];
  std::memcpy(copy, data, count * sizeof(T));
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, {count}, owner));
}

nb::bytes bytes_of(const std::string& s) { return nb::bytes(s.data(), s.size()); }

void translate(const std::exception_ptr& p, void*) {
  constexpr const char* kNames[] = {
      "BadValue",   "Busy",   "CacheExists", "CacheNotFound", "Damaged",       "FormatMismatch",
      "LeaseEnded", "NoRoom", "NotAllowed",  "Unsupported",   "HostCacheError"};
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    nb::object type =
        nb::module_::import_("hostcache.errors").attr(kNames[static_cast<int>(e.code())]);
    PyErr_SetString(type.ptr(), e.what());
  }
}

// The bytes of one page. Every memoryview and array made from it keeps it, and so the hold.
class PageView {
 public:
  PageView(std::shared_ptr<Handle> hold, size_t i, u64 size)
      : hold_(std::move(hold)), data_(hold_->view(i)), size_(size) {}
  ~PageView() { hold_->view_gone(); }
  PageView(const PageView&) = delete;
  PageView& operator=(const PageView&) = delete;
  int fill(Py_buffer* buffer, PyObject* self, int flags) const {
    const int readonly = hold_->what().kind == HoldKind::read;
    return PyBuffer_FillInfo(buffer, self, data_, static_cast<Py_ssize_t>(size_), readonly, flags);
  }

 private:
  std::shared_ptr<Handle> hold_;
  u8* data_;
  u64 size_;
};

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  return nb::inst_ptr<PageView>(nb::handle(self))->fill(buffer, self, flags);
}
PyType_Slot page_view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                 {0, nullptr}};

// A hold as Python has it; the page size is the segment's.
struct PyHold {
  std::shared_ptr<Handle> handle;
  u64 page_bytes;
};

struct PyCache {
  std::shared_ptr<Cache> cache;
  u64 page_bytes() const { return cache->facts().shape.page_bytes; }
  nb::object wrap(std::shared_ptr<Handle> handle) const {
    return handle ? nb::cast(PyHold{std::move(handle), page_bytes()}) : nb::none();
  }
};

nb::object view_page(const PyHold& hold, Py_ssize_t i) {
  const auto count = static_cast<Py_ssize_t>(hold.handle->what().pages.size());
  if (i < 0) i += count;
  if (i < 0 || i >= count) throw nb::index_error("page index out of range");
  nb::object view = nb::cast(new PageView(hold.handle, static_cast<size_t>(i), hold.page_bytes),
                             nb::rv_policy::take_ownership);
  return nb::steal(PyMemoryView_FromObject(view.ptr()));
}

// Every end may come twice, also after the interpreter's own.
template <class End>
void end_quietly(End end) {
  if (ending) return;
  const Outside unlocked;
  end();
}

int finish_hold(const PyHold& hold, bool ok, long long count) {
  if (ending && !ok) return 0;
  const Outside unlocked;
  const long long most = kMaxHoldPages;
  return static_cast<int>(
      hold.handle->finish(ok, static_cast<u32>(count < 0 || count > most ? most : count)));
}

Progress progress_of(const nb::object& callback) {
  if (callback.is_none()) return nullptr;
  return [callback](u64 done, u64 total) {
    const nb::gil_scoped_acquire locked;
    callback(done, total);
  };
}

PyCache open_cache(const std::string& root, const std::string& name, const std::string& mode,
                   u64 page_bytes, u32 page_tokens, std::vector<u64> fragments, u32 page_count,
                   const std::optional<nb::bytes>& digest, const std::string& label,
                   u64 max_reserved, double pending_bound_s, bool any_filesystem,
                   const nb::object& progress) {
  OpenOptions options{root,           name,
                      mode,           {page_bytes, page_tokens, page_count, std::move(fragments)},
                      std::nullopt,   label,
                      max_reserved,   pending_bound_s,
                      any_filesystem, progress_of(progress)};
  if (page_bytes != 0 && options.shape.fragments.empty()) options.shape.fragments = {page_bytes};
  if (digest.has_value()) options.digest = std::string(digest->c_str(), digest->size());
  if (options.digest.has_value() && options.digest->size() != 32)
    throw Error(Code::bad_value,
                "a namespace digest has 32 bytes, not " + std::to_string(options.digest->size()));
  if (mode != "attach" && page_bytes == 0)
    throw Error(Code::bad_value, "page_bytes is 0; a page has at least one byte");
  // The callback is a Python object: its copies come and go under the GIL only.
  const Progress kept = options.progress;
  const Outside unlocked;
  return {Cache::open(std::move(options))};
}

nb::dict info_of(const PyCache& self) {
  Cache& cache = *self.cache;
  const Cache::Facts& facts = cache.facts();
  const Geometry& g = facts.geometry;
  nb::dict d;
  d["name"] = facts.name;
  d["path"] = facts.path;
  d["format"] = kFormat;
  d["random"] = facts.random;
  d["page_bytes"] = g.page_bytes;
  d["page_tokens"] = g.page_tokens;
  d["page_count"] = g.page_count;
  d["fragments"] = facts.shape.fragments;
  d["table_bytes"] = g.pages_at;
  d["size_bytes"] = g.size;
  d["made"] = cache.made();
  d["replaced"] = cache.replaced();
  d["session"] = cache.closed() ? 0 : cache.session_id();
  d["slot_count"] = g.slot_count;
  return d;
}

nb::tuple lookup(const PyCache& self, const KeyArray& keys, u32 parts, bool gaps) {
  Lookup out;
  {
    const Outside unlocked;
    out = self.cache->lookup(keys_of(keys), parts, gaps);
  }
  return nb::make_tuple(self.wrap(std::move(out.hold)),
                        numpy_array(out.pages.data(), out.pages.size()), out.run,
                        static_cast<int>(out.parent), out.parent_version, out.epoch);
}

nb::tuple reserve(const PyCache& self, const KeyArray& keys, const std::optional<IntArray>& starts,
                  bool linked, long long epoch, int parent_page, u32 parent_version,
                  const std::optional<KeyArray>& after, u32 parts) {
  ReserveRequest request;
  request.keys = keys_of(keys);
  if (starts.has_value()) request.starts.assign(starts->data(), starts->data() + starts->shape(0));
  request.linked = linked;
  if (epoch >= 0) request.epoch = static_cast<u32>(epoch);
  request.parent = static_cast<u32>(parent_page);
  request.parent_version = parent_version;
  if (after.has_value() && after->shape(0) == 1) request.after = after->data();
  request.parts = parts;
  Reserved out;
  {
    const Outside unlocked;
    out = self.cache->reserve(request);
  }
  return nb::make_tuple(self.wrap(std::move(out.hold)),
                        numpy_array(out.pages.data(), out.pages.size()),
                        numpy_array(out.became.data(), out.became.size()));
}

nb::object claim(const PyCache& self, const nb::bytes& token, u32 part) {
  const std::string bytes(token.c_str(), token.size());
  std::shared_ptr<Handle> handle;
  {
    const Outside unlocked;
    handle = self.cache->claim(bytes, part);
  }
  return self.wrap(std::move(handle));
}

size_t wait_for(const PyCache& self, const KeyArray& keys, double timeout_s) {
  const Outside unlocked;
  return self.cache->wait(keys_of(keys), timeout_s, [] {
    const nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    return false;
  });
}

nb::dict dict_of(const Stats& s) {
  constexpr const char* kCounters[] = {"hits",      "misses",  "commits", "aborts",
                                       "evictions", "repairs", "refused", "lock_timeouts"};
  nb::dict d;
  d["page_count"] = s.page_count;
  d["free"] = s.free;
  d["reserved"] = s.reserved;
  d["ready"] = s.ready;
  d["pinned"] = s.pinned;
  d["evictable"] = s.evictable;
  d["sessions"] = s.sessions;
  for (u32 i = 0; i < static_cast<u32>(Counter::count); ++i) d[kCounters[i]] = s.counters[i];
  return d;
}

nb::list list_of(const std::vector<NamespaceInfo>& infos) {
  nb::list out;
  for (const NamespaceInfo& i : infos) {
    nb::dict d;
    d["number"] = i.number;
    d["digest"] = bytes_of(i.digest);
    d["label"] = nb::steal(
        PyUnicode_DecodeUTF8(i.label.data(), static_cast<Py_ssize_t>(i.label.size()), "replace"));
    d["epoch"] = i.epoch;
    d["ready_pages"] = i.ready_pages;
    out.append(d);
  }
  return out;
}

nb::list list_of(const std::vector<SlotInfo>& infos) {
  nb::list out;
  for (const SlotInfo& i : infos) {
    nb::dict d;
    d["session"] = i.session;
    d["pid"] = i.pid;
    d["command"] = nb::steal(PyUnicode_DecodeUTF8(
        i.command.data(), static_cast<Py_ssize_t>(i.command.size()), "replace"));
    d["opened_s"] = i.opened_s;
    d["namespace"] = i.ns;
    d["alive"] = i.alive;
    d["holds"] = i.holds;
    d["reserved_pages"] = i.reserved_pages;
    d["oldest_hold_s"] = i.oldest_hold_s;
    out.append(d);
  }
  return out;
}

template <class Ask>
auto unlocked(Ask ask) {
  const Outside released;
  return ask();
}

nb::dict peek_at(const std::string& root, const std::string& name, bool) {
  const Peek p = unlocked([&] { return peek(root, name); });
  nb::dict d;
  d["name"] = name;
  d["path"] = p.path;
  d["format"] = p.verdict.header.prefix.format;
  d["page_bytes"] = p.verdict.shape.page_bytes;
  d["page_tokens"] = p.verdict.shape.page_tokens;
  d["page_count"] = p.verdict.shape.page_count;
  d["size_bytes"] = p.size_bytes;
  d["living"] = p.living;
  d["problem"] = p.verdict.problem;
  return d;
}

nb::dict inspect_at(const std::string& root, const std::string& name, bool any_filesystem,
                    bool living_too) {
  const Inspection i = unlocked([&] { return inspect(root, name, any_filesystem, living_too); });
  nb::dict d;
  d["stats"] = dict_of(i.stats);
  d["namespaces"] = list_of(i.namespaces);
  d["sessions"] = list_of(i.sessions);
  d["findings"] = i.findings;
  return d;
}

void bind_hold(nb::module_& m) {
  nb::class_<PageView>(m, "PageView", nb::type_slots(page_view_slots));
  nb::class_<PyHold>(m, "Hold")
      .def_prop_ro("number", [](const PyHold& h) { return h.handle->what().number; })
      .def_prop_ro("kind",
                   [](const PyHold& h) {
                     return h.handle->what().kind == HoldKind::read ? "read" : "write";
                   })
      .def_prop_ro("parts", [](const PyHold& h) { return h.handle->what().parts; })
      .def_prop_ro("part", [](const PyHold& h) { return h.handle->what().part; })
      .def_prop_ro("pages",
                   [](const PyHold& h) {
                     const auto& pages = h.handle->what().pages;
                     return numpy_array(reinterpret_cast<const int*>(pages.data()), pages.size());
                   })
      .def_prop_ro("ended", [](const PyHold& h) { return h.handle->ended(); })
      .def("view", &view_page, "i"_a)
      .def("finish", &finish_hold, "ok"_a, "count"_a = -1)
      .def("end", [](const PyHold& h) { end_quietly([&] { h.handle->end(); }); })
      .def("token", [](const PyHold& h) { return bytes_of(h.handle->token()); });
}

void bind_cache(nb::module_& m) {
  nb::class_<PyCache>(m, "Cache")
      .def_static("open", &open_cache, "root"_a, "name"_a, "mode"_a, "page_bytes"_a = 0,
                  "page_tokens"_a = 0, "fragments"_a = std::vector<u64>{}, "page_count"_a = 0,
                  "namespace"_a = nb::none(), "label"_a = "", "max_reserved"_a = 0,
                  "pending_bound_s"_a = 5.0, "any_filesystem"_a = false, "progress"_a = nb::none())
      .def_prop_ro("info", &info_of)
      .def_prop_ro("epoch", [](const PyCache& c) { return c.cache->epoch(); })
      .def_prop_ro("orphaned", [](const PyCache& c) { return c.cache->orphaned(); })
      .def_prop_ro("closed", [](const PyCache& c) { return c.cache->closed(); })
      .def(
          "match",
          [](const PyCache& c, const KeyArray& k) {
            return unlocked([&] { return c.cache->match(keys_of(k)); });
          },
          "keys"_a)
      .def("lookup", &lookup, "keys"_a, "parts"_a = 0, "gaps"_a = false)
      .def("reserve", &reserve, "keys"_a, "starts"_a = nb::none(), "linked"_a = true,
           "epoch"_a = -1, "parent_page"_a = -1, "parent_version"_a = 0, "after"_a = nb::none(),
           "parts"_a = 0)
      .def("claim", &claim, "token"_a, "part"_a)
      .def("wait", &wait_for, "keys"_a, "timeout_s"_a)
      .def(
          "clear", [](const PyCache& c, bool all) { c.cache->clear(all); }, "everything"_a,
          Unlocked())
      .def(
          "clear_namespace", [](const PyCache& c, u32 n) { c.cache->clear_namespace(n); },
          "number"_a, Unlocked())
      .def(
          "stats",
          [](const PyCache& c, bool pinned) {
            return dict_of(unlocked([&] { return c.cache->stats(pinned); }));
          },
          "count_pinned"_a = true)
      .def("sessions",
           [](const PyCache& c) { return list_of(unlocked([&] { return c.cache->sessions(); })); })
      .def(
          "namespaces",
          [](const PyCache& c) { return list_of(unlocked([&] { return c.cache->namespaces(); })); })
      .def("check", [](const PyCache& c) { return unlocked([&] { return c.cache->check(); }); })
      .def(
          "sweep", [](const PyCache& c) { return c.cache->sweep(); }, Unlocked())
      .def("close", [](const PyCache& c) { end_quietly([&] { c.cache->close(); }); });
}

}  // namespace
}  // namespace hostcache

NB_MODULE(_core, m) {
  using namespace hostcache;
  // At exit daemon threads may hold objects of ours: that is no leak to warn of.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate);
  bind_hold(m);
  bind_cache(m);
  m.def("peek", &peek_at, "root"_a, "name"_a, "any_filesystem"_a = false);
  m.def("inspect", &inspect_at, "root"_a, "name"_a, "any_filesystem"_a = false,
        "living_too"_a = false);
  m.def("names", &list_names, "root"_a, Unlocked());
  m.def("remove", &remove_name, "root"_a, "name"_a, "force"_a, "any_filesystem"_a = false,
        Unlocked());
#ifdef HOSTCACHE_KILL_POINTS
  m.def("kill_at", &kill_at, "n"_a);
  m.def("kill_points_passed", &kill_points_passed);
#endif
  m.def("shutdown", &shut_down);
  pthread_atfork(nullptr, nullptr, [] { outside = 0; });  // those threads are not in the child
}
