// A discrete-event simulation of a program. worker.h describes the roles in a worker, such as loaders.
//
// An event is the end of a transfer or the alarm of a worker. It only wakes workers. A worker that is
// awake advances: each of its roles that can go on takes a step, until none can. A role that waits for a
// certain time sets the worker's alarm. A role that waits for other workers is woken by their signals.
#include <algorithm>
#include <new>
#include <queue>
#include <utility>
#include <vector>

#include "../common/isa.h"
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
  Engine(const Program& program, const Costs& costs, int32_t further_layers, double most_s,
         Interval* intervals, int64_t most)
      : p_(program),
        c_(costs),
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
    for (Worker& w : workers_) awake_.push_back(&w);
    do {
      for (size_t i = 0; i < awake_.size(); ++i) advance(*awake_[i]);  // this may wake more workers
      awake_.clear();
      result_.step_s = now_ + pace_.further_s(now_);
      if (result_.step_s >= most_s_) {
        result_.step_s = kNever;
        return result_;
      }
    } while (next_event());
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
  struct Alarm {
    double time;
    int64_t number;  // order of creation, in which alarms with equal times ring
    Worker* worker;
    bool operator<(const Alarm& o) const { return time > o.time || (time == o.time && number > o.number); }
  };

  // Goes to the time of the next event and wakes the worker that it concerns. Returns false if there is none.
  bool next_event() {
    while (!alarms_.empty() && alarms_.top().time != alarms_.top().worker->alarm) alarms_.pop();  // outdated
    double time = alarms_.empty() ? kNever : alarms_.top().time;
    Shared* source = nullptr;
    for (Device& device : devices_)
      for (Shared* rate : {&device.memory, &device.cached})
        if (rate->next() < time) time = rate->next(), source = rate;
    const bool sent = links_.next() < time;
    if (sent) time = links_.next();
    if (time == kNever) return false;
    now_ = std::max(now_, time);
    if (sent) {
      Worker& w = workers_[links_.pop(now_)];
      --w.store_flows;
      awake_.push_back(&w);
    } else if (source) {
      const int32_t who = source->pop(now_);
      if (who < 0) return true;  // a write-back from the cache, for which no worker waits
      Worker& w = workers_[who / kParts];
      if (--w.flows[who % kParts] == 0) awake_.push_back(&w);
    } else {
      Worker& w = *alarms_.top().worker;
      alarms_.pop();
      w.alarm = kNever;
      awake_.push_back(&w);
    }
    return true;
  }

  void advance(Worker& w) {
    do w.due = kNever;
    while (end_head(w) || end_body(w) || set_up(w) || load_weights(w) || pass_waits(w) || load_inputs(w) ||
           begin_computing(w) || end_computing(w) || begin_store(w) || end_store(w) || prefetch(w));
    if (w.due >= w.alarm) return;
    w.alarm = w.due;
    alarms_.push({w.due, alarms_set_++, &w});
  }

  // Returns whether `time` has come. If not, also makes the worker's alarm ring then, or earlier.
  bool reached(Worker& w, double time) const {
    if (time > now_) w.due = std::min(w.due, time);
    return time <= now_;
  }

  // -- controller

  bool set_up(Worker& w) {
    w.ended = !seek(p_, w);
    if (w.ended) return false;
    const bool claims = simulate::claims(p_, w);
    if (w.fetched - w.stored >= (claims ? c_.claim_in_flight : c_.in_flight)) return false;
    double from = w.set_up_free;
    if (claims && w.fetched > w.stored) from = std::max(from, asked_for(c_, w.run(w.fetched - 1)));
    if (!reached(w, from)) return false;
    Run& run = take(p_, w, claims_);
    const bool claimed = claims && run.record != w.record - 1;
    run.fetched = now_;
    if (run.task == &p_.tasks[p_.records[run.record].first_task])
      run.fetched += c_.dispatch_s + (claimed ? c_.claim_s : 0.0);
    w.set_up_free = run.fetched;
    record(w, run, Role::CONTROLLER, IntervalKind::FETCH, now_, run.fetched);
    return true;
  }

  // -- loaders

  // Returns whether a part of a load is in progress: some of its bytes have not been requested or have not
  // arrived.
  bool loading(Worker& w, Part part) { return w.flows[part] > 0 || !reached(w, w.asked[part]); }

  // Begins the load of the next task, as soon as earlier tasks leave room in the ring buffer. The data that
  // fits at that time is called the task's head, and is loaded first.
  bool load_weights(Worker& w) {
    if (w.headed == w.fetched || loading(w, kHead) || loading(w, kBodyPart)) return false;
    Run& run = w.run(w.headed);
    const Task& task = *run.task;
    double from = std::max(now_, run.fetched), fits = 1.0;
    if (w.head_asked == kNever) w.head_asked = from;
    if (task.ring_bytes > 0) {
      double leaving = 0.0;
      const double all = room(c_, w, w.headed, leaving);
      if (all <= 0) return false;
      if (leaving > all) {
        const Run& computed = w.run(w.computed);
        from = std::max(from, computed.end - all / leaving * (computed.end - computed.begin));
      }
      fits = std::clamp(all - task.held_bytes, 0.0, task.ring_bytes) / task.ring_bytes;
    }
    if (!reached(w, from)) return false;
    ++w.headed;
    record(w, run, Role::LOADER, IntervalKind::PAGE_WAIT, w.head_asked, now_);
    w.head_asked = kNever;
    run.head_begin = run.head_end = now_;
    run.rest = task.weight_bytes;
    run.rest_missing = devices_[w.rank].missing(now_, task.weight_key, run.layer, run.rest);
    if (w.loaded + 1 == w.headed) {
      w.wait = task.first_wait;
      pass_waits(w);
      // If the waits are satisfied, inputs are loaded together with weights: all of them if they fit into the
      // ring, otherwise only the part that fits, the head.
      if (load_inputs(w)) return true;
      if (met(w) && task.ring_bytes > 0) {
        add_reads(w);
        run.read_ahead = true;
      }
    }
    if (task.ring_bytes <= 0 || run.rest * fits <= 0) return true;
    run.head_end = kNever;
    load_rest(w, run, kHead, fits);
    return true;
  }

  bool end_head(Worker& w) {
    if (w.headed == 0 || w.run(w.headed - 1).head_end != kNever || loading(w, kHead)) return false;
    w.run(w.headed - 1).head_end = now_;
    return true;
  }

  // Prefetches weights into the L2 cache, a page at a time, while no load is in progress because the ring
  // buffer has no room. Weights of later tasks are prefetched too, but at most `ahead_bytes` in total may be
  // prefetched and not loaded yet.
  bool prefetch(Worker& w) {
    if (w.flows[kAhead] > 0 || loading(w, kHead) || loading(w, kBodyPart)) return false;
    double left = c_.ahead_bytes;
    for (int64_t n = w.loaded; n < w.fetched; ++n) left -= w.run(n).ahead;
    for (int64_t n = w.loaded; n < w.fetched; ++n) {
      Run& run = w.run(n);
      const bool headed = n < w.headed;
      const double rest = headed ? run.read_ahead ? 0.0 : run.rest : run.task->weight_bytes;
      const double bytes = std::min({c_.page_bytes, left, rest - run.ahead});
      if (run.task->ring_bytes <= 0 || bytes <= 0) continue;
      run.ahead += bytes;
      w.ahead = n;
      ++w.flows[kAhead];
      devices_[w.rank].memory.add(now_, bytes * (headed ? run.rest_missing / run.rest : 1.0),
                                  kParts * w.stream + kAhead);
      return true;
    }
    return false;
  }

  // Adds the inputs of the task that is being loaded to `rest`, the bytes that it has still to load.
  void add_reads(Worker& w) {
    Run& run = w.run(w.loaded);
    const Task& task = *run.task;
    if (run.read_ahead || task.read_bytes <= 0) return;
    run.rest += task.read_bytes;
    run.rest_missing += devices_[w.rank].missing(now_, task.read_key, run.layer, task.read_bytes);
  }

  // Passes the waits of the task that is being loaded, from number w.wait on. Stops at the first wait
  // that is not satisfied; when the counter of that wait is complete, it wakes this worker.
  bool pass_waits(Worker& w) {
    if (w.loaded == w.headed || w.wait < 0 || w.waiting) return false;
    Run& run = w.run(w.loaded);
    run.ready = std::max(run.ready, run.head_begin);
    for (; w.wait < run.task->end_wait; ++w.wait) {
      Counter& counter = devices_[w.rank].counter(block(run), p_.waits[w.wait].counter);
      if (counter.left > 0) {
        w.next_waiter = counter.waiter;
        counter.waiter = &w;
        w.waiting = true;
        return true;
      }
      if (counter.met > run.ready) {
        run.ready = counter.met;
        run.slot = p_.waits[w.wait].slot;
      }
    }
    w.wait = -1;
    return true;
  }

  // Looks at the oldest task that is not loaded completely. Returns whether its load has begun and its waits
  // are satisfied.
  bool met(Worker& w) const { return w.loaded < w.headed && w.wait < 0 && reached(w, w.run(w.loaded).ready); }

  // Once a task's waits are satisfied, loads the rest of its data. If the ring buffer has no room beside the
  // previous task, this load begins when the previous task has been computed.
  bool load_inputs(Worker& w) {
    if (w.loaded == w.headed || w.run(w.loaded).body_begin != kNever || !met(w)) return false;
    Run& run = w.run(w.loaded);
    const Task& task = *run.task;
    if (w.computed < w.loaded && task.weight_bytes + task.read_bytes > 0) {
      double leaving = 0.0;
      const double room = simulate::room(c_, w, w.loaded, leaving) - leaving;
      if (task.ring_bytes <= 0 || task.ring_bytes + task.held_bytes > room) return false;
    }
    run.body_begin = now_;
    add_reads(w);
    // If the worker's next task comes from a queue, the worker claims that task when the current task has
    // requested its last data. To find this time, the simulator divides the load into two. The second one
    // has as many bytes as the ring buffer holds.
    const bool before_claim = c_.claim_in_flight > 1 && w.loaded + 1 == w.fetched && claims(p_, w);
    const double last = before_claim ? kept(c_, task) * (task.weight_bytes + task.read_bytes) : run.rest;
    if (run.rest <= last) run.last_begin = now_;
    if (run.rest > 0) load_rest(w, run, kBodyPart, run.rest > last ? 1.0 - last / run.rest : 1.0);
    return true;
  }

  // Starts to load the fraction `share` of the bytes that a task has still to load. `part` is kHead before
  // the task's waits are satisfied, and kBodyPart afterwards.
  void load_rest(Worker& w, Run& run, Part part, double share) {
    const double bytes = run.rest * share, missing = run.rest_missing * share;
    const double ahead = std::min(bytes, run.ahead);
    run.rest -= bytes;
    run.rest_missing -= missing;
    run.ahead -= ahead;
    const double left = ahead > 0.0 ? missing * (1.0 - ahead / bytes) : missing;
    w.flows[part] += devices_[w.rank].load(now_, bytes, left, kParts * w.stream + part);
    const Task& task = *run.task;
    w.asked[part] = now_ + task.ask_s * bytes / (task.weight_bytes + task.read_bytes);
  }

  // Ends the load of the oldest task that is not loaded yet, unless data or a prefetch for it is still on its
  // way.
  bool end_body(Worker& w) {
    if (w.loaded == w.headed) return false;
    Run& run = w.run(w.loaded);
    if (run.body_begin == kNever || run.head_end == kNever) return false;
    if (loading(w, kBodyPart) || (w.flows[kAhead] > 0 && w.ahead == w.loaded)) return false;
    if (run.last_begin == kNever) {
      run.last_begin = now_;
      load_rest(w, run, kBodyPart, 1.0);
      return true;
    }
    run.body_end = now_;
    record(w, run, Role::LOADER, IntervalKind::LOAD, run.head_begin, run.head_end);
    record(w, run, Role::LOADER, IntervalKind::LOAD, run.body_begin, run.body_end);
    // The next task's waits begin now, or when its load begins if that is later.
    if (++w.loaded < w.headed) w.wait = w.run(w.loaded).task->first_wait;
    return true;
  }

  // -- consumers

  // Begins to compute the oldest task that is not computed yet, when its first bytes have arrived.
  bool begin_computing(Worker& w) {
    if (w.computed == w.headed) return false;
    Run& run = w.run(w.computed);
    if (run.body_begin == kNever || run.began) return false;
    if (run.begin == kNever) {
      const Task& task = *run.task;
      const bool reads_late = task.read_bytes > 0 && !run.read_ahead;
      const double queue_s = devices_[w.rank].queue_s(now_);
      const double prepared = std::max(w.compute_end, run.fetched) + task.prepare_s;
      run.begin = std::max(now_, prepared + (task.accessing & 1 ? queue_s : 0.0)) + task.start_s +
                  (task.accessing & 2 ? queue_s : 0.0);
      if (task.weight_bytes > 0 || run.read_ahead)
        run.begin = std::max(run.begin, run.head_begin + c_.latency_s);
      if (reads_late) run.begin = std::max(run.begin, run.body_begin + c_.latency_s + queue_s);
    }
    if (!reached(w, run.begin)) return false;
    run.began = true;
    const double idle = std::max(w.compute_end, run.head_begin);
    if (run.ready > idle)
      record(w, run, Role::CONSUMER, IntervalKind::COUNTER_WAIT, idle, run.ready, run.slot);
    return true;
  }

  // Ends the computation of a task. The time of its end is known only after all its loads have ended.
  bool end_computing(Worker& w) {
    if (w.computed >= w.loaded) return false;
    Run& run = w.run(w.computed);
    if (!run.began) return false;
    if (run.end == kNever) {
      const Task& task = *run.task;
      run.end = run.begin + task.compute_s;
      if (task.weight_bytes + task.read_bytes > 0) {
        const double last =
            run.body_end > run.body_begin ? std::max(run.body_end, run.head_end) : run.head_end;
        run.end = std::max(run.end, last + c_.latency_s + task.tail_s);
      }
      run.end += task.end_s + (task.accessing & 4 ? devices_[w.rank].queue_s(now_) : 0.0);
      return true;
    }
    if (!reached(w, run.end)) return false;
    record(w, run, Role::CONSUMER, IntervalKind::COMPUTE, run.begin, run.end);
    w.compute_end = run.end;
    ++w.computed;
    return true;
  }

  // -- storer

  bool begin_store(Worker& w) {
    if (w.storing || w.stored == w.computed) return false;
    w.storing = true;
    Run& run = w.run(w.stored);
    run.store_begin = now_;
    const double* bytes = p_.stores + (run.task - p_.tasks) * p_.ranks;
    const int32_t key = run.task->write_key;
    double most = 0.0;
    for (int32_t r = 0; r < p_.ranks; ++r) {
      if (bytes[r] <= 0) continue;
      most = std::max(most, bytes[r]);
      if (key >= 0) devices_[r].store(now_, key, bytes[r]);
      if (r == w.rank) continue;
      links_.add(now_, w.rank, r, bytes[r], w.stream);
      ++w.store_flows;
    }
    w.store_end = now_ + (most > 0 ? c_.store_s + bytes[w.rank] / c_.worker_bytes_per_s : 0.0);
    return true;
  }

  bool end_store(Worker& w) {
    if (!w.storing || w.store_flows > 0 || !reached(w, w.store_end)) return false;
    const Run& run = w.run(w.stored);
    record(w, run, Role::STORER, IntervalKind::STORE, run.store_begin, now_);
    if (run.segment == kBody) pace_.stored(run.layer, now_);
    if (devices_[w.rank].completes(*run.task)) signal(run, w.rank);
    w.storing = false;
    ++w.stored;
    return true;
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
    counter.met = std::max(counter.met, known + devices_[rank].queue_s(now_));
    if (counter.left != 0) return;
    for (Worker* w = std::exchange(counter.waiter, nullptr); w; w = w->next_waiter) {
      w->waiting = false;
      awake_.push_back(w);
    }
  }

  // Returns the number of the counter block (the counters of a layer) that has the counters of a task's
  // waits. The task's signals add to counters of the same block or of the next one.
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
  const double most_s_;
  Interval* const intervals_;
  const int64_t most_;
  Result result_{};
  double now_ = c_.launch_s;
  int64_t alarms_set_ = 0;
  Pace pace_;
  std::priority_queue<Alarm> alarms_;
  std::vector<Worker> workers_;
  std::vector<Worker*> awake_;
  std::vector<int32_t> claims_;  // [layers][ranks * queues]
  std::vector<Device> devices_;
  Links links_;
};

}  // namespace
}  // namespace mk::simulate

// Simulates a program and stores the predicted time and traffic in `result`. The time includes
// `further_layers` more layers, each of which takes as long as the program's second layer. If `intervals` is
// not null, also writes a trace there, at most `most` entries. A step of `most_s` seconds or more is not
// simulated to its end. The program's indices are within bounds, because Python has checked the program from
// which they come. Returns 0 on success, and -1 if memory runs out.
MK_API int32_t mk_simulate(const mk::simulate::Program* program, const mk::simulate::Costs* costs,
                           int32_t further_layers, double most_s, mk::Interval* intervals, int64_t most,
                           mk::simulate::Result* result) {
  try {
    *result = mk::simulate::Engine(*program, *costs, further_layers, most_s, intervals, most).run();
    return 0;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}
