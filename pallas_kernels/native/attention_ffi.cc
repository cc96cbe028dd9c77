// The door between XLA and paged_attention.
#include <cstdint>
#include <memory>
#include <string>

#include "attention.h"
#include "door.h"

namespace pwjax {

ffi::Error paged_attention(ffi::ThreadPool pool, In<ffi::F32, 4> q, ffi::AnyBuffer fresh_k, ffi::AnyBuffer fresh_v,
                           In<ffi::S32, 0> start, In<ffi::U32, 2> arena, In<ffi::S32, 4> table,
                           In<ffi::S32, 1> length, In<ffi::S32, 0> layer, Out<ffi::F32, 4> out,
                           Out<ffi::F32, 1> scratch, int64_t window) {
  auto refuse = [](const std::string& why) { return ffi::Error::InvalidArgument("paged_attention: " + why); };
  const ffi::DataType kv = fresh_k.element_type();
  if (kv != fresh_v.element_type() || (kv != ffi::F32 && kv != ffi::BF16)) {
    return refuse("keys and values are either bfloat16 or float32");
  }
  if (fresh_k.dimensions().size() != 4) return refuse("misshapen keys");
  auto queries = q.dimensions(), keys = fresh_k.dimensions(), columns = table.dimensions();
  Attention call{};
  call.slots = queries[0];
  call.queries = queries[1];
  call.heads = queries[2];
  call.dim = queries[3];
  call.fresh = keys[1];
  call.kv_heads = keys[2];
  call.layers = columns[1];
  call.columns = columns[3];
  call.num_pages = arena.dimensions()[0];
  call.page_words = arena.dimensions()[1];
  call.element_bytes = kv == ffi::F32 ? 4 : 2;
  call.window = window;
  bool fits = has_shape(fresh_k, {call.slots, call.fresh, call.kv_heads, call.dim}) &&
              has_shape(fresh_v, {call.slots, call.fresh, call.kv_heads, call.dim}) &&
              has_shape(table, {call.slots, call.layers, 2, call.columns}) && has_shape(length, {call.slots}) &&
              has_shape(*out, {call.slots, call.queries, call.heads, call.dim});
  if (!fits) return refuse("the shapes of arguments and results disagree");
  call.q = q.typed_data();
  call.fresh_kv[0] = static_cast<const char*>(fresh_k.untyped_data());
  call.fresh_kv[1] = static_cast<const char*>(fresh_v.untyped_data());
  call.start = *start.typed_data();
  call.arena = arena.typed_data();
  call.table = table.typed_data();
  call.length = length.typed_data();
  call.layer = *layer.typed_data();
  call.out = out->typed_data();
  call.scratch = scratch->typed_data();
  if (std::string problem = attention_problem(call); !problem.empty()) return refuse(problem);
  if (call.items() == 0) return ffi::Error::Success();
  call.threads = processors();
  call.seats = scratch->dimensions()[0] / Room(nullptr, call).floats;
  if (call.seats < 1) return refuse("the scratch is too small");

  return carry_out(pool, /*exact=*/true, refuse, [&](const InstructionSet& set, Team* team) { return set.paged_attention(call, team); });
}

auto paged_attention_binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<In<ffi::F32, 4>>()   // q
      .Arg<ffi::AnyBuffer>()    // fresh keys
      .Arg<ffi::AnyBuffer>()    // fresh values
      .Arg<In<ffi::S32, 0>>()   // fresh tokens before the first query's own
      .Arg<In<ffi::U32, 2>>()   // arena
      .Arg<In<ffi::S32, 4>>()   // page table
      .Arg<In<ffi::S32, 1>>()   // tokens in pages
      .Arg<In<ffi::S32, 0>>()   // layer
      .Ret<In<ffi::F32, 4>>()   // attended
      .Ret<In<ffi::F32, 1>>()   // scratch
      .Attr<int64_t>("window");
}

}  // namespace pwjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(pwjax_paged_attention, pwjax::paged_attention, pwjax::paged_attention_binding());

// Floats of scratch for as many threads as there are cores, or as there is work for.
extern "C" int64_t pwjax_paged_attention_scratch(int64_t slots, int64_t queries, int64_t heads, int64_t kv_heads,
                                                 int64_t dim) {
  pwjax::Attention call{};
  call.slots = slots;
  call.queries = queries;
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.dim = dim;
  call.threads = pwjax::processors();
  if (call.items() == 0) return 0;
  return std::min(call.threads, call.items()) * pwjax::Room(nullptr, call).floats;
}
