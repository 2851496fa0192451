// A discrete-event simulation of a program. Each worker (an SM or a CPU thread) is a pipeline of the parts
// below; every part processes the worker's tasks (an instruction, or a part of one) in order. Loaded data
// goes into the worker's ring, a circular buffer in shared memory. Each load has two parts: the "head" begins
// before the task's waits are satisfied, and the "body" afterwards.
//   controller     sets up a task if fewer than `in_flight` tasks are between set-up and the end of their
//                  store
//   weight loader  loads the head: as many weights as the ring has room for, and inputs too if the waits are
//                  already satisfied; then prefetches some of the other weights into the L2 cache
//   input loader   waits for the task's counters, then loads the body: all remaining data
//   consumers      start to compute when the first bytes arrive, and compute no faster than bytes arrive
//   storer         stores the output on this rank and on others, after which the task's signals are sent
#include <algorithm>
#include <new>
#include <queue>
#include <vector>

#include "../common/isa.h"
#include "cache.h"
#include "check.h"
#include "fluid.h"
#include "simulate.h"

#define MK_API extern "C" __attribute__((visibility("default")))

namespace mk::simulate {
namespace {

class Engine {
 public:
  // `intervals` receives up to `most` entries of a trace; if it is null, no trace is written.
  Engine(const Program& program, const Costs& costs, const Stall& stall, Interval* intervals, int64_t most)
      : p_(program),
        c_(costs),
        stall_(stall),
        intervals_(intervals),
        most_(most),
        workers_(static_cast<size_t>(program.ranks) * program.workers),
        counters_(static_cast<size_t>(program.layers + 1) * program.ranks * program.counters),
        claims_(static_cast<size_t>(program.layers) * program.ranks * program.queues),
        splits_(static_cast<size_t>(program.ranks) * program.splits),
        links_(program.ranks, costs.egress_bytes_per_s, costs.switch_bytes_per_s, costs.worker_bytes_per_s) {
    for (Worker& w : workers_) {
      w.stream = static_cast<int32_t>(&w - workers_.data());
      w.rank = w.stream / program.workers;
      w.record = program.offsets[kPrologue][w.stream];
    }
    const int64_t size = static_cast<int64_t>(program.ranks) * program.counters;
    for (int32_t block = 0; block <= program.layers; ++block) {
      const int32_t* totals = program.totals[block == 0 ? 0 : block == program.layers ? 2 : 1];
      for (int64_t i = 0; i < size; ++i) counters_[block * size + i].left = totals[i];
    }
    for (int64_t r = 0; r < program.ranks; ++r)
      ranks_.push_back({.memory = {costs.memory_bytes_per_s, costs.worker_bytes_per_s},
                        .cached = {costs.cache_bytes_per_s, costs.worker_bytes_per_s},
                        .cache = {costs.cache_bytes, program.key_bytes + r * program.keys, program.keys,
                                  program.layered_keys}});
  }

  Result run() {
    for (Worker& w : workers_) fetch(w);
    for (;;) {
      double time = events_.empty() ? kNever : events_.top().time;
      Shared* source = nullptr;
      for (Rank& rank : ranks_)
        for (Shared* rate : {&rank.memory, &rank.cached})
          if (rate->next() < time) time = rate->next(), source = rate;
      const bool sent = links_.next() < time;
      if (sent) time = links_.next();
      if (time == kNever) break;
      now_ = std::max(now_, time);
      ++result_.events;
      if (sent) {
        store_part_ended(workers_[links_.pop(now_)]);
      } else if (source) {
        const int32_t who = source->pop(now_);
        if (who < 0) continue;  // a write-back from the cache, for which no worker waits
        flow_ended(workers_[who / kParts], who % kParts);
      } else {
        const Event e = events_.top();
        events_.pop();
        (this->*e.then)(*e.worker);
      }
      result_.step_s = now_;
    }
    for (const Rank& rank : ranks_) {
      result_.memory_bytes += rank.memory.carried;
      result_.cache_bytes += rank.cached.carried;
    }
    result_.link_bytes = links_.carried;
    for (Worker& w : workers_) {
      if (w.ended && w.stored == w.fetched) continue;
      const Run& blocked = w.run(w.loaded);
      result_.stuck_stream = w.stream;
      result_.stuck_record = blocked.record;
      result_.stuck_layer = blocked.layer;
      break;
    }
    return result_;
  }

