// The door between XLA and the kernels: takes buffers and attributes apart, checks everything that an address is made
// of, and picks the instruction set once.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "instruction_sets.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pwjax {

// The best that this processor has, or the one that PWJAX_NATIVE_ISA names; null if that one does not work here.
const InstructionSet* instruction_set() {
  static const InstructionSet* chosen = [] {
    const char* wanted = std::getenv("PWJAX_NATIVE_ISA");
    for (const InstructionSet& set : instruction_sets()) {
      if (set.available && (!wanted || !*wanted || !std::strcmp(wanted, set.name))) return &set;
    }
    return static_cast<const InstructionSet*>(nullptr);
  }();
  return chosen;
}

template <ffi::DataType T, size_t N>
using In = ffi::Buffer<T, N>;
template <ffi::DataType T, size_t N>
using Out = ffi::Result<ffi::Buffer<T, N>>;

ffi::Error expert_ffn(ffi::ThreadPool pool, In<ffi::F32, 2> x, In<ffi::S32, 2> experts_of, In<ffi::F32, 2> gates,
                      In<ffi::PRED, 1> valid, In<ffi::U32, 2> arena, In<ffi::S32, 2> bits, In<ffi::S32, 3> pages,
                      Out<ffi::F32, 2> y, Out<ffi::F32, 3> stats, Out<ffi::F32, 2> outer, Out<ffi::F32, 2> inner,
                      Out<ffi::F32, 1> scratch, ffi::Span<const int64_t> widths, ffi::Span<const int64_t> gate_up,
                      ffi::Span<const int64_t> down, int64_t activation) {
  auto refuse = [](const std::string& why) { return ffi::Error::InvalidArgument("expert_ffn: " + why); };
  if (widths.size() != 3 || gate_up.size() != 3 || down.size() != 3) return refuse("misshapen attributes");
  auto dims = [](const auto& buffer) { return buffer.dimensions(); };
  Geometry geometry{dims(arena)[1], widths[0], widths[1], widths[2], dims(pages)[2],
                    {{gate_up[0], gate_up[1], gate_up[2]}, {down[0], down[1], down[2]}}};
  if (std::string problem = geometry_problem(geometry); !problem.empty()) return refuse(problem);

  Call call{};
  call.tokens = dims(x)[0];
  call.hidden = dims(x)[1];
  call.top_k = dims(experts_of)[1];
  call.experts = dims(bits)[0];
  call.inner = down[1];
  if (activation != 0 && activation != 1) return refuse("unknown activation");
  call.activation = static_cast<Activation>(activation);
  const int64_t num_pages = dims(arena)[0];
  auto is = [&](const auto& buffer, std::initializer_list<int64_t> shape) {
    auto have = dims(buffer);
    return std::equal(have.begin(), have.end(), shape.begin(), shape.end());
  };
  const int64_t kept = dims(*outer)[0];
  bool fits = is(experts_of, {call.tokens, call.top_k}) && is(gates, {call.tokens, call.top_k}) &&
              is(valid, {call.tokens}) && is(bits, {call.experts, 2}) && is(pages, {call.experts, 2, geometry.slots}) &&
              is(*y, {call.tokens, call.hidden}) && is(*stats, {call.tokens, call.top_k, 2}) &&
              (kept == 0 || kept == call.experts) && is(*outer, {kept, call.hidden}) &&
              is(*inner, {kept, call.inner}) && gate_up[0] == 2 * call.inner && gate_up[1] == call.hidden &&
              down[0] == call.hidden;
  if (!fits) return refuse("the shapes of arguments, results and blocks disagree");
  call.scratch = scratch->typed_data();
  Scratch parts(nullptr, call.tokens, call.top_k, call.hidden, call.inner);
  if (dims(*scratch)[0] < parts.floats) return refuse("the scratch is too small");
  call.x = x.typed_data();
  call.experts_of = experts_of.typed_data();
  call.gates = gates.typed_data();
  call.valid = valid.typed_data();
  call.y = y->typed_data();
  call.stats = stats->typed_data();
  if (kept) {
    call.moments[0] = outer->typed_data();
    call.moments[1] = inner->typed_data();
  }

  std::vector<std::vector<int64_t>> choices(call.experts);
  for (int64_t choice = 0; choice < call.choices(); ++choice) {
    if (!call.valid[choice / call.top_k]) continue;
    int32_t expert = call.experts_of[choice];
    if (expert < 0 || expert >= call.experts) {
      return refuse("expert " + std::to_string(expert) + " is not one of " + std::to_string(call.experts));
    }
    choices[expert].push_back(choice);
  }
  std::vector<Group> groups;
  for (int64_t expert = 0; expert < call.experts; ++expert) {
    if (choices[expert].empty()) continue;
    groups.push_back(Group{expert, {}, std::move(choices[expert])});
    for (int m = 0; m < 2; ++m) {
      int64_t at = 2 * expert + m;
      std::string problem =
          read_block(geometry, m, arena.typed_data(), num_pages, bits.typed_data()[at],
                     pages.typed_data() + at * geometry.slots, &groups.back().block[m]);
      if (!problem.empty()) {
        return refuse((m ? "down" : "gate_up") + std::string(" of expert ") + std::to_string(expert) + ": " + problem);
      }
    }
  }

  const InstructionSet* set = instruction_set();
  if (!set) return refuse("PWJAX_NATIVE_ISA names an instruction set that this processor does not have");
  auto team = std::make_shared<Team>();
  std::shared_ptr<void> work = set->expert_ffn(call, groups, team.get());
  Team::run(team, pool.num_threads() - 1, [&](auto task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

auto expert_ffn_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<In<ffi::F32, 2>>()    // x
      .Arg<In<ffi::S32, 2>>()    // experts_of
      .Arg<In<ffi::F32, 2>>()    // gates
      .Arg<In<ffi::PRED, 1>>()   // valid
      .Arg<In<ffi::U32, 2>>()    // arena
      .Arg<In<ffi::S32, 2>>()    // bits
      .Arg<In<ffi::S32, 3>>()    // pages
      .Ret<In<ffi::F32, 2>>()    // y
      .Ret<In<ffi::F32, 3>>()    // stats
      .Ret<In<ffi::F32, 2>>()    // moments of what gate_up reads
      .Ret<In<ffi::F32, 2>>()    // and of what down reads
      .Ret<In<ffi::F32, 1>>()    // scratch
      .Attr<ffi::Span<const int64_t>>("widths")   // lowest, highest, 16-bit fallback
      .Attr<ffi::Span<const int64_t>>("gate_up")  // rows, cols, lut_rows
      .Attr<ffi::Span<const int64_t>>("down")
      .Attr<int64_t>("activation");
}

}  // namespace pwjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pwjax_expert_ffn, pwjax::expert_ffn, pwjax::expert_ffn_binding());

extern "C" {

// Name of the instruction set in use; empty if the one asked for does not work here.
const char* pwjax_instruction_set() {
  const pwjax::InstructionSet* set = pwjax::instruction_set();
  return set ? set->name : "";
}

int64_t pwjax_expert_ffn_scratch(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner) {
  return pwjax::Scratch(nullptr, tokens, top_k, hidden, inner).floats;
}
}
