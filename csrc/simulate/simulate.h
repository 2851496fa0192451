// The interface of the simulator, which predicts how long a program takes on a described machine.
// Python reads the structs from this file (megakernel/library.py). Times are in seconds, sizes in bytes. A
// record is an instruction. It consists of tasks: an attention instruction has one task per work item, and
// other instructions have a single task. Each task waits, loads, computes and stores as a whole.
#pragma once
#include <stdint.h>

namespace mk::simulate {

constexpr int kPrologue = 0, kBody = 1, kEpilogue = 2, kQueues = 3, kLists = 4;

struct Wait {
  int32_t counter;  // index among the counters of the record's layer and rank
  int32_t slot;     // which of the record's waits it is
};

struct Signal {
  int32_t rank;  // -1: every rank
  int32_t counter;
  int32_t next;  // 1: it is a counter of the next layer; 0: of this layer
  int32_t arrivals;
};

struct Record {
  int32_t number;  // as in a trace
  int32_t phase;
  int32_t first_task, end_task;
  int32_t queue;  // -1, or the queue whose records this record claims and runs
  int32_t claims_end;
};

struct Task {
  double weight_bytes;  // bytes that may be loaded before the task's waits are satisfied
  double read_bytes;    // bytes that may be loaded only after the task's waits are satisfied

  // Bytes that the task's loads occupy in the ring (the worker's buffer in shared memory) until they are
  // used. 0 means that the task loads nothing ahead: the computing warps load the data themselves.
  double ring_bytes;
  double held_bytes;    // further bytes of the ring buffer that are occupied until the task is computed
  double output_bytes;  // bytes of the ring buffer that the output occupies until it is stored
  double ask_s;         // time that the slower of the two loader warps needs to issue all loads
  double compute_s;
  double tail_s;  // compute time after the last bytes have arrived
  // Fixed times: before inputs arrive, from then until the computing warps use the first page, and from the
  // last page until the instruction ends. `accessing` has a bit for each: whether it accesses memory.
  double prepare_s, start_s, end_s;
  int32_t weight_key, read_key, write_key;  // indices of cache entries; -1: not cached

  // For attention over a long context: several tasks divide the KV tokens of the same rows (a split). `split`
  // is the number of the split that this task belongs to (-1: none), and `parts` is how many tasks the split
  // has. Only the task that ends last sends the signals.
  int32_t split, parts;
  int32_t first_wait, end_wait;
  int32_t first_signal, end_signal;
  int32_t accessing;
};

struct Program {
  int32_t ranks, workers, layers, counters;
  int32_t queues;                  // number of queues per rank
  int32_t splits;                  // number of splits (sets of tasks of which the last one signals) per rank
  int32_t keys;                    // number of distinct entries of a rank's cache
  int32_t layered_keys;            // cache entries [0, layered_keys) have different contents in each layer
  const int32_t* offsets[kLists];  // [streams + 1]: index of the first record of each stream or queue
  const int32_t* totals[3];        // expected arrivals at each counter: first layer, other layers, epilogue
  const Record* records;
  const Task* tasks;
  const double* stores;  // [tasks][ranks]: bytes that each task stores on each rank
  const Wait* waits;
  const Signal* signals;
  const double* key_bytes;  // [ranks][keys]
};

// Rates are for one rank's whole device, with two exceptions: worker_bytes_per_s is for one worker, and
// switch_bytes_per_s is for the switch that all ranks share.
struct Costs {
  double memory_bytes_per_s, cache_bytes_per_s, cache_bytes;
  double worker_bytes_per_s;  // maximum that one worker loads or stores per second
  double egress_bytes_per_s, switch_bytes_per_s;
  // The delay from a request to the arrival of its first byte. The same delay passes from the end of a
  // transfer until its last byte can be used.
  double latency_s;
  double store_s;  // fixed time of a store, in addition to the time for its bytes
  double dispatch_s, claim_s;
  double signal_s, remote_signal_s;  // from the end of a store until a waiting worker sees the signal
  double launch_s;
  double window_bytes;             // bytes that may be on their way to one worker
  double ahead_bytes, page_bytes;  // prefetched into the L2 cache by one worker: in all, and at a time
  double ring_bytes;        // a worker's space for data loaded but not yet used, and outputs not yet stored
  int32_t in_flight;        // maximum number of tasks of a worker between set-up and end of store
  int32_t claim_in_flight;  // the maximum in place of in_flight while the next task comes from a queue
  int32_t roles;            // 0: the trace shows each worker as a single thread
};

struct Result {
  double step_s;  // infinity if the step takes longer than the caller wants to know
  double memory_bytes, cache_bytes, link_bytes;  // totals over all ranks, including write-backs
  int64_t intervals;
  // After a deadlock: the first stream that never ends, and the record and layer in which it waits. A
  // stuck_stream of -1 means that all streams have ended.
  int32_t stuck_stream = -1, stuck_record, stuck_layer;
  int32_t crowded_counter = -1;  // a counter that received more signals than it expects; -1: none
};

}  // namespace mk::simulate
