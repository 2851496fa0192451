// The interface of the simulator, which runs a program in virtual time.
// scheduler/simulate/native.py declares the same structs.
//
// Times are in seconds, sizes in bytes. A record is an instruction of a stream or a queue. It consists of
// tasks: one per item for attention, otherwise one. Each task waits, loads, computes and stores as a unit.
#pragma once
#include <stdint.h>

namespace mk::simulate {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kQueues = 3, kLists = 4;

struct Wait {
  int32_t counter;  // of the same rank, in the record's block
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
  int32_t queue;  // of a drain: its queue; otherwise -1
  int32_t claims_end;
};

struct Task {
  double weight_bytes;  // bytes that may be loaded before the waits
  double read_bytes;    // bytes that may be loaded only after the waits
  // Bytes of the ring that the loads take until they are used; 0: the consumers load when they reach the
  // task.
  double ring_bytes;
  double held_bytes;    // bytes that stay until the task is computed
  double output_bytes;  // bytes of the ring that the output takes until it is stored
  double ahead_bytes;   // how far prefetches into the cache are ahead of loads into the ring
  double ask_s;         // time that the slower loader needs to request everything
  double compute_s;
  double tail_s;                            // time to compute with the last bytes that arrive
  int32_t weight_key, read_key, write_key;  // cache entries; -1: never cached
  int32_t split, parts;                     // only the last part of a split signals; -1: no split
  int32_t first_wait, end_wait;
  int32_t first_signal, end_signal;
  int32_t unused;
};

struct Program {
  int32_t ranks, workers, layers, counters;
  int32_t queues;                  // of each rank
  int32_t splits;                  // of each rank
  int32_t keys;                    // of each rank: entries that its cache may hold
  int32_t layered_keys;            // keys below this mean different entries in each layer
  const int32_t* offsets[kLists];  // records of each stream (of each queue), as ranges of one list of records
  const int32_t* totals[3];        // arrivals at the counters of the first, a middle and the last block
  const Record* records;
  const Task* tasks;
  const double* stores;  // [tasks][ranks] bytes stored on each rank
  const Wait* waits;
  const Signal* signals;
  const double* key_bytes;  // [ranks][keys]
  int32_t record_count, task_count, wait_count, signal_count;
};

// Rates are those of a rank's whole device unless they are a worker's.
struct Costs {
  double memory_bytes_per_s, cache_bytes_per_s, cache_bytes;
  double worker_bytes_per_s;  // maximum that one worker loads or stores per second
  double egress_bytes_per_s, switch_bytes_per_s;
  double latency_s;  // from a request to the first byte, and from the last byte's transfer to its arrival
  double store_s;    // time of a store in addition to that of its bytes
  double dispatch_s, claim_s;
  double signal_s, remote_signal_s;  // from the end of a store until a waiting worker knows of it
  double launch_s;
  double ring_bytes;        // room of a worker for loads not yet used and outputs not yet stored
  int32_t in_flight;        // maximum tasks of a worker from set-up to the end of the store
  int32_t claim_in_flight;  // the same if the next task comes from a queue
  int32_t roles;            // 0: a worker is a single thread
};

struct Stall {
  int32_t segment, number, layer;
  double seconds;
};

struct Result {
  double step_s;
  double memory_bytes, cache_bytes, link_bytes;  // sums over ranks, including bytes written back
  int64_t events, intervals;
  // the record at which the first stuck stream stands; -1: no stream is stuck
  int32_t stuck_stream = -1, stuck_record, stuck_layer;
  int32_t crowded_counter = -1;  // a counter with more arrivals than its total, or -1
};

}  // namespace mk::simulate
