// The door between XLA and linear.
#include <cstdint>
#include <memory>
#include <string>

#include "door.h"

namespace pwjax {

ffi::Error linear(ffi::ThreadPool pool, In<ffi::F32, 2> x, In<ffi::U16, 3> stack, In<ffi::S32, 0> index,
                  Out<ffi::F32, 2> y, Out<ffi::F32, 1> scratch, bool exact) {
  auto refuse = [](const std::string& why) { return ffi::Error::InvalidArgument("linear: " + why); };
  auto given = x.dimensions(), matrices = stack.dimensions();
  Linear call{};
  call.tokens = given[0];
  call.rows = matrices[1];
  call.cols = matrices[2];
  if (given[1] != call.cols || !has_shape(*y, {call.tokens, call.rows})) {
    return refuse("the shapes of arguments and results disagree");
  }
  if (call.cols < 2 || call.cols % 2) return refuse("the number of columns is odd or 0");
  if (scratch->dimensions()[0] < call.scratch_floats()) return refuse("the scratch is too small");
  const int64_t which = *index.typed_data();
  if (which < 0 || which >= matrices[0]) {
    return refuse("matrix " + std::to_string(which) + " is not one of " + std::to_string(matrices[0]));
  }
  if (call.tokens == 0 || call.rows == 0) return ffi::Error::Success();
  call.x = x.typed_data();
  call.weights = reinterpret_cast<const uint32_t*>(stack.typed_data() + which * call.rows * call.cols);
  call.y = y->typed_data();
  call.scratch = scratch->typed_data();

  return carry_out(pool, exact, refuse, [&](const InstructionSet& set, Team* team) { return set.linear(call, team); });
}

auto linear_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<In<ffi::F32, 2>>()   // x
      .Arg<In<ffi::U16, 3>>()   // matrices
      .Arg<In<ffi::S32, 0>>()   // which of them
      .Ret<In<ffi::F32, 2>>()   // y
      .Ret<In<ffi::F32, 1>>()   // scratch
      .Attr<bool>("exact");     // inputs are not rounded
}

}  // namespace pwjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pwjax_linear, pwjax::linear, pwjax::linear_binding());

extern "C" int64_t pwjax_linear_scratch(int64_t tokens, int64_t cols) {
  pwjax::Linear call{};
  call.tokens = tokens;
  call.cols = cols;
  return call.scratch_floats();
}
