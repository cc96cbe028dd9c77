// What expert_ffn is compiled for, and which of it this processor has.
#pragma once

#include <memory>
#include <vector>

#include "call.h"
#include "team.h"

namespace pwjax {

using Fill = std::shared_ptr<void> (*)(const Call&, const std::vector<Group>&, Team*);
std::shared_ptr<void> expert_ffn_portable(const Call&, const std::vector<Group>&, Team*);
#if defined(__x86_64__)
std::shared_ptr<void> expert_ffn_avx2(const Call&, const std::vector<Group>&, Team*);
std::shared_ptr<void> expert_ffn_avx512(const Call&, const std::vector<Group>&, Team*);
#endif

struct InstructionSet {
  const char* name;
  bool available;
  Fill expert_ffn;
};

// Best first; the last one always works.
inline const std::vector<InstructionSet>& instruction_sets() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vbmi");
#endif
  static const std::vector<InstructionSet> sets = {
#if defined(__x86_64__)
      {"avx512", avx512, expert_ffn_avx512},
      {"avx2", avx2, expert_ffn_avx2},
#endif
      {"portable", true, expert_ffn_portable},
  };
  return sets;
}

}  // namespace pwjax
