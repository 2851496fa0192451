// Decodes instruction records. megakernel/isa/record.py has the layout.
#pragma once
#include "isa.h"

namespace mk {

// Some code reads the operands `row` and `rows` without knowing whether they are in a Tile or in a Run,
// so both structs must begin with them. NVRTC 13.0 has no offsetof, so it skips this check.
#ifndef __CUDACC_RTC__
static_assert(__builtin_offsetof(Tile, row) == 0 && __builtin_offsetof(Tile, rows) == 4);
static_assert(__builtin_offsetof(Run, row) == 0 && __builtin_offsetof(Run, rows) == 4);
#endif

// Returns the number of a record's phase, an operation of the model such as the QKV projection.
MK_DIMS_FN inline int32_t record_phase(const int32_t* record) { return record[0] & 0xFF; }

// Returns which counter a wait or a signal (one 32-bit word of a record) names. The result is an index
// into the counters of a layer.
MK_DIMS_FN inline int32_t word_counter(int32_t word) { return (word & kCounterMask) - 1; }

// Returns the rank whose counter a signal adds to. (A signal is a word of an instruction record that names a
// counter to add to.) Two results are special: kAllRanks means every rank. kOwner means the rank that stores
// the residual of the instruction's rows, or every rank if all ranks store it.
MK_DIMS_FN inline int32_t word_rank(int32_t word) { return word >> kRankShift & kRankMask; }

template <class Operands>
MK_DIMS_FN inline const Operands& operands(const int32_t* record) {
  return *reinterpret_cast<const Operands*>(record + kOperandWord);
}

}  // namespace mk
