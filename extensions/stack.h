// Operators whose arguments are a structure, with a visit(v) that calls v with the members in the order of
// the operator's schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <type_traits>
#include <vector>

namespace pyg_sar {

using torch::jit::Stack;

template <class Result, class Arguments>
Arguments arguments_of(Result (*)(const Arguments&));

// What a function takes.
template <auto kRun>
using ArgumentsOf = decltype(arguments_of(kRun));

template <auto kRun>
void run_on_stack(const c10::OperatorHandle& op, Stack* stack) {
  const std::vector<c10::IValue> values =
      torch::jit::pop(*stack, op.schema().arguments().size());
  ArgumentsOf<kRun> arguments;
  size_t next = 0;
  arguments.visit([&](auto&... x) {
    ((x = values.at(next++).template to<std::remove_reference_t<decltype(x)>>()), ...);
  });
  if constexpr (std::is_void_v<decltype(kRun(arguments))>) {
    kRun(arguments);
  } else {
    for (const at::Tensor& x : kRun(arguments)) torch::jit::push(*stack, x);
  }
}

// A function as an operator's kernel. It returns nothing, or a vector of tensors.
template <auto kRun>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&run_on_stack<kRun>>();
}

// Calls an operator; returns its results.
inline std::vector<at::Tensor> call(const char* op, Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const c10::IValue& x : stack) results.push_back(x.toTensor());
  return results;
}

template <class Arguments>
std::vector<at::Tensor> call_with(const char* op, Arguments arguments) {
  Stack stack;
  arguments.visit([&](const auto&... x) { torch::jit::push(stack, x...); });
  return call(op, std::move(stack));
}

}  // namespace pyg_sar
