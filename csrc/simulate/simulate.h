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
  int32_t counter;  // index of the counter in the counter block of the record's layer, on the same rank
  int32_t slot;     // index of the wait word in the record
};

struct Signal {
  int32_t rank;  // -1: every rank
  int32_t counter;
  int32_t next;  // 1: the counter is in the next layer's block
  int32_t arrivals;
};

struct Record {
  int32_t number;  // as in a trace
  int32_t phase;
  int32_t first_task, end_task;
  int32_t queue;  // the queue if the record is a drain; otherwise -1
  int32_t claims_end;
};

struct Task {
  double weight_bytes;  // bytes that may be loaded before the waits
  double read_bytes;    // bytes that may be loaded only after the waits

  // Bytes of the ring that the loads occupy until they are used. 0 means that the consumers themselves load
  // the data when they reach the task.
  double ring_bytes;
  double held_bytes;    // bytes of the ring that stay occupied until the task is computed
  double output_bytes;  // bytes of the ring that the output occupies until it is stored
  double ahead_bytes;   // bytes by which prefetches into the cache are ahead of loads
  double ask_s;         // time that the slower of the two loaders needs to request all loads
  double compute_s;
  double tail_s;                            // compute time after the last bytes have arrived
  int32_t weight_key, read_key, write_key;  // indices of cache entries; -1: not cached

  // `parts` tasks share the split with index `split`, and only the task that ends last signals. A `split` of
  // -1 means that the task belongs to no split.
  int32_t split, parts;
  int32_t first_wait, end_wait;
  int32_t first_signal, end_signal;
  int32_t unused;
};

struct Program {
  int32_t ranks, workers, layers, counters;
  int32_t queues;                  // number of queues per rank
  int32_t splits;                  // number of splits per rank
  int32_t keys;                    // number of entries that a rank's cache may hold
  int32_t layered_keys;            // entries [0, layered_keys) have different contents in each layer
  const int32_t* offsets[kLists];  // [streams + 1]: where the records of each stream or queue begin
  const int32_t* totals[3];        // expected arrivals per counter: first, middle, last counter block
  const Record* records;
  const Task* tasks;
  const double* stores;  // [tasks][ranks] bytes stored on each rank
  const Wait* waits;
  const Signal* signals;
  const double* key_bytes;  // [ranks][keys]
  int32_t record_count, task_count, wait_count, signal_count;
};

// Rates are those of one rank's whole device, with two exceptions: worker_bytes_per_s is the rate of one
// worker, and switch_bytes_per_s is the rate of the switch, which all ranks share.
struct Costs {
  double memory_bytes_per_s, cache_bytes_per_s, cache_bytes;
  double worker_bytes_per_s;  // maximum that one worker loads or stores per second
  double egress_bytes_per_s, switch_bytes_per_s;
  // the time from a request to its first byte, and from the transfer of the last byte to its arrival
  double latency_s;
  double store_s;  // fixed time of a store, in addition to the time for its bytes
  double dispatch_s, claim_s;
  double signal_s, remote_signal_s;  // from the end of a store until a waiting worker sees the signal
  double launch_s;
  double ring_bytes;        // a worker's space for loads not yet used and outputs not yet stored
  int32_t in_flight;        // maximum number of tasks of a worker between set-up and end of store
  int32_t claim_in_flight;  // replaces in_flight while the next task comes from a queue
  int32_t roles;            // 0: the trace shows each worker as a single thread
};

struct Stall {
  int32_t segment, number, layer;
  double seconds;
};

struct Result {
  double step_s;
  double memory_bytes, cache_bytes, link_bytes;  // sums over ranks, including bytes written back
  int64_t events, intervals;
  // The first stream that never ends, and the record and layer in which it waits. -1: all streams have ended
  int32_t stuck_stream = -1, stuck_record, stuck_layer;
  int32_t crowded_counter = -1;  // a counter with more arrivals than its total; -1: none
};

}  // namespace mk::simulate
