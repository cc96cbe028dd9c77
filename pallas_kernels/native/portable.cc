// The kernels in plain C++: any processor, any compiler with GCC's vector types.
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "call.h"
#include "half.h"
#include "linear.h"
#include "team.h"

namespace pwjax {
namespace {

struct Isa {
  typedef float V __attribute__((vector_size(16)));
  using W = V;
  using Element = float;
  static constexpr int kLanes = 4, kTile = 3, kChunk = 32 * kLanes;
  struct Mode {
    Mode() {}
  };

  static V zero() { return V{}; }
  static const float* elements(const float* in, float*) { return in; }
  static V spread(float x) { return V{x, x, x, x}; }
  static V load(const float* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(float* to, V v) { __builtin_memcpy(to, &v, sizeof v); }
  static V fma(V a, V b, V c) { return a * b + c; }
  // Sums of four vectors.
  static void sums(const V* v, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
  }

  // Columns in their own order.
  static int plane_column(int at) { return at; }
  static int pair_column(int at) { return at; }

  struct Table {
    float value[256];
  };
  struct Codes {
    uint8_t code[kChunk];
  };

  template <int B>
  static void make_table(const uint32_t* lut, Table* table) {
    for (int i = 0; i < 1 << B; ++i) table->value[i] = half(lut[i / 2] >> (16 * (i % 2)));
  }

  // Up to 4 words, the others 0.
  static void copy_part(const uint32_t* from, int64_t count, uint32_t* to) {
    for (int64_t w = 0; w < kLanes; ++w) to[w] = w < count ? from[w] : 0;
  }

  template <int B>
  static void unpack(const uint32_t* const* planes, int64_t word, Codes* codes) {
    for (int w = 0; w < kChunk / 32; ++w) {
      for (int c = 0; c < 32; ++c) {
        uint32_t code = 0;
        for (int p = 0; p < B; ++p) code = code << 1 | (planes[p][word + w] >> c & 1);
        codes->code[32 * w + c] = static_cast<uint8_t>(code);
      }
    }
  }

  template <int B>
  static void values(const Codes& codes, const Table& table, int g, V* out) {
    const uint8_t* code = codes.code + 4 * kLanes * g;
    for (int u = 0; u < 4; ++u, code += kLanes) {
      out[u] = V{table.value[code[0]], table.value[code[1]], table.value[code[2]], table.value[code[3]]};
    }
  }

  static void dense_values(const uint32_t* words, V* out) {
    for (int u = 0; u < 4; ++u, words += 2) {
      const uint32_t pairs[kLanes] = {words[0] << 16, words[0] & 0xffff0000u, words[1] << 16, words[1] & 0xffff0000u};
      __builtin_memcpy(&out[u], pairs, sizeof pairs);
    }
  }
};

}  // namespace
}  // namespace pwjax

#define PWJAX_TILE 3
#define PWJAX_NAME(op) op##_portable
#include "kernel.h"
#include "linear_kernel.h"
#include "attention_kernel.h"