 private:
  static constexpr int kDepth = 8;                 // length of the ring buffer `runs`: at least in_flight + 1
  enum Part { kHead, kBodyPart, kAhead, kParts };  // of a load

  // A task that a worker executes, and the times, in seconds, at which its parts begin and end. Times that
  // are still unknown are kNever.
  struct Run {
    int32_t record = 0, layer = 0, segment = 0;
    const Task* task = nullptr;
    double fetched = 0.0;  // time at which the controller has set the task up
    double head_begin = 0.0, head_end = kNever, ready = kNever;
    double body_begin = kNever, body_end = kNever;
    // The time at which the last part of the task's load begins. That part is as large as the ring buffer, so
    // soon after this time the task has requested all its data.
    double last_begin = kNever;
    double begin = kNever, end = kNever;
    double store_begin = 0.0;
    double rest = 0.0, rest_missing = 0.0;  // bytes still to be loaded; how many of them are not in the cache
    double ahead = 0.0;       // bytes prefetched into the L2 cache because the ring has no room for them yet
    int32_t slot = 0;         // which of the record's waits was satisfied last
    bool read_ahead = false;  // whether inputs were loaded early, together with the first weights
    bool began = false;
  };

  struct Worker {
    int32_t stream = 0, rank = 0;
    // How many tasks have passed each step: set up, first part of the load (the head) begun, loaded
    // completely, computed, stored.
    int64_t fetched = 0, headed = 0, loaded = 0, computed = 0, stored = 0;
    bool fetching = false, ended = false;
    double fetch_free = 0.0;
    // The head of a load is the first part of the next task's data, loaded before the task's waits are
    // satisfied. head_asked: when the head began to wait for room in the ring buffer. head_due: when it will
    // begin to load. head_part: its fraction of the whole load.
    double head_asked = kNever, head_due = kNever, head_part = 0.0;
    bool storing = false;
    // numbers of loads in progress, for each part of a task's load, and of stores in progress
    int flows[kParts] = {}, store_flows = 0;
    int64_t ahead = 0;        // number of the task whose weights are being prefetched into the cache
    bool body_joins = false;  // whether the load of task `ahead` ends only after the prefetch

    // the worker's position in its instruction stream
    int32_t segment = 0, layer = 0, record = 0, task = 0, task_end = 0, current = -1;
    // waiting
    int32_t wait = 0;  // index of the next wait of the task being loaded; -1: none left
    Worker* next_waiter = nullptr;
    double compute_end = 0.0;  // when the last computation ended
    Run runs[kDepth];
    Run& run(int64_t n) { return runs[n % kDepth]; }
  };

  struct Counter {
    // Number of arrivals that the counter still expects. It has 64 bits because a faulty program may have far
    // more arrivals than the counter expects.
    int64_t left = 0;
    Worker* waiter = nullptr;
    double met = 0.0;  // time at which the latest arrival becomes visible to waiting workers
  };

  struct Rank {
    Shared memory, cached;  // the transfers that share the bandwidth of memory, and of the cache
    Cache cache;
    double stored = 0.0;  // bytes
    double filled(double now) const { return memory.delivered(now) + stored; }
  };

  using Then = void (Engine::*)(Worker&);
  struct Event {
    double time;
    int64_t number;  // order of creation, in which events with equal times happen
    Then then;
    Worker* worker;
    bool operator<(const Event& o) const { return time > o.time || (time == o.time && number > o.number); }
  };

