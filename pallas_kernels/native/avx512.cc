// The kernels for AVX-512 with VBMI: one vpermb looks up 64 entries, 64 weights at a time.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "call.h"
#include "team.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx2,fma,f16c")
#include "half.h"
#include "mode.h"
#include "nibbles.h"

namespace pwjax {
namespace {

struct Isa {
  using V = __m512;
  using I = __m512i;
  using Mode = FlushSubnormals;
  static constexpr int kLanes = 16, kTile = 6, kChunk = 32 * kLanes;

  static V zero() { return _mm512_setzero_ps(); }
  static V spread(float x) { return _mm512_set1_ps(x); }
  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, V v) { _mm512_storeu_ps(to, v); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(V v) { return _mm512_reduce_add_ps(v); }

  // Byte j of group g is column 8j + g; unpacking bytes works in quarters of a vector, which pairs quarters 0 and 1,
  // 2 and 3.
  static int plane_column(int at) {
    int g = at / 64, u = at % 64 / 16, lane = at % 16;
    int byte = u / 2 * 32 + lane / 8 * 16 + u % 2 * 8 + lane % 8;
    return 8 * byte + g;
  }
  // Even columns of 16 words, then odd ones.
  static int pair_column(int at) { return at / 32 * 32 + at % 16 * 2 + at % 32 / 16; }

  // Low and high bytes of float16 entries, 64 entries a vector.
  struct Table {
    I low[4], high[4];
  };
  // Nibble 2n + h of word i of vector q is the code of column 32i + 8n + 4h + q: `low` its last four bits, `high`
  // those before.
  struct Codes {
    I low[4], high[4];
  };

  template <int B>
  static void make_table(const uint32_t* lut, Table* table) {
    constexpr int kEntries = 1 << B;
    for (int i = 0; i < (B > 6 ? kEntries / 64 : 1); ++i) {
      alignas(64) uint32_t words[32] = {};
      std::memcpy(words, lut + 32 * i, 4 * (kEntries < 64 ? kEntries / 2 : 32));
      const I a = _mm512_load_si512(words), b = _mm512_load_si512(words + 16);
      const __m256i low_a = _mm512_cvtepi16_epi8(a), low_b = _mm512_cvtepi16_epi8(b);
      const __m256i high_a = _mm512_cvtepi16_epi8(_mm512_srli_epi16(a, 8));
      const __m256i high_b = _mm512_cvtepi16_epi8(_mm512_srli_epi16(b, 8));
      table->low[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low_a), low_b, 1);
      table->high[i] = _mm512_inserti64x4(_mm512_castsi256_si512(high_a), high_b, 1);
    }
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

  template <int B>
  static void unpack(const uint32_t* const* planes, Codes* codes) {
    unpack_nibbles<Isa, B>(planes, codes);
  }

  template <int B>
  static I lookup(const I* table, I code) {
    if constexpr (B <= 6) {
      return _mm512_permutexvar_epi8(code, table[0]);
    } else if constexpr (B == 7) {
      return _mm512_permutex2var_epi8(table[0], code, table[1]);
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), _mm512_permutex2var_epi8(table[0], code, table[1]),
                                    _mm512_permutex2var_epi8(table[2], code, table[3]));
    }
  }

  template <int B>
  static void values(const Codes& codes, const Table& table, int g, V* out) {
    const I nibble = _mm512_set1_epi8(15);
    I code = _mm512_and_si512(g < 4 ? codes.low[g % 4] : _mm512_srli_epi32(codes.low[g % 4], 4), nibble);
    if constexpr (B > 4) {
      I high = g < 4 ? _mm512_slli_epi32(codes.high[g % 4], 4) : codes.high[g % 4];
      code = select(nibble, code, high);
    }
    I low_bytes = lookup<B>(table.low, code), high_bytes = lookup<B>(table.high, code);
    I first = _mm512_unpacklo_epi8(low_bytes, high_bytes), second = _mm512_unpackhi_epi8(low_bytes, high_bytes);
    out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(first));
    out[1] = _mm512_cvtph_ps(_mm512_castsi512_si256(second));
    out[2] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(first, 1));
    out[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(second, 1));
  }

  static void dense_values(const uint32_t* words, V* out) {
    const I upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int u = 0; u < 4; u += 2) {
      I pair = at(words + 8 * u);
      out[u] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
      out[u + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair, upper));
    }
  }
};

}  // namespace
}  // namespace pwjax

#define PWJAX_TILE 6
#define PWJAX_NAME(op) op##_avx512
#include "kernel.h"
#include "attention_kernel.h"
#pragma GCC pop_options
#endif
