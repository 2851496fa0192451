// Runs a matmul on the CUDA cores (dots.h) or on the tensor cores (gemm.h), as Dims.units says for the whole
// program; experts always run on the CUDA cores. The two round differently, so only programs with the same
// Dims.units can be in one numerics class, that is, compute the same bits.
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
