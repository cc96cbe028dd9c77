// One call of linear: products of tokens with the rows of a bfloat16 matrix.
#pragma once

#include <cstdint>

#include "layout.h"

namespace pwjax {

struct Linear {
  int64_t tokens, rows, cols;  // an even number of columns
  const float* x;              // [tokens, cols]
  const uint32_t* weights;     // [rows, cols / 2] pairs, the low half first
  float* y;                    // [tokens, rows]
  float* scratch;              // scratch_floats()

  int64_t scratch_floats() const { return tokens * padded(cols); }
};

}  // namespace pwjax