  void schedule(double time, Then then, Worker& w) { events_.push({time, scheduled_++, then, &w}); }
  // Schedules a call of `then` at `time`, or makes the call at once if that time is not in the future.
  void at(double time, Then then, Worker& w) {
    if (time > now_)
      schedule(time, then, w);
    else
      (this->*then)(w);
  }

  // If the worker has no task left in its record (an instruction), moves to the next record of its stream.
  // Returns false if the stream has ended.
  bool seek(Worker& w) const {
    while (w.task == w.task_end) {
      const int32_t end = p_.offsets[w.segment][w.stream + 1];
      if (w.record != end) break;
      if (w.segment == kBody && ++w.layer < p_.layers && p_.offsets[kBody][w.stream] != end) {
        w.record = p_.offsets[kBody][w.stream];
        continue;
      }
      if (w.segment == kEpilogue) return false;
      w.layer = 0;
      w.record = p_.offsets[++w.segment][w.stream];
    }
    return true;
  }

  // Takes the worker's next task. If the current instruction is a drain, the worker claims an instruction
  // from a queue that all workers of its rank share, and takes that instruction's first task. If the queue's
  // first claims_end instructions have been claimed, the worker takes the drain's own task.
  Run& take(Worker& w) {
    if (w.task == w.task_end) {
      w.current = w.record;
      if (p_.records[w.record].queue >= 0) {
        const int32_t queue = w.rank * p_.queues + p_.records[w.record].queue;
        int32_t& claimed = claims_[static_cast<int64_t>(w.layer) * p_.ranks * p_.queues + queue];
        if (claimed < p_.records[w.record].claims_end) w.current = p_.offsets[kQueues][queue] + claimed++;
      }
      if (w.current == w.record) ++w.record;
      w.task = p_.records[w.current].first_task;
      w.task_end = p_.records[w.current].end_task;
    }
    return w.run(w.fetched++) = {
               .record = w.current, .layer = w.layer, .segment = w.segment, .task = &p_.tasks[w.task++]};
  }

  // -- controller

  // Returns whether the worker's next task may have to be claimed from a queue.
  bool claims(Worker& w) const { return seek(w) && w.task == w.task_end && p_.records[w.record].queue >= 0; }

  // Returns which fraction of a task's loads fits into the ring buffer at once. Some of the ring is not
  // available for loads: the bytes that stay there until the task is computed, and the bytes of its outputs.
  double kept(const Task& task) const {
    const double ring = c_.ring_bytes - task.held_bytes - task.output_bytes;
    return task.ring_bytes <= ring ? 1.0 : std::max(0.0, ring / task.ring_bytes);
  }

  // Returns when the worker may claim another task from a queue: once its latest task has requested all its
  // loads. By then, that task's waits are satisfied, and the ring buffer has room for all remaining loads.
  // Returns kNever if the time is not known yet.
  double asked_for(Worker& w) const {
    const Run& run = w.run(w.fetched - 1);
    const double kept = this->kept(*run.task);
    if (kept >= 1.0) return run.body_begin;
    if (run.begin == kNever || run.last_begin == kNever) return kNever;
    return std::max(run.begin + stalled(run) + (1.0 - kept) * run.task->compute_s,
                    run.last_begin + c_.latency_s + run.task->tail_s);
  }

  void fetch(Worker& w) {
    w.ended = !seek(w);
    if (w.ended || w.fetching) return;
    const bool claims = this->claims(w);
    if (w.fetched - w.stored >= (claims ? c_.claim_in_flight : c_.in_flight)) return;
    if (claims && w.fetched > w.stored) {
      const double from = asked_for(w);
      if (from == kNever) return;
      w.fetch_free = std::max(w.fetch_free, from);
    }
    if (w.fetch_free > now_) {
      w.fetching = true;
      return schedule(w.fetch_free, &Engine::fetch_now, w);
    }
    Run& run = take(w);
    const bool claimed = claims && run.record != w.record - 1;
    run.fetched = now_;
    if (run.task == &p_.tasks[p_.records[run.record].first_task])
      run.fetched += c_.dispatch_s + (claimed ? c_.claim_s : 0.0);
    w.fetch_free = run.fetched;
    record(w, run, Role::CONTROLLER, IntervalKind::FETCH, now_, run.fetched);
    load(w);
    fetch(w);
  }
  void fetch_now(Worker& w) {
    w.fetching = false;
    fetch(w);
  }

