// A mapped segment: where its parts lie, and whether a file is one of ours.
//
// Geometry follows from page_bytes, page_count, page_tokens and the fragments alone (plan()), so
// what a file says of itself is trusted only where it equals what we would have made.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kill.h"
#include "layout.h"
#include "sys.h"

namespace hostcache {

struct Shape {
  u64 page_bytes = 0;
  u32 page_tokens = 0;
  u32 page_count = 0;
  std::vector<u64> fragments;
};

// Throws bad_value where no segment of that shape can be.
Geometry plan(const Shape& shape);
u64 header_check(const Header& header, const u64* fragments);

// What a file of that name is to us.
enum class Standing { usable, foreign, other_format, other_boot, damaged };

struct Verdict {
  Standing standing = Standing::foreign;
  std::string problem;  // empty where usable
  Header header{};
  Shape shape;
};

// Reads, never maps: a truncated file can not fault. Throws not_allowed for a file that another
// user owns or others may open, cache_not_found where there is none.
Verdict judge(int fd, const std::string& name, const std::string& path);
Fd open_segment_file(const std::string& path, const std::string& name, bool writable);

// Ordered access to words that other processes read without the lock.
template <class T>
T load(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
template <class T>
void put(T& word, T value, Where where = Where::current()) {
  kill_point(where);
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}
template <class T>
T add(T& word, T value, Where where = Where::current()) {
  kill_point(where);
  return std::atomic_ref<T>(word).fetch_add(value, std::memory_order_acq_rel);
}
template <class T>
T swap_out(T& word, T value, Where where = Where::current()) {
  kill_point(where);
  return std::atomic_ref<T>(word).exchange(value, std::memory_order_acq_rel);
}
template <class T>
bool swap_if(T& word, T expected, T desired, Where where = Where::current()) {
  kill_point(where);
  return std::atomic_ref<T>(word).compare_exchange_strong(expected, desired,
                                                          std::memory_order_acq_rel);
}

// Pointers into `base`, which is the mapping of a segment or a private copy of all before its
// page bytes. Geometry is our own copy: a flip in the mapped header moves nothing.
class Segment {
 public:
  Segment(u8* base, const Geometry& geometry) : base_(base), g_(geometry) {}

  const Geometry& geometry() const { return g_; }
  u8* base() const { return base_; }
  Header& header() const { return at<Header>(0); }
  Control& control() const { return at<Control>(kControlAt); }
  Slot& slot(u32 i) const { return (&at<Slot>(g_.slots_at))[i]; }
  NamespaceRecord& ns(u32 i) const {
    return (&at<NamespaceRecord>(g_.namespaces_at))[i < g_.namespace_count ? i : 0];
  }
  Hold& hold(u32 i) const { return (&at<Hold>(g_.holds_at))[i]; }
  LogRecord& log(u64 i) const { return (&at<LogRecord>(g_.log_at))[i]; }
  Bucket& bucket(u32 i) const { return (&at<Bucket>(g_.buckets_at))[i]; }
  u32& ring(u64 cursor) const { return (&at<u32>(g_.ring_at))[cursor & (g_.ring_capacity - 1)]; }
  u32& free_stack(u64 i) const { return (&at<u32>(g_.free_stack_at))[i]; }
  u32& chunk_stack(u64 i) const { return (&at<u32>(g_.chunk_stack_at))[i]; }
  // Numbers read from shared memory may be anything: one out of range leads to a private sink,
  // so that no walk leaves the segment.
  Entry& entry(u32 page) const {
    return page < g_.page_count ? (&at<Entry>(g_.entries_at))[page] : sink_.entry;
  }
  Chunk& chunk(u32 i) const {
    return i < g_.chunk_count ? (&at<Chunk>(g_.chunks_at))[i] : sink_.chunk;
  }
  u8* page(u32 i) const { return base_ + g_.pages_at + u64{i} * g_.page_bytes; }
  bool contains(const void* place) const {
    const auto* p = static_cast<const u8*>(place);
    return p >= base_ && p < base_ + g_.pages_at;
  }

  // Where an entry of that namespace and epoch is current.
  u32 epoch_of(u32 ns_number) const {
    return Guarded::value(load(control().epoch)) + Guarded::value(load(ns(ns_number).epoch));
  }
  bool current(const Entry& e, u64 use) const { return Use::epoch(use) == epoch_of(e.ns); }

 private:
  template <class T>
  T& at(u64 offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  struct Sink {
    Entry entry{};
    Chunk chunk{};
  };
  static thread_local Sink sink_;

  u8* base_;
  Geometry g_;
};

// A segment mapped from its file. The descriptor never holds a lock: it asks who lives.
class MappedSegment {
 public:
  MappedSegment(Fd fd, std::string path, std::string name, const Verdict& verdict);
  ~MappedSegment();
  MappedSegment(const MappedSegment&) = delete;
  MappedSegment& operator=(const MappedSegment&) = delete;

  const Segment& segment() const { return segment_; }
  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  const std::string& name() const { return name_; }
  std::string root() const { return path_.substr(0, path_.rfind('/')); }
  const Shape& shape() const { return shape_; }
  u64 random() const { return random_; }
  bool name_leads_here() const;
  bool anybody_lives() const { return !witness_.gone(kLivenessBase, 0); }
  const Witness& witness() const { return witness_; }

 private:
  Fd fd_;
  Witness witness_;
  std::string path_;
  std::string name_;
  Shape shape_;
  u64 random_;
  u64 size_;
  Segment segment_;
};

}  // namespace hostcache
