// The door between XLA and expert_ffn: takes buffers and attributes apart, checks everything that an address is made
// of. The choice of the instruction set.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "door.h"
#include "instruction_sets.h"

namespace pwjax {

const InstructionSet* instruction_set(bool exact) {
  static const auto find = [](bool exact) -> const InstructionSet* {
    const char* wanted = std::getenv("PWJAX_NATIVE_ISA");
    bool reached = !wanted || !*wanted;
    for (const InstructionSet& set : instruction_sets()) {
      if (!set.available) continue;
      reached = reached || !std::strcmp(wanted, set.name);
      if (reached && !(exact && set.rounds)) return &set;
    }
    return nullptr;
  };
  static const InstructionSet* const found[] = {find(false), find(true)};
  return found[exact];
}

ffi::Error expert_ffn(ffi::ThreadPool pool, In<ffi::F32, 2> x, In<ffi::S32, 2> experts_of, In<ffi::F32, 2> gates,
                      In<ffi::PRED, 1> valid, In<ffi::U32, 2> arena, In<ffi::S32, 2> bits, In<ffi::S32, 3> pages,
                      Out<ffi::F32, 2> y, Out<ffi::F32, 3> stats, Out<ffi::F32, 2> outer, Out<ffi::F32, 2> inner,
                      Out<ffi::F32, 1> scratch, ffi::Span<const int64_t> widths, ffi::Span<const int64_t> gate_up,
                      ffi::Span<const int64_t> down, int64_t activation, bool exact) {
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
  const int64_t kept = dims(*outer)[0];
  bool fits = has_shape(experts_of, {call.tokens, call.top_k}) && has_shape(gates, {call.tokens, call.top_k}) &&
              has_shape(valid, {call.tokens}) && has_shape(bits, {call.experts, 2}) &&
              has_shape(pages, {call.experts, 2, geometry.slots}) && has_shape(*y, {call.tokens, call.hidden}) &&
              has_shape(*stats, {call.tokens, call.top_k, 2}) && (kept == 0 || kept == call.experts) &&
              has_shape(*outer, {kept, call.hidden}) && has_shape(*inner, {kept, call.inner}) &&
              gate_up[0] == 2 * call.inner && gate_up[1] == call.hidden && down[0] == call.hidden;
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

  return carry_out(pool, exact, refuse, [&](const InstructionSet& set, Team* team) { return set.expert_ffn(call, groups, team); });
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
      .Attr<int64_t>("activation")
      .Attr<bool>("exact");  // inputs are not rounded
}

}  // namespace pwjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pwjax_expert_ffn, pwjax::expert_ffn, pwjax::expert_ffn_binding());

extern "C" {

// Name of the instruction set in use; empty if the one asked for does not work here.
const char* pwjax_instruction_set(bool exact) {
  const pwjax::InstructionSet* set = pwjax::instruction_set(exact);
  return set ? set->name : "";
}

int64_t pwjax_expert_ffn_scratch(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner) {
  return pwjax::Scratch(nullptr, tokens, top_k, hidden, inner).floats;
}
}
