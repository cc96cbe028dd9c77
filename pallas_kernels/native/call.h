// One call of expert_ffn: its buffers, its scratch, and the groups of choices that share an expert.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace pwjax {

enum class Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

// Tokens T, choices k a token, hidden H, inner I, experts E.
struct Call {
  int64_t tokens, top_k, hidden, inner, experts;
  Activation activation;
  const float* x;               // [T, H]
  const int32_t* experts_of;    // [T, k]
  const float* gates;           // [T, k]
  const bool* valid;            // [T]
  float* y;                     // [T, H]
  float* stats;                 // [T, k, 2]
  float* moments[2];            // [E, H] and [E, I], or null
  float* scratch;               // scratch_floats()

  int64_t choices() const { return tokens * top_k; }
};

// The parts of the scratch, in floats.
struct Scratch {
  float *x_planes, *x_pairs;    // [T, padded(H)]: x in the column order of planes, and of 16-bit pairs
  float *inner, *inner_ordered; // [T*k, I], [T*k, padded(I)]
  float* out;                   // [T*k, H]
  int64_t floats;

  Scratch(float* at, int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner_size) : floats(0) {
    auto take = [&](int64_t count) {
      float* part = at ? at + floats : nullptr;
      floats += count;
      return part;
    };
    x_planes = take(tokens * padded(hidden));
    x_pairs = take(tokens * padded(hidden));
    inner = take(tokens * top_k * inner_size);
    inner_ordered = take(tokens * top_k * padded(inner_size));
    out = take(tokens * top_k * hidden);
  }
};

// An expert that has choices: its blocks, and the flat indices t*k + j of its choices, ascending.
struct Group {
  int64_t expert;
  Block block[2];
  std::vector<int64_t> choices;
};

}  // namespace pwjax