  // -- loaders

  // Returns how many bytes of the ring buffer are free for task number `n`. The task that is being computed
  // frees its bytes gradually. If its load is complete, its bytes count as free at once, and `leaving` is set
  // to their number; otherwise `leaving` is 0.
  double room(Worker& w, int64_t n, double& leaving) const {
    double bytes = c_.ring_bytes;
    leaving = 0.0;
    for (int64_t m = w.stored; m < n; ++m) {
      const Task& before = *w.run(m).task;
      bytes -= before.output_bytes;
      if (m < w.computed) continue;
      bytes -= before.held_bytes;
      if (m == w.computed && w.run(m).end != kNever)
        leaving = before.ring_bytes;
      else
        bytes -= before.ring_bytes;
    }
    return bytes;
  }

  // Determines when the next task begins to load: as soon as earlier tasks leave room in the ring buffer.
  // What fits at that time is loaded first, as the task's head.
  void load(Worker& w) {
    if (w.headed == w.fetched || w.flows[kHead] + w.flows[kBodyPart] > 0) return;  // earlier loads go first
    const Run& run = w.run(w.headed);
    const Task& task = *run.task;
    double from = std::max(now_, run.fetched), room = task.ring_bytes;
    if (w.head_asked == kNever) w.head_asked = from;
    if (task.ring_bytes > 0) {
      double leaving = 0.0;
      const double all = this->room(w, w.headed, leaving);
      if (all <= 0) return;
      if (leaving > all) {
        const Run& computed = w.run(w.computed);
        from = std::max(from, computed.end - all / leaving * (computed.end - computed.begin));
      }
      room = std::clamp(all - task.held_bytes, 0.0, task.ring_bytes);
    }
    if (w.head_due <= from) return;
    w.head_due = from;
    w.head_part = task.ring_bytes > 0 ? room / task.ring_bytes : 0.0;
    at(from, &Engine::begin_head, w);
  }

  // Starts to load `bytes` bytes, which belong to the given part of the worker's load. All of them pass
  // through the cache, and `missing` of them come from memory.
  void flow(Worker& w, int part, double bytes, double missing) {
    ranks_[w.rank].cached.add(now_, bytes, kParts * w.stream + part);
    ++w.flows[part];
    if (missing > 0) {
      ranks_[w.rank].memory.add(now_, missing, kParts * w.stream + part);
      ++w.flows[part];
    }
  }

  // Reads `bytes` bytes of cache entry `key` and returns how many of them were not in the cache. A negative
  // key means data that is never cached.
  double missing(const Worker& w, int32_t key, int32_t layer, double bytes) {
    if (key < 0) return bytes;
    Rank& rank = ranks_[w.rank];
    const double missing = rank.cache.read(key, layer, bytes, rank.filled(now_));
    write_back(rank);
    return missing;
  }
  void write_back(Rank& rank) {
    const double bytes = rank.cache.take_written_back();
    if (bytes > 0) rank.memory.add(now_, bytes, -1);
  }

