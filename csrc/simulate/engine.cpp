// A discrete-event simulation of a program. worker.h describes what the parts of a worker do.
#include <algorithm>
#include <new>
#include <queue>
#include <vector>

#include "../common/isa.h"
#include "check.h"
#include "device.h"
#include "fluid.h"
#include "pace.h"
#include "simulate.h"
#include "worker.h"

#define MK_API extern "C" __attribute__((visibility("default")))

namespace mk::simulate {
namespace {

class Engine {
 public:
  // `intervals` receives up to `most` entries of a trace; if it is null, no trace is written.
  Engine(const Program& program, const Costs& costs, const Stall& stall, int32_t further_layers,
         double most_s, Interval* intervals, int64_t most)
      : p_(program),
        c_(costs),
        stall_(stall),
        most_s_(most_s),
        intervals_(intervals),
        most_(most),
        pace_(program, further_layers),
        claims_(static_cast<size_t>(program.layers) * program.ranks * program.queues),
        links_(program.ranks, costs.egress_bytes_per_s, costs.switch_bytes_per_s, costs.worker_bytes_per_s) {
    for (int32_t s = 0; s < program.ranks * program.workers; ++s) workers_.emplace_back(program, s);
    for (int64_t r = 0; r < program.ranks; ++r) devices_.emplace_back(program, costs, r);
  }

  Result run() {
    for (Worker& w : workers_) fetch(w);
    for (;;) {
      double time = events_.empty() ? kNever : events_.top().time;
      Shared* source = nullptr;
      for (Device& device : devices_)
        for (Shared* rate : {&device.memory, &device.cached})
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
      result_.step_s = now_ + pace_.further_s(now_);
      if (result_.step_s >= most_s_) {
        result_.step_s = kNever;
        return result_;
      }
    }
    for (const Device& device : devices_) {
      result_.memory_bytes += device.memory.carried;
      result_.cache_bytes += device.cached.carried;
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

  // -- controller

  void fetch(Worker& w) {
    w.ended = !seek(p_, w);
    if (w.ended || w.fetching) return;
    const bool claims = simulate::claims(p_, w);
    if (w.fetched - w.stored >= (claims ? c_.claim_in_flight : c_.in_flight)) return;
    if (claims && w.fetched > w.stored) {
      const Run& latest = w.run(w.fetched - 1);
      const double from = asked_for(c_, latest, stalled(p_, stall_, latest));
      if (from == kNever) return;
      w.fetch_free = std::max(w.fetch_free, from);
    }
    if (w.fetch_free > now_) {
      w.fetching = true;
      return schedule(w.fetch_free, &Engine::fetch_now, w);
    }
    Run& run = take(p_, w, claims_);
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
      const double all = simulate::room(c_, w, w.headed, leaving);
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

  void begin_head(Worker& w) {
    if (w.head_due > now_) return;  // an outdated event: the load has begun already
    w.head_due = kNever;
    Run& run = w.run(w.headed++);
    record(w, run, Role::LOADER, IntervalKind::PAGE_WAIT, w.head_asked, now_);
    w.head_asked = kNever;
    const Task& task = *run.task;
    run.head_begin = run.head_end = run.ready = now_;
    run.rest = task.weight_bytes;
    run.rest_missing = devices_[w.rank].missing(now_, task.weight_key, run.layer, run.rest);
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
    devices_[w.rank].memory.add(now_, run.ahead, kParts * w.stream + kAhead);
  }

  // Adds the inputs of the task that is being loaded to the bytes that it still has to load.
  void add_reads(Worker& w) {
    Run& run = w.run(w.loaded);
    const Task& task = *run.task;
    if (run.read_ahead || task.read_bytes <= 0) return;
    run.rest += task.read_bytes;
    run.rest_missing += devices_[w.rank].missing(now_, task.read_key, run.layer, task.read_bytes);
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
      Counter& counter = devices_[w.rank].counter(block(run), p_.waits[w.wait].counter);
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
      const double room = simulate::room(c_, w, w.loaded, leaving) - leaving;
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
    const bool before_claim = c_.claim_in_flight > 1 && w.loaded + 1 == w.fetched && claims(p_, w);
    const double last = before_claim ? kept(c_, task) * (task.weight_bytes + task.read_bytes) : run.rest;
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
    w.flows[part] += devices_[w.rank].load(now_, bytes, missing, kParts * w.stream + part);
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
    run.end += stalled(p_, stall_, run);
    schedule(run.end, &Engine::computed, w);
    load(w);
    fetch(w);
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
      if (key >= 0) devices_[r].store(now_, key, bytes[r]);
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
    if (run.segment == kBody) pace_.stored(run.layer, now_);
    w.storing = false;
    ++w.stored;
    if (devices_[w.rank].completes(*run.task)) signal(run, w.rank);
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
    Counter& counter = devices_[rank].counter(block, signal.counter);
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

  // Returns the block in which a task waits for counters. It signals counters of this block or the next.
  int32_t block(const Run& run) const { return run.by_segment(0, run.layer, p_.layers); }

  // -- writing the trace

  void record(const Worker& w, const Run& run, Role role, IntervalKind kind, double begin, double end,
              int32_t slot = 0) {
    if (intervals_ == nullptr || (end <= begin && kind != IntervalKind::COMPUTE)) return;
    if (result_.intervals < most_)
      intervals_[result_.intervals] =
          interval(p_, w, run, c_.roles ? role : Role::WORKER, kind, begin, end, slot);
    ++result_.intervals;
  }

  const Program& p_;
  const Costs& c_;
  const Stall stall_;
  const double most_s_;
  Interval* const intervals_;
  const int64_t most_;
  Result result_{};
  double now_ = c_.launch_s;
  int64_t scheduled_ = 0;
  Pace pace_;
  std::priority_queue<Event> events_;
  std::vector<Worker> workers_;
  std::vector<int32_t> claims_;  // [layers][ranks * queues]
  std::vector<Device> devices_;
  Links links_;
};

}  // namespace
}  // namespace mk::simulate

// Simulates a program and stores the predicted time and traffic in `result`. The time includes
// `further_layers` more layers, each of which takes as long as the program's second layer. If `intervals` is
// not null, also writes a trace there, at most `most` entries. A step of `most_s` seconds or more is not
// simulated to its end. Returns 0 on success, -1 if memory runs out, and -2 if an index in the program is out
// of bounds.
MK_API int32_t mk_simulate(const mk::simulate::Program* program, const mk::simulate::Costs* costs,
                           const mk::simulate::Stall* stall, int32_t further_layers, double most_s,
                           mk::Interval* intervals, int64_t most, mk::simulate::Result* result) {
  if (!mk::simulate::is_sound(*program)) return -2;
  try {
    *result = mk::simulate::Engine(*program, *costs, *stall, further_layers, most_s, intervals, most).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
