// The operators of attention, once attention.cpp has checked the shapes and dtypes of their arguments.
#pragma once

#include "attention_arguments.h"

namespace pyg_sar::attention {

void forward(const ForwardArguments& a);
void backward_sources(const SourcesArguments& a);
void backward_targets(const TargetsArguments& a);

}  // namespace pyg_sar::attention
