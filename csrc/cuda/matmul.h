// The seven matmuls of the instruction set, on the units of the program's numerics class.
#pragma once
#include "dots.h"
#include "gemm.h"

namespace mk {

template <class P, class Pages>
MK_FN void matmul(P& p, const Call& c, const int32_t* record, Pages& pages) {
  Matmul m;
  if (!matmul_of(*c.dims, record, m)) return;
  const Opcode opcode = static_cast<Opcode>(record_opcode(record));
  if (uses_dots(*c.dims)) {
    dots(p, c, opcode, m, pages);
  } else {
    gemm<P>(c, opcode, m, pages);
  }
}

}  // namespace mk
