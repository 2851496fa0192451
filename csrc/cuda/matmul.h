// Matmuls on the units of the program's numerics class.
#pragma once
#include "dots.h"
#include "gemm.h"

namespace mk {

template <class P, class Pages>
MK_FN void matmul(P& p, const Call& c, Pages& pages) {
  const Matmul m = matmul_of(*c.task);
  if (uses_dots(*c.dims)) {
    dots(p, c, m, pages);
  } else {
    gemm<P>(c, m, pages);
  }
}

}  // namespace mk
