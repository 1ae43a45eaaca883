#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "errors.h"

namespace hostcache {

thread_local Segment::Sink Segment::sink_;

namespace {

constexpr u64 kMaxSegment = u64{1} << 46;

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/')); }

constexpr u64 round_up(u64 value, u64 unit) { return (value + unit - 1) / unit * unit; }

void refuse_shape(const Shape& s) {
  if (s.page_bytes == 0 || s.page_bytes > (u64{1} << 40))
    throw Error(Code::bad_value,
                "page_bytes is " + std::to_string(s.page_bytes) + "; a page has 1 to 2^40 bytes");
  if (s.page_count == 0 || s.page_count > kMaxPages)
    throw Error(Code::bad_value, "page_count is " + std::to_string(s.page_count) +
                                     "; a cache has 1 to " + std::to_string(kMaxPages) + " pages");
  if (s.fragments.empty() || s.fragments.size() > kMaxFragments)
    throw Error(Code::bad_value, "a page has 1 to " + std::to_string(kMaxFragments) +
                                     " fragments, not " + std::to_string(s.fragments.size()));
  const u64 sum = std::accumulate(s.fragments.begin(), s.fragments.end(), u64{0});
  if (sum != s.page_bytes)
    throw Error(Code::bad_value, "the fragments have " + std::to_string(sum) +
                                     " bytes together, page_bytes is " +
                                     std::to_string(s.page_bytes));
  if (u64{s.page_count} > kMaxSegment / s.page_bytes)
    throw Error(Code::bad_value, std::to_string(s.page_count) + " pages of " +
                                     std::to_string(s.page_bytes) +
                                     " bytes are more than a segment can hold (64 TiB)");
}

u32 ring_capacity(u32 page_count) {
  u32 capacity = 64;
  while (capacity < 2 * u64{page_count}) capacity *= 2;
  return capacity;
}

}  // namespace

Geometry plan(const Shape& shape) {
  refuse_shape(shape);
  Geometry g{};
  g.page_bytes = shape.page_bytes;
  g.page_count = shape.page_count;
  g.page_tokens = shape.page_tokens;
  g.fragment_count = static_cast<u32>(shape.fragments.size());
  g.slot_count = kSlots;
  g.namespace_count = kNamespaces;
  g.hold_count = kHolds;
  g.chunk_count = shape.page_count / 8 + 8192;
  // The largest transactions: giving up the keys of a whole hold takes about three records a
  // page, one step of eviction about eight a page looked at. Whoever fills the log closes the
  // transaction at a safe place and goes on in the next.
  g.log_capacity =
      3 * (shape.page_count < kMaxHoldPages ? shape.page_count : kMaxHoldPages) + 16384;
  g.bucket_count = shape.page_count / 6 + 2;
  g.ring_capacity = ring_capacity(shape.page_count);
  u64 at = kSlotsAt;
  const auto take = [&at](u64 bytes) {
    const u64 place = at;
    at = round_up(at + bytes, 64);
    return place;
  };
  g.slots_at = take(g.slot_count * sizeof(Slot));
  g.namespaces_at = take(g.namespace_count * sizeof(NamespaceRecord));
  g.holds_at = take(g.hold_count * sizeof(Hold));
  g.chunks_at = take(u64{g.chunk_count} * sizeof(Chunk));
  g.chunk_stack_at = take(u64{g.chunk_count} * 4);
  g.log_at = take(u64{g.log_capacity} * sizeof(LogRecord));
  g.entries_at = take(u64{g.page_count} * sizeof(Entry));
  g.buckets_at = take(u64{g.bucket_count} * sizeof(Bucket));
  g.ring_at = take(u64{g.ring_capacity} * 4);
  g.free_stack_at = take(u64{g.page_count} * 4);
  g.pages_at = round_up(at, kMemoryPage);
  g.size = round_up(g.pages_at + u64{g.page_count} * g.page_bytes, kMemoryPage);
  return g;
}

namespace {
u64 fnv1a(const void* bytes, size_t count, u64 h) {  // Fowler, Noll, Vo; 64 bits
  const auto* p = static_cast<const u8*>(bytes);
  for (size_t i = 0; i < count; ++i) h = (h ^ p[i]) * 0x100'0000'01B3ULL;
  return h;
}
}  // namespace

u64 header_check(const Header& header, const u64* fragments) {
  u64 h = fnv1a(&header.prefix, sizeof header.prefix, 0xCBF2'9CE4'8422'2325ULL);
  h = fnv1a(&header.geometry, sizeof header.geometry, h);
  return fnv1a(fragments, kMaxFragments * sizeof(u64), h);
}

Fd open_segment_file(const std::string& path, const std::string& name, bool writable) {
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  Fd fd(::open(path.c_str(), flags));
  if (!fd && errno == ENOENT)
    throw Error(Code::cache_not_found, "there is no cache '" + name + "' (" + path + ")");
  if (!fd && (errno == EACCES || errno == EPERM || errno == ELOOP || errno == EISDIR))
    throw Error(Code::not_allowed, "'" + name + "' can not be opened (" + path +
                                       "): it belongs to another user or is no regular file");
  if (!fd) throw os_error("open " + path, errno);
  struct stat st{};
  if (fstat(fd.get(), &st) != 0) throw os_error("fstat " + path, errno);
  if (!S_ISREG(st.st_mode))
    throw Error(Code::not_allowed, "'" + name + "' is no regular file (" + path + ")");
  if (st.st_uid != geteuid())
    throw Error(Code::not_allowed, "'" + name + "' belongs to user " + std::to_string(st.st_uid) +
                                       ", this process is user " + std::to_string(geteuid()) +
                                       "; use another root or name");
  if ((st.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", st.st_mode & 07777);
    throw Error(Code::not_allowed, "'" + name + "' has mode " + mode +
                                       ", a segment has 0600: others could have written to it; "
                                       "remove it: hostcache rm " +
                                       name + in_root(folder_of(path)));
  }
  return fd;
}

namespace {

Verdict refused(Verdict v, Standing standing, std::string problem) {
  v.standing = standing;
  v.problem = std::move(problem);
  return v;
}

// Nothing here maps the file: what it says is compared with what a maker would have written.
Verdict judge_body(Verdict v, int fd, const struct stat& st, const std::string& name) {
  const Prefix& p = v.header.prefix;
  const auto size = static_cast<u64>(st.st_size);
  std::vector<u64> fragments(kMaxFragments);
  if (size != p.size || v.header.geometry.size != p.size)
    return refused(v, Standing::damaged,
                   "segment '" + name + "' has " + std::to_string(size) +
                       " bytes, its header says " + std::to_string(p.size));
  if (pread(fd, fragments.data(), kMaxFragments * 8, kFragmentsAt) != kMaxFragments * 8)
    return refused(v, Standing::damaged, "segment '" + name + "' can not be read");
  if (header_check(v.header, fragments.data()) != v.header.check)
    return refused(v, Standing::damaged, "the header of segment '" + name + "' was altered");
  const Geometry& g = v.header.geometry;
  if (g.fragment_count == 0 || g.fragment_count > kMaxFragments)
    return refused(v, Standing::damaged, "segment '" + name + "' names no fragments");
  fragments.resize(g.fragment_count);
  v.shape = {g.page_bytes, g.page_tokens, g.page_count, std::move(fragments)};
  Geometry expected{};
  try {
    expected = plan(v.shape);
  } catch (const Error& e) {
    return refused(v, Standing::damaged, "segment '" + name + "': " + e.what());
  }
  if (std::memcmp(&expected, &g, sizeof g) != 0)
    return refused(v, Standing::damaged, "the layout of segment '" + name + "' is not ours");
  if (static_cast<u64>(st.st_blocks) * 512 < size)
    return refused(v, Standing::damaged,
                   "segment '" + name + "' has " + std::to_string(st.st_blocks * 512) +
                       " bytes of memory for its " + std::to_string(size) + ": it has holes");
  v.standing = Standing::usable;
  return v;
}

}  // namespace

namespace {
Verdict judge_all(int fd, const std::string& name, const std::string& path) {
  Verdict v;
  struct stat st{};
  if (fstat(fd, &st) != 0) throw os_error("fstat '" + name + "'", errno);
  const ssize_t got = pread(fd, &v.header, sizeof v.header, 0);
  const Prefix& p = v.header.prefix;
  if (got < static_cast<ssize_t>(sizeof(Prefix)) || p.magic != kMagic)
    return refused(
        v, Standing::foreign,
        "file '" + name + "' (" + std::to_string(st.st_size) +
            " bytes) is not a hostcache segment; if nobody needs it, run: hostcache rm " + name +
            in_root(folder_of(path)));
  u8 boot[16];
  boot_id(boot);
  if (std::memcmp(boot, p.boot_id, 16) != 0)
    return refused(v, Standing::other_boot, "segment '" + name + "' is of another boot");
  if (p.format != kFormat || p.kind != kKindPages)
    return refused(v, Standing::other_format,
                   "segment '" + name + "' has format " + std::to_string(p.format) + " kind " +
                       std::to_string(p.kind) + ", this build reads format " +
                       std::to_string(kFormat) + " kind " + std::to_string(kKindPages) +
                       "; stop the engines that use it, then run: hostcache rm " + name +
                       in_root(folder_of(path)));
  if (got != static_cast<ssize_t>(sizeof v.header))
    return refused(
        v, Standing::damaged,
        "segment '" + name + "' ends inside its header, at " + std::to_string(got) + " bytes");
  return judge_body(std::move(v), fd, st, name);
}
}  // namespace

Verdict judge(int fd, const std::string& name, const std::string& path) {
  Verdict v = judge_all(fd, name, path);
  if (v.standing == Standing::damaged || v.standing == Standing::other_boot)
    v.problem +=
        "; open makes it anew, hostcache rm " + name + in_root(folder_of(path)) + " removes it";
  return v;
}

namespace {
u8* map_whole(int fd, u64 size, const std::string& path) {
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw os_error("mmap " + path + ", " + bytes_text(size), errno);
  madvise(base, size, MADV_DONTDUMP);  // a core dump would keep a dead session's locks for long
  return static_cast<u8*>(base);
}
}  // namespace

MappedSegment::MappedSegment(Fd fd, std::string path, std::string name, const Verdict& verdict)
    : fd_(std::move(fd)),
      witness_(fd_.get()),
      path_(std::move(path)),
      name_(std::move(name)),
      shape_(verdict.shape),
      random_(verdict.header.prefix.random),
      size_(verdict.header.geometry.size),
      segment_(map_whole(fd_.get(), size_, path_), verdict.header.geometry) {}

MappedSegment::~MappedSegment() { munmap(segment_.base(), size_); }

bool MappedSegment::name_leads_here() const {
  struct stat named{};
  struct stat ours{};
  return stat(path_.c_str(), &named) == 0 && fstat(fd_.get(), &ours) == 0 &&
         named.st_dev == ours.st_dev && named.st_ino == ours.st_ino;
}

}  // namespace hostcache
