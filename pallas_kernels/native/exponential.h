// The exponential function of every kernel.
#pragma once

#include <cstdint>

namespace pwjax {
namespace {

// exp by a power of two and a polynomial of degree 6 on [-ln2/2, ln2/2]: within two units in the last place.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  float n = shifted - 12582912.0f;
  float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float two;
  __builtin_memcpy(&two, &power, 4);
  return p * two;
}

}  // namespace
}  // namespace pwjax
