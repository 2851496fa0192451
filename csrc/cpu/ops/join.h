#pragma once
#include "../simd.h"

namespace mk::MK_SIMD {

// Nothing: its waits and signals are the interpreter's.
template <class T>
void join(const Call&, const Join&) {}

// Nothing: claiming is the interpreter's.
template <class T>
void drain(const Call&, const Drain&) {}

}  // namespace mk::MK_SIMD
