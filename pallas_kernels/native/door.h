// What every door between XLA and a kernel has in common.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

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

// Runs the work of a team on this thread and those of XLA's pool that are free.
inline void run(std::shared_ptr<Team> team, ffi::ThreadPool& pool) {
  Team::run(team, pool.num_threads() - 1, [&](auto task) { pool.Schedule(std::move(task)); });
}

}  // namespace pwjax
