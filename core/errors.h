// What the core throws; bindings.cpp turns each code into the class of that name in Python.
// Nothing throws while the table lock is held.
#pragma once

#include <stdexcept>
#include <string>

namespace hostcache {

enum class Code {
  bad_value,
  busy,
  cache_exists,
  cache_not_found,
  damaged,
  format_mismatch,
  lease_ended,
  no_room,
  not_allowed,
  unsupported,
  os,
};

class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what) : std::runtime_error(what), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

// The failed system call, what it was about, and the errno in words.
Error os_error(const std::string& doing, int error);

// Behind a command that a message names: " --root FOLDER", so that it means this cache.
std::string in_root(const std::string& root);

// "4.0 GiB (4294967296 bytes)"
std::string bytes_text(unsigned long long bytes);

}  // namespace hostcache
