// A program in virtual time. scheduler/simulate/native.py declares the same structs.
//
// Times are seconds, sizes bytes. A record is an instruction of a stream or a queue; its tasks are what is
// waited for, loaded, computed and stored together: one for most records, an item each for attention.
#pragma once
#include <stdint.h>

namespace mk::simulate {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kQueues = 3, kLists = 4;

struct Wait {
  int32_t counter;  // of the own rank and block
  int32_t slot;     // wait word
};

struct Signal {
  int32_t rank;  // -1: every rank
  int32_t counter;
  int32_t next;  // 1: the next layer's block
  int32_t arrivals;
};

struct Record {
  int32_t number;  // as in a trace
  int32_t phase;
  int32_t first_task, end_task;
  int32_t queue;  // of a drain: which queue, else -1
  int32_t claims_end;
};

struct Task {
  double weight_bytes;  // may be loaded before the waits
  double read_bytes;    // only after them
  double
      ring_bytes;  // what loads take of the ring as they come by; 0: the consumers load, when they get there
  double held_bytes;    // what they take until the task is computed
  double output_bytes;  // what the output takes of the ring until it is stored
  double ahead_bytes;   // how far behind the ring's weights the cache gets those that come next
  double ask_s;         // of the slower loader: asking for everything
  double compute_s;
  double tail_s;                            // computing what arrives last
  int32_t weight_key, read_key, write_key;  // pieces of the cache; -1: never there
  int32_t split, parts;                     // only the last of a split's parts signals; -1: no split
  int32_t first_wait, end_wait;
  int32_t first_signal, end_signal;
  int32_t unused;
};

struct Program {
  int32_t ranks, workers, layers, counters;
  int32_t queues;                  // of each rank
  int32_t splits;                  // of each rank
  int32_t keys;                    // of each rank: what its cache holds, piece by piece
  int32_t layered_keys;            // keys below are another piece in each layer
  const int32_t* offsets[kLists];  // records of each stream (of each queue), as ranges of one list of records
  const int32_t* totals[3];        // arrivals at the counters of the first, a middle and the last block
  const Record* records;
  const Task* tasks;
  const double* stores;  // [tasks][ranks] bytes to each rank
  const Wait* waits;
  const Signal* signals;
  const double* key_bytes;  // [ranks][keys]
  int32_t record_count, task_count, wait_count, signal_count;
};

// Rates are of a rank's whole device but for those of a worker.
struct Costs {
  double memory_bytes_per_s, cache_bytes_per_s, cache_bytes;
  double worker_bytes_per_s;  // most that one worker loads, or stores, in a second
  double egress_bytes_per_s, switch_bytes_per_s;
  double latency_s;  // from asking for the first byte, and from the last byte's passing, to its arrival
  double store_s;    // of a store, beside its bytes
  double dispatch_s, claim_s;
  double signal_s, remote_signal_s;  // from the end of a store to a waiting worker's knowing
  double launch_s;
  double ring_bytes;        // what a worker holds of loads not yet computed on, and of outputs not yet stored
  int32_t in_flight;        // instructions of a worker between set-up and end of store
  int32_t claim_in_flight;  // where the next one comes from a queue
  int32_t roles;            // 0: a worker is one thread
};

struct Stall {
  int32_t segment, number, layer;
  double seconds;
};

struct Result {
  double step_s;
  double memory_bytes, cache_bytes, link_bytes;  // sums over ranks; written back bytes included
  int64_t events, intervals;
  int32_t stuck_stream = -1, stuck_record, stuck_layer;  // where it stopped, if it did
  int32_t crowded_counter = -1;                          // a counter with more arrivals than its total, or -1
};

}  // namespace mk::simulate