  void begin_head(Worker& w) {
    if (w.head_due > now_) return;  // an outdated event: the load has begun already
    w.head_due = kNever;
    Run& run = w.run(w.headed++);
    record(w, run, Role::LOADER, IntervalKind::PAGE_WAIT, w.head_asked, now_);
    w.head_asked = kNever;
    const Task& task = *run.task;
    run.head_begin = run.head_end = run.ready = now_;
    run.rest = task.weight_bytes;
    run.rest_missing = missing(w, task.weight_key, run.layer, run.rest);
    const int64_t number = w.headed;
    if (w.loaded + 1 == w.headed) begin_waits(w);
    // If begin_waits() has begun the task's body, the body loads everything, and no separate head is left to
    // load. If the waits are satisfied but the ring has no room for the body, the head includes inputs.
    if (w.headed > number || run.body_begin != kNever) return load(w);
    if (w.loaded + 1 == number && met(w) && task.ring_bytes > 0) {
      add_reads(w);
      run.read_ahead = true;
    }
    if (run.rest * w.head_part <= 0) return load(w);
    run.head_end = kNever;
    load_rest(w, run, kHead, w.head_part);
  }

  // Starts to prefetch some of a task's weights into the L2 cache. Called once the head is loaded (the first
  // weights, as many as the ring buffer has room for). For each page of the head, the page that is
  // `ahead_bytes` further on is prefetched, unless the ring buffer has room for it.
  void begin_ahead(Worker& w, int64_t task_number) {
    Run& run = w.run(task_number);
    const Task& task = *run.task;
    if (run.body_begin != kNever || run.read_ahead || w.flows[kAhead] > 0 || run.rest_missing <= 0) return;
    const double head = task.weight_bytes - run.rest;
    const double far = task.weight_bytes - std::max(head, task.ahead_bytes);
    const double bytes = std::min({head, task.ahead_bytes, far});
    if (bytes <= 0) return;
    run.ahead = bytes * run.rest_missing / run.rest;
    w.ahead = task_number;
    ++w.flows[kAhead];
    ranks_[w.rank].memory.add(now_, run.ahead, kParts * w.stream + kAhead);
  }

  // Adds the inputs of the task that is being loaded to the bytes that it still has to load.
  void add_reads(Worker& w) {
    Run& run = w.run(w.loaded);
    const Task& task = *run.task;
    if (run.read_ahead || task.read_bytes <= 0) return;
    run.rest += task.read_bytes;
    run.rest_missing += missing(w, task.read_key, run.layer, task.read_bytes);
  }

  // Begins the waits of the next task. Called when the tasks before it have been loaded and its own load has
  // begun.
  void begin_waits(Worker& w) {
    w.wait = w.run(w.loaded).task->first_wait;
    wait_on(w);
  }

  // Returns whether the load of the oldest task that is not loaded yet has begun, and its waits are
  // satisfied.
  bool met(Worker& w) const { return w.loaded < w.headed && w.wait < 0 && w.run(w.loaded).ready <= now_; }

  // Checks the waits of the task that is being loaded, starting with wait number w.wait. Stops at the first
  // wait that is not satisfied, and asks its counter to wake this worker when the counter is complete.
  void wait_on(Worker& w) {
    Run& run = w.run(w.loaded);
    for (; w.wait < run.task->end_wait; ++w.wait) {
      Counter& counter = this->counter(w.rank, block(run), p_.waits[w.wait].counter);
      if (counter.left > 0) {
        w.next_waiter = counter.waiter;
        counter.waiter = &w;
        return;
      }
      if (counter.met > run.ready) {
        run.ready = counter.met;
        run.slot = p_.waits[w.wait].slot;
      }
    }
    w.wait = -1;
    at(run.ready, &Engine::begin_body, w);
  }

