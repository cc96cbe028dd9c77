// What the kernels are compiled for, and which of it this processor has.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "bfloat16.h"
#include "call.h"
#include "linear.h"
#include "team.h"

namespace pwjax {

// Fill a team with the work of a call; what they return must live until the team is done.
using ExpertFFN = std::shared_ptr<void> (*)(const Call&, const std::vector<Group>&, Team*);
using PagedAttention = std::shared_ptr<void> (*)(const Attention&, Team*);
using LinearProduct = std::shared_ptr<void> (*)(const Linear&, Team*);

#define PWJAX_DECLARE(set)                                                                       \
  std::shared_ptr<void> expert_ffn_##set(const Call&, const std::vector<Group>&, Team*);         \
  std::shared_ptr<void> paged_attention_##set(const Attention&, Team*);                          \
  std::shared_ptr<void> linear_##set(const Linear&, Team*);
PWJAX_DECLARE(portable)
#if defined(__x86_64__)
PWJAX_DECLARE(avx2)
PWJAX_DECLARE(avx512)
#endif
#if PWJAX_BF16
PWJAX_DECLARE(avx512_bf16)
#endif
#undef PWJAX_DECLARE

struct InstructionSet {
  const char* name;
  bool available;
  bool rounds;  // inputs of products to bfloat16
  ExpertFFN expert_ffn;
  PagedAttention paged_attention;
  LinearProduct linear;
};

// Best first; the last one always works.
inline const std::vector<InstructionSet>& instruction_sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
#if PWJAX_BF16
  static const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  static const std::vector<InstructionSet> sets = {
#if PWJAX_BF16
      // Attention multiplies nothing that is rounded.
      {"avx512_bf16", bf16, true, expert_ffn_avx512_bf16, paged_attention_avx512, linear_avx512_bf16},
#endif
#if defined(__x86_64__)
      {"avx512", avx512, false, expert_ffn_avx512, paged_attention_avx512, linear_avx512},
      {"avx2", avx2, false, expert_ffn_avx2, paged_attention_avx2, linear_avx2},
#endif
      {"portable", true, false, expert_ffn_portable, paged_attention_portable, linear_portable},
  };
  return sets;
}

// The best that this processor has, or the one that PWJAX_NATIVE_ISA names; null if that one does not work here. Where
// `exact` is asked for, the best from there on that does not round.
const InstructionSet* instruction_set(bool exact);

}  // namespace pwjax
