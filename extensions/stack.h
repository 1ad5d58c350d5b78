// Operators whose arguments are a structure, with a visit(v) that calls v with the members in the order of
// the operator's schema.
#pragma once

#include <torch/csrc/stable/library.h>

#include <type_traits>

namespace pyg_sar {

template <class Result, class Arguments>
Arguments arguments_of(Result (*)(const Arguments&));

// What a function takes.
template <auto kRun>
using ArgumentsOf = decltype(arguments_of(kRun));

// A function as an operator's kernel. It returns nothing, or a tuple.
template <auto kRun>
void kernel(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentsOf<kRun> arguments;
  const StableIValue* next = stack;
  arguments.visit([&](auto&... x) {
    ((x = torch::stable::detail::to<std::remove_reference_t<decltype(x)>>(*next++)), ...);
  });
  if constexpr (std::is_void_v<decltype(kRun(arguments))>) {
    kRun(arguments);
  } else {
    torch::stable::detail::box_from_tuple(stack, kRun(arguments));
  }
}

}  // namespace pyg_sar
