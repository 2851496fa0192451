// Decodes instruction records. megakernel/isa/record.py has the layout.
#pragma once
#include "isa.h"

namespace mk {

// The number of the record's phase.
MK_DIMS_FN inline int32_t record_phase(const int32_t* record) { return record[0] & 0xFF; }

// The index in a counter block that a wait or signal word names.
MK_DIMS_FN inline int32_t word_counter(int32_t word) { return (word & kCounterMask) - 1; }

// The rank that a signal word names, or kAllRanks or kOwner.
MK_DIMS_FN inline int32_t word_rank(int32_t word) { return word >> kRankShift & kRankMask; }

template <class Operands>
MK_DIMS_FN inline const Operands& operands(const int32_t* record) {
  return *reinterpret_cast<const Operands*>(record + kOperandWord);
}

}  // namespace mk