  // Called once a task's waits are satisfied: loads the data that was not loaded before. If the ring buffer
  // has no room beside the previous task, this load begins when the previous task has been computed.
  void begin_body(Worker& w) {
    if (!met(w)) return;
    Run& run = w.run(w.loaded);
    if (run.body_begin != kNever) return;
    const Task& task = *run.task;
    if (w.computed < w.loaded && task.weight_bytes + task.read_bytes > 0) {
      double leaving = 0.0;
      const double room = this->room(w, w.loaded, leaving) - leaving;
      if (task.ring_bytes <= 0 || task.ring_bytes + task.held_bytes > room) return;
    }
    run.body_begin = now_;
    run.rest_missing = std::max(0.0, run.rest_missing - run.ahead);
    if (w.flows[kAhead] > 0 && w.ahead == w.loaded) {
      w.body_joins = true;
      ++w.flows[kBodyPart];
    }
    add_reads(w);
    // If the worker's next task comes from a queue, the worker claims that task when the current task has
    // requested its last data. To find this time, the simulator splits off the last part of the load, as many
    // bytes as the ring buffer holds, as a load of its own.
    const bool before_claim = c_.claim_in_flight > 1 && w.loaded + 1 == w.fetched && claims(w);
    const double last = before_claim ? kept(task) * (task.weight_bytes + task.read_bytes) : run.rest;
    if (run.rest <= last) run.last_begin = now_;
    if (run.rest > 0)
      load_rest(w, run, kBodyPart, run.rest > last ? 1.0 - last / run.rest : 1.0);
    else
      run.body_end = now_;
    begin_compute(w);
    fetch(w);
    if (run.body_end == now_) loaded(w);
  }

  // Starts to load the fraction `share` of the bytes that a task has still to load. `part` is kHead before
  // the task's waits are satisfied, and kBodyPart afterwards.
  void load_rest(Worker& w, Run& run, int part, double share) {
    const double bytes = run.rest * share, missing = run.rest_missing * share;
    run.rest -= bytes;
    run.rest_missing -= missing;
    flow(w, part, bytes, missing);
    const Task& task = *run.task;
    if (task.ask_s <= 0) return;
    ++w.flows[part];
    schedule(now_ + task.ask_s * bytes / (task.weight_bytes + task.read_bytes),
             part == kHead ? &Engine::asked_head : &Engine::asked_body, w);
  }
  // A load has ended when two things have happened: all its bytes have arrived, and all its requests have
  // been issued. These two functions handle the second event.
  void asked_head(Worker& w) { flow_ended(w, kHead); }
  void asked_body(Worker& w) { flow_ended(w, kBodyPart); }

  void flow_ended(Worker& w, int part) {
    if (--w.flows[part] > 0) return;
    if (part == kAhead) {
      if (w.body_joins) {
        w.body_joins = false;
        flow_ended(w, kBodyPart);
      }
      return;
    }
    if (part == kHead) {
      w.run(w.headed - 1).head_end = now_;
      begin_ahead(w, w.headed - 1);
      if (w.loaded + 1 == w.headed) loaded(w);
      return load(w);
    }
    Run& run = w.run(w.loaded);
    if (run.last_begin == kNever) {
      run.last_begin = now_;
      load_rest(w, run, kBodyPart, 1.0);
      return fetch(w);
    }
    run.body_end = now_;
    loaded(w);
  }

  // If all data of the task that is being loaded has arrived, lets the loaders go on to the next task.
  void loaded(Worker& w) {
    Run& run = w.run(w.loaded);
    if (run.head_end == kNever || run.body_end == kNever) return;
    record(w, run, Role::LOADER, IntervalKind::LOAD, run.head_begin, run.head_end);
    record(w, run, Role::LOADER, IntervalKind::LOAD, run.body_begin, run.body_end);
    // If the load of the next task has not begun yet, begin_head() will begin the task's waits later.
    const bool next = ++w.loaded < w.headed;
    if (run.began) decide_end(w);
    if (next) begin_waits(w);
    load(w);
  }

  // -- consumers

  // Begins to compute the oldest task that is not computed yet, when its first bytes arrive.
  void begin_compute(Worker& w) {
    Run& run = w.run(w.computed);
    if (w.computed == w.headed || run.body_begin == kNever || run.begin != kNever) return;
    const bool reads_late = run.task->read_bytes > 0 && !run.read_ahead;
    run.begin = now_;
    if (run.task->weight_bytes > 0 || run.read_ahead)
      run.begin = std::max(run.begin, run.head_begin + c_.latency_s);
    if (reads_late) run.begin = std::max(run.begin, run.body_begin + c_.latency_s);
    at(run.begin, &Engine::computing, w);
  }

