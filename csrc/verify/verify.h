// The parts of the verifier that are too slow in Python: a topological order, and the order of accesses to
// data. scheduler/verify/native.py declares the same structs.
#pragma once
#include <stdint.h>

namespace mk::verify {

// A graph of `rows` nodes. Nodes [0, first[runs]) are events, run by run; the others are counters.
struct Graph {
  int32_t rows;
  int32_t runs;          // the prologue, the runs of the body, and the epilogue
  const int32_t* first;  // [runs + 1]
  int64_t edges;
  const int32_t* source;  // [edges], earlier
  const int32_t* target;  // [edges], later
};

enum class Kind : int32_t { read, write, host };  // host: must have been written when the launch ends

// The phases of a step in the order in which they would run one after another, and the boxes that
// their events touch, sorted by phase. A place is one rank's copy of a buffer: buffer * ranks +
// rank.
struct Step {
  int32_t phases;
  int32_t buffers;
  int32_t ranks;
  const int32_t* segment;   // [phases]: 0 prologue, 1 body, 2 epilogue
  const uint8_t* declares;  // [phases][buffers]: the phase writes the buffer, on any rank
  const uint8_t* layered;   // [buffers]: there is a copy per run of the body
  int64_t touches;
  const int32_t* phase;  // [touches], like all following arrays
  const int32_t* place;
  const Kind* kind;
  const int32_t* event;  // index in the events of the phase's segment
  const int32_t* row;
  const int32_t* row_end;
  const int32_t* col;
  const int32_t* col_end;
};

enum class What : int32_t {
  twice,       // `earlier` and `later`, of one phase, both write the box
  missing,     // when `later` reads the box, `earlier` wrote it last, or nothing did (-1), instead of `phase`
  unordered,   // `later` must touch the box after `earlier`, but may begin before `earlier` ends
  not_onward,  // `later` reads in every layer what only the prologue wrote, but is not ordered after the same
               // read in the layer before
  overtakes,   // the last event of a stream may begin before `earlier` ends
};

struct Found {
  What what;
  int32_t earlier;  // row
  int32_t later;    // row
  int32_t phase;
  int32_t place;
  int32_t row, row_end, col, col_end;
  int32_t reads;  // for `unordered`: 1 `later` reads, 2 `earlier` reads, 0 both write
};

}  // namespace mk::verify
