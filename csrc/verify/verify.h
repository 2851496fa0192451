// The parts of the verifier that would be too slow in Python: it computes a topological order, and checks
// that conflicting accesses to data happen in the right order. Python reads the structs from this file
// (megakernel/library.py).
#pragma once
#include <stdint.h>

namespace mk::verify {

// A graph of `rows` nodes. Nodes [0, first[runs]) are events (executions of instructions), sorted by run; the
// others are counters. An edge between two events joins successive events of a stream, which begin and end in
// order but may overlap. An edge from an event to a counter is a signal; one from a counter is a wait.
struct Graph {
  int32_t rows;
  int32_t runs;          // number of runs: the prologue, the body once per layer, the epilogue
  const int32_t* first;  // [runs + 1]: the first event of each run
  int64_t edges;
  const int32_t* source;  // [edges]: the earlier node
  const int32_t* target;  // [edges]: the later node
};

enum class Kind : int32_t { read, write, host };  // host: the CPU reads the data after the launch

// The phases (model operations) of a step in sequential order, and all accesses to buffers, sorted by
// phase. An access covers a range of rows and columns of a buffer's copy on one rank. Such a copy is
// called a place, and has the number buffer * ranks + rank.
struct Step {
  int32_t phases;
  int32_t buffers;
  int32_t ranks;
  const int32_t* segment;   // [phases]: 0 prologue, 1 body, 2 epilogue
  const uint8_t* declares;  // [phases][buffers]: 1 if the phase writes the buffer, on any rank
  const uint8_t* layered;   // [buffers]: 1 if each layer has its own copy of the buffer
  int64_t touches;
  const int32_t* phase;  // [touches]; this and all arrays below have one element per access
  const int32_t* place;
  const Kind* kind;
  const int32_t* event;  // index among the events of the prologue, of a layer or of the epilogue
  const int32_t* row;
  const int32_t* row_end;
  const int32_t* col;
  const int32_t* col_end;
};

enum class What : int32_t {
  twice,  // `earlier` and `later` belong to one phase, and both write the same elements

  // `later` (-1: the host) reads elements that `phase` should have written last, but `earlier` wrote them
  // last (-1: no event wrote them).
  missing,

  unordered,  // `later` must access the elements after `earlier`, but may begin before it ends

  // A fault about elements that the prologue writes and every layer reads: the read in one layer
  // (`later`) may begin before the same read in the layer before (`earlier`) has ended.
  not_onward,

  overtakes,  // `later`, a stream's last event, may begin before `earlier`, work of any rank, ends
};

struct Found {
  What what;
  int32_t earlier;  // row of the graph
  int32_t later;    // row of the graph
  int32_t phase;
  int32_t place;
  int32_t row, row_end, col, col_end;
  int32_t reads;  // for `unordered`: 1 `later` reads, 2 `earlier` reads, 0 both write
};

}  // namespace mk::verify
