// The event simulation: workers with a controller, two loaders, consumers and a storer, each of which takes
// the worker's tasks in order.
//
//   controller     sets a task up, where fewer than `in_flight` are between that and the end of their store
//   weight loader  loads the head of a task, as far as the ring has room: weights, and what the task reads if
//                  its counters are met
//   input loader   waits for the counters; then loads the rest, the body
//   consumers      compute once the first bytes are there, and no faster than bytes come
//   storer         stores, here and at other ranks; then the task's signals go out
#pragma once
#include <stdint.h>

#include <vector>

#include "../common/isa.h"
#include "cache.h"
#include "fluid.h"
#include "simulate.h"

namespace mk::simulate {

class Engine {
 public:
  // `intervals`: room for `most` trace records; none are made where it is null.
  Engine(const Program& program, const Costs& costs, const Stall& stall, Interval* intervals, int64_t most);

  Result run();

 private:
  static constexpr int kDepth = 8;  // at least in_flight + 1

  // One run of a task on its way through a worker. Times that are still unknown are kNever.
  struct Run {
    int32_t record = 0, task = 0, layer = 0, segment = 0;
    double fetched = 0.0;  // set up
    double head_begin = 0.0, head_end = kNever, ready = kNever;
    double body_begin = kNever, body_end = kNever;
    double last_begin = kNever;  // of the part of the body that the ring holds at the end
    double begin = kNever, end = kNever;
    double store_begin = 0.0;
    double rest = 0.0, rest_missing = 0.0;  // what is still to be loaded; of that, not in the cache
    int32_t slot = 0, from = 0;             // wait word met last, and the rank that met it
    bool read_ahead = false;                // its head is also of what it reads
    bool began = false;
  };

  struct Worker {
    int32_t rank = 0;
    // Tasks taken so far by each role; what is between two of them is under way.
    int64_t fetched = 0, headed = 0, loaded = 0, computed = 0, stored = 0;
    bool fetching = false, ended = false;
    double fetch_free = 0.0;
    // Of the next head: since when it waits for pages, when it begins, how much of its task the ring holds.
    double head_asked = kNever, head_due = kNever, head_part = 0.0;
    bool storing = false;
    int flows[2] = {0, 0}, store_flows = 0;  // of the load's head and body, of the store under way
    // where the stream is
    int32_t segment = 0, layer = 0, record = 0, task = 0, task_end = 0, current = -1;
    // waiting
    int32_t wait = 0, next_waiter = -1;                         // of tasks[loaded]; -1: none left
    double compute_begin[2] = {0, 0}, compute_end[2] = {0, 0};  // of the last two tasks
    Run runs[kDepth];
    Run& run(int64_t n) { return runs[n % kDepth]; }
  };

  struct Counter {
    int32_t left = 0;
    int32_t waiter = -1;
    double met = 0.0;  // when its last arrival is known
    int32_t from = 0;  // the rank of that arrival
  };

  enum class What : int32_t { fetch, head, ready, begin, end, stored };

  struct Event {
    double time;
    int64_t number;  // equal times: as they were made
    What what;
    int32_t worker;
    bool operator<(const Event& o) const { return time > o.time || (time == o.time && number > o.number); }
  };

  void schedule(double time, What what, int32_t worker);
  bool seek(Worker& w) const;
  void take(Worker& w);
  bool claims(Worker& w) const;
  double kept(const Task& task) const;
  double asked_for(Worker& w);
  void fetch(int32_t w);
  double room(Worker& w, int64_t n, double& leaving);
  void load(int32_t w);
  void begin_head(int32_t w);
  void begin_waits(int32_t w);
  void wait_on(int32_t w);
  bool met(Worker& w) { return w.loaded < w.headed && w.wait < 0 && w.run(w.loaded).ready <= now_; }
  void add_reads(Worker& w);
  void load_rest(int32_t w, double part);
  void begin_body(int32_t w);
  void loaded(int32_t w);
  void flow_ended(int32_t w, int part);
  void begin_compute(int32_t w);
  double stalled(const Run& run) const;
  void computing(int32_t w);
  void decide_end(int32_t w);
  void computed(int32_t w);
  void store(int32_t w);
  void store_part_ended(int32_t w);
  void done(int32_t w);
  void signal(const Run& run, int32_t rank);
  void arrive(int32_t rank, int32_t block, const Signal& signal, int32_t from);
  void flow(int32_t w, int part, double bytes, double missing);
  void write_back(int32_t rank);
  double filled(int32_t rank) const { return rates_[2 * rank].delivered(now_) + stored_[rank]; }
  Shared& memory(int32_t rank) { return rates_[2 * rank]; }
  Shared& cache_rate(int32_t rank) { return rates_[2 * rank + 1]; }
  void record(int32_t w, const Run& run, Role role, IntervalKind kind, double begin, double end,
              int32_t slot = 0);
  void count_overlaps();
  void change(const Worker& w, const Run& run, int by);
  double hidden(const Worker& w, const Run& run, double begin, double end) const;
  int32_t block(const Run& run) const {
    return run.segment == kPrologue ? 0 : run.segment == kBody ? run.layer : p_.layers;
  }
  Counter& counter(int32_t rank, int32_t block, int32_t index) {
    return counters_[(static_cast<int64_t>(block) * p_.ranks + rank) * p_.counters + index];
  }

  const Program& p_;
  const Costs& c_;
  const Stall stall_;
  Interval* const intervals_;
  const int64_t most_;
  Result result_{};
  double now_ = 0.0;
  int64_t scheduled_ = 0;
  std::vector<Event> events_;
  std::vector<Worker> workers_;
  std::vector<Counter> counters_;
  std::vector<int32_t> claims_;  // [layers][ranks * queues]
  std::vector<int32_t> splits_;  // [ranks][splits]
  std::vector<Shared> rates_;    // of each rank its memory's and its cache's
  std::vector<Cache> caches_;
  std::vector<double> stored_;  // bytes, by rank
  Links links_;

  // for the overlaps
  double counted_ = 0.0;
  int computing_ = 0, memory_bound_ = 0, compute_bound_ = 0, kinds_ = 0, busy_ranks_ = 0;
  std::vector<int32_t> rank_computing_, kind_computing_;
};

}  // namespace mk::simulate
