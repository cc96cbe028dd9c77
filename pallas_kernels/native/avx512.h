// What the kernels for AVX-512 (F, BW, DQ, VL) share, whatever they multiply. Included with that target chosen.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "inline.h"
#include "mode.h"
#include "nibbles.h"

namespace pwjax {
namespace {

struct Avx512 {
  using V = __m512;
  using I = __m512i;
  using Mode = FlushSubnormals;
  static constexpr int kLanes = 16, kTile = 6, kChunk = 32 * kLanes;

  static V zero() { return _mm512_setzero_ps(); }
  static V spread(float x) { return _mm512_set1_ps(x); }
  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  // Sums of four vectors.
  static void sums(const V* v, float* to) {
    const V a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const V b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const V quarters = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }

  // Nibble 2n + h of word i of vector q is the code of column 8n + 4h + q of word i: `low` its last four bits, `high`
  // those before.
  struct Codes {
    I low[4], high[4];
  };

  // Codes of group g: byte n of word i is that of column 8n + g, under the remains of another's where it is shorter.
  template <int B>
  static PWJAX_INLINE I bytes(const Codes& codes, int g) {
    const I code = g < 4 ? codes.low[g % 4] : right<4>(codes.low[g % 4]);
    if constexpr (B <= 4) return code;
    return select(all(0x0f0f0f0f), code, g < 4 ? left<4>(codes.high[g % 4]) : codes.high[g % 4]);
  }

  static I at(const uint32_t* words) { return _mm512_loadu_si512(words); }

  static I select(I mask, I yes, I no) { return _mm512_ternarylogic_epi32(mask, yes, no, 0xca); }

  static I all(uint32_t word) { return _mm512_set1_epi32(static_cast<int>(word)); }
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  template <int N>
  static I left(I words) {
    return _mm512_slli_epi32(words, N);
  }
  template <int N>
  static I right(I words) {
    return _mm512_srli_epi32(words, N);
  }

  // Entries that the last N bits of every half of a word choose.
  template <int N>
  static PWJAX_INLINE I lookup(const I* table, I code) {
    if constexpr (N == 5) {
      return _mm512_permutexvar_epi16(code, table[0]);
    } else if constexpr (N == 6) {
      return _mm512_permutex2var_epi16(table[0], code, table[1]);
    } else {
      const __mmask32 one = _mm512_test_epi16_mask(code, _mm512_set1_epi16(1 << (N - 1)));
      return _mm512_mask_blend_epi16(one, lookup<N - 1>(table, code), lookup<N - 1>(table + (1 << (N - 6)), code));
    }
  }

  // Up to 16 words, the others 0.
  static void copy_part(const uint32_t* from, int64_t count, uint32_t* to) {
    const __mmask16 present = count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0;
    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi32(present, from));
  }
};

}  // namespace
}  // namespace pwjax
