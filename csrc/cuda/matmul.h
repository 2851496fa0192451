// Runs a matmul on the CUDA cores (dots.h) or on the tensor cores (gemm.h). Dims.units makes this choice for
// a whole program; experts always run on the CUDA cores. These units round differently, so programs
// compute the same bits only if they have the same Dims.units.
#pragma once
#include "dots.h"
#include "gemm.h"

namespace mk {

template <class P, class Pages>
MK_FN void matmul(P& p, const Call& c, Pages& pages) {
  const Matmul m = matmul_of(*c.task);
  if (by_dots(*c.dims, *c.task)) {
    dots(p, c, m, pages);
  } else {
    gemm<P>(c, m, pages);
  }
}

}  // namespace mk
