// What every door between XLA and a kernel has in common.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

#include "instruction_sets.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace pwjax {

namespace ffi = xla::ffi;

template <ffi::DataType T, size_t N>
using In = ffi::Buffer<T, N>;
template <ffi::DataType T, size_t N>
using Out = ffi::Result<ffi::Buffer<T, N>>;

template <class Buffer>
bool has_shape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  auto have = buffer.dimensions();
  return std::equal(have.begin(), have.end(), shape.begin(), shape.end());
}

// Does a call that was found good, on this thread and those of XLA's pool that are free: `fill` gives a team its work on
// the instruction set in use, and what it returns lives until the team is done. `refuse` makes an error of a sentence.
template <class Refuse, class Fill>
ffi::Error carry_out(ffi::ThreadPool& pool, bool exact, const Refuse& refuse, const Fill& fill) {
  const InstructionSet* set = instruction_set(exact);
  if (!set) return refuse("PWJAX_NATIVE_ISA names an instruction set that this processor does not have");
  auto team = std::make_shared<Team>();
  std::shared_ptr<void> work = fill(*set, team.get());
  Team::run(team, pool.num_threads() - 1, [&](auto task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

}  // namespace pwjax
