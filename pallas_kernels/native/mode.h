// Subnormal numbers count as zero while this lives: the same on every thread, whatever mode the thread came with.
#pragma once

#include <immintrin.h>

namespace pwjax {
namespace {

class FlushSubnormals {
 public:
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;

 private:
  unsigned before_;
};

}  // namespace
}  // namespace pwjax
