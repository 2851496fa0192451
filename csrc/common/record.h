// Decoding of instruction records. Record layout: megakernel/isa/record.py.
#pragma once
#include "isa.h"

namespace mk {

MK_DIMS_FN inline int32_t record_opcode(const int32_t* record) { return record[0] & 0xFF; }

// Index in a counter block that a wait or signal word names.
MK_DIMS_FN inline int32_t word_counter(int32_t word) { return (word & kCounterMask) - 1; }

// Rank that a signal word names; kAllRanks or kOwner.
MK_DIMS_FN inline int32_t word_rank(int32_t word) { return word >> kRankShift & kRankMask; }

template <class Operands>
MK_DIMS_FN inline const Operands& operands(const int32_t* record) {
  return *reinterpret_cast<const Operands*>(record + kOperandWord);
}

// Of a record of any of these instructions, which have the same operands.
template <class Operands, class... Others>
MK_DIMS_FN inline const Operands& shared_operands(const int32_t* record) {
  static_assert(((kLayout<Others> == kLayout<Operands>) && ...), "their operands must be the same");
  return operands<Operands>(record);
}

}  // namespace mk