  void computing(Worker& w) {
    Run& run = w.run(w.computed);
    run.began = true;
    const double idle = std::max(w.compute_end, run.head_begin);
    if (run.ready > idle)
      record(w, run, Role::CONSUMER, IntervalKind::COUNTER_WAIT, idle, run.ready, run.slot);
    if (w.loaded > w.computed) decide_end(w);
  }

  // Called when a task is being computed and all its loads have ended. Determines when its computation ends.
  void decide_end(Worker& w) {
    Run& run = w.run(w.computed);
    const Task& task = *run.task;
    run.end = run.begin + task.compute_s;
    if (task.weight_bytes + task.read_bytes > 0) {
      const double last = run.body_end > run.body_begin ? std::max(run.body_end, run.head_end) : run.head_end;
      run.end = std::max(run.end, last + c_.latency_s + task.tail_s);
    }
    run.end += stalled(run);
    schedule(run.end, &Engine::computed, w);
    load(w);
    fetch(w);
  }

  double stalled(const Run& run) const {
    const bool here = run.segment == stall_.segment && p_.records[run.record].number == stall_.number &&
                      (run.segment != kBody || run.layer == stall_.layer);
    return here ? stall_.seconds : 0.0;
  }

  void computed(Worker& w) {
    Run& run = w.run(w.computed);
    record(w, run, Role::CONSUMER, IntervalKind::COMPUTE, run.begin, run.end);
    w.compute_end = run.end;
    ++w.computed;
    store(w);
    begin_body(w);
    begin_compute(w);
    load(w);
  }

  // Returns one of the last three arguments, depending on the part of the program to which `run` belongs: the
  // prologue, the body (the layers) or the epilogue.
  static int32_t by_segment(const Run& run, int32_t prologue, int32_t body, int32_t epilogue) {
    return run.segment == kPrologue ? prologue : run.segment == kBody ? body : epilogue;
  }

  // -- storer

  void store(Worker& w) {
    if (w.storing || w.stored == w.computed) return;
    w.storing = true;
    Run& run = w.run(w.stored);
    run.store_begin = now_;
    const double* bytes = p_.stores + (run.task - p_.tasks) * p_.ranks;
    const int32_t key = run.task->write_key;
    double most = 0.0;
    w.store_flows = 1;
    for (int32_t r = 0; r < p_.ranks; ++r) {
      if (bytes[r] <= 0) continue;
      most = std::max(most, bytes[r]);
      if (key >= 0) {
        ranks_[r].cache.write(key, bytes[r], ranks_[r].filled(now_));
        ranks_[r].stored += bytes[r];
        write_back(ranks_[r]);
      }
      if (r == w.rank) continue;
      links_.add(now_, w.rank, r, bytes[r], w.stream);
      ++w.store_flows;
    }
    const double local = most > 0 ? c_.store_s + bytes[w.rank] / c_.worker_bytes_per_s : 0.0;
    at(now_ + local, &Engine::store_part_ended, w);
  }

  void store_part_ended(Worker& w) {
    if (--w.store_flows > 0) return;
    // `run` is a copy, because a signal below may let this worker continue and overwrite the element of its
    // array `runs`.
    const Run run = w.run(w.stored);
    record(w, run, Role::STORER, IntervalKind::STORE, run.store_begin, now_);
    w.storing = false;
    bool final = true;
    if (run.task->split >= 0) {
      int32_t& arrived = splits_[static_cast<int64_t>(w.rank) * p_.splits + run.task->split];
      final = ++arrived == run.task->parts;
      if (final) arrived = 0;
    }
    ++w.stored;
    if (final) signal(run, w.rank);
    store(w);
    load(w);
    begin_body(w);
    fetch(w);
  }

