// IEEE half precision to single, exactly.
#pragma once

#include <cstdint>

#include "inline.h"

namespace pwjax {
namespace {

PWJAX_INLINE float half(uint32_t bits) {
  uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
  float value;
  if (exponent == 0) {
    value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  uint32_t whole = sign | (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | mantissa << 13;
  __builtin_memcpy(&value, &whole, 4);
  return value;
}

}  // namespace
}  // namespace pwjax