  void signal(const Run& run, int32_t rank) {
    for (int32_t s = run.task->first_signal; s < run.task->end_signal; ++s) {
      const Signal& signal = p_.signals[s];
      const bool all = signal.rank < 0;
      for (int32_t r = all ? 0 : signal.rank; r < (all ? p_.ranks : signal.rank + 1); ++r)
        arrive(r, block(run) + signal.next, signal, rank);
    }
  }

  void arrive(int32_t rank, int32_t block, const Signal& signal, int32_t from) {
    Counter& counter = this->counter(rank, block, signal.counter);
    counter.left -= signal.arrivals;
    if (counter.left < 0) result_.crowded_counter = signal.counter;
    const double known = now_ + (rank == from ? c_.signal_s : c_.remote_signal_s);
    counter.met = std::max(counter.met, known);
    if (counter.left != 0) return;
    for (Worker* w = counter.waiter; w;) {
      Worker* const next = w->next_waiter;
      wait_on(*w);
      w = next;
    }
    counter.waiter = nullptr;
  }

  // Each layer has its own set ("block") of counters. Returns the number of the block in which a task waits
  // for counters. The task signals counters of the same block or of the next one.
  int32_t block(const Run& run) const { return by_segment(run, 0, run.layer, p_.layers); }
  Counter& counter(int32_t rank, int32_t block, int32_t index) {
    return counters_[(static_cast<int64_t>(block) * p_.ranks + rank) * p_.counters + index];
  }

  // -- writing the trace

  void record(const Worker& w, const Run& run, Role role, IntervalKind kind, double begin, double end,
              int32_t slot = 0) {
    if (intervals_ == nullptr || (end <= begin && kind != IntervalKind::COMPUTE)) return;
    const int32_t layer = by_segment(run, kTracePrologue, run.layer, kTraceEpilogue);
    if (result_.intervals < most_)
      intervals_[result_.intervals] = {
          .begin = static_cast<uint64_t>(begin * 1e9),
          .end = static_cast<uint64_t>(end * 1e9),
          .instruction = static_cast<uint32_t>(p_.records[run.record].number),
          .launch = 1,
          .worker = static_cast<uint16_t>(w.stream % p_.workers),
          .layer = static_cast<uint16_t>(layer),
          .rank = static_cast<uint8_t>(w.rank),
          .role = static_cast<uint8_t>(c_.roles ? role : Role::WORKER),
          .kind = static_cast<uint8_t>(kind),
          .slot = static_cast<uint8_t>(slot),
      };
    ++result_.intervals;
  }

  const Program& p_;
  const Costs& c_;
  const Stall stall_;
  Interval* const intervals_;
  const int64_t most_;
  Result result_{};
  double now_ = c_.launch_s;
  int64_t scheduled_ = 0;
  std::priority_queue<Event> events_;
  std::vector<Worker> workers_;
  std::vector<Counter> counters_;
  std::vector<int32_t> claims_;  // [layers][ranks * queues]
  std::vector<int32_t> splits_;  // [ranks][splits]
  std::vector<Rank> ranks_;
  Links links_;
};

}  // namespace
}  // namespace mk::simulate

// Simulates a program and stores the predicted time and traffic in `result`. If `intervals` is not null, also
// writes a trace there, at most `most` entries. Returns 0 on success, -1 if memory runs out, and -2 if an
// index in the program is out of bounds.
MK_API int32_t mk_simulate(const mk::simulate::Program* program, const mk::simulate::Costs* costs,
                           const mk::simulate::Stall* stall, mk::Interval* intervals, int64_t most,
                           mk::simulate::Result* result) {
  if (!mk::simulate::is_sound(*program)) return -2;
  try {
    *result = mk::simulate::Engine(*program, *costs, *stall, intervals, most).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
