#include "engine.h"

#include <algorithm>

namespace mk::simulate {

Engine::Engine(const Program& program, const Costs& costs, const Stall& stall, Interval* intervals,
               int64_t most)
    : p_(program),
      c_(costs),
      stall_(stall),
      intervals_(intervals),
      most_(most),
      workers_(static_cast<size_t>(program.ranks) * program.workers),
      counters_(static_cast<size_t>(program.layers + 1) * program.ranks * program.counters),
      claims_(static_cast<size_t>(program.layers) * program.ranks * program.queues),
      splits_(static_cast<size_t>(program.ranks) * program.splits),
      links_(program.ranks, costs.egress_bytes_per_s, costs.switch_bytes_per_s, costs.worker_bytes_per_s),
      rank_computing_(program.ranks),
      kind_computing_(static_cast<size_t>(program.layers + 2) * (kMaxPhases + 1)) {
  for (size_t w = 0; w < workers_.size(); ++w) {
    workers_[w].rank = static_cast<int32_t>(w) / program.workers;
    workers_[w].record = program.offsets[kPrologue][w];
  }
  for (int32_t block = 0; block <= program.layers; ++block) {
    const int32_t* totals = program.totals[block == 0 ? 0 : block == program.layers ? 2 : 1];
    const int64_t size = static_cast<int64_t>(program.ranks) * program.counters;
    for (int64_t i = 0; i < size; ++i) counters_[block * size + i].left = totals[i];
  }
  stored_.assign(program.ranks, 0.0);
  for (int32_t r = 0; r < program.ranks; ++r) {
    for (double rate : {costs.memory_bytes_per_s, costs.cache_bytes_per_s})
      rates_.emplace_back(rate, costs.worker_bytes_per_s);
    caches_.emplace_back(costs.cache_bytes, program.key_bytes + static_cast<int64_t>(r) * program.keys,
                         program.keys, program.layered_keys);
  }
  result_.crowded_counter = -1;
  result_.stuck_stream = -1;
}

void Engine::schedule(double time, What what, int32_t worker) {
  events_.push_back({time, scheduled_++, what, worker});
  std::push_heap(events_.begin(), events_.end());
}

Result Engine::run() {
  now_ = counted_ = c_.launch_s;
  for (size_t w = 0; w < workers_.size(); ++w) fetch(static_cast<int32_t>(w));
  for (;;) {
    const double timer = events_.empty() ? kNever : events_.front().time;
    double time = timer;
    Shared* source = nullptr;
    for (Shared& rate : rates_)
      if (rate.next() < time) time = rate.next(), source = &rate;
    const bool sent = p_.ranks > 1 && links_.next() < time;
    if (sent) time = links_.next();
    if (time == kNever) break;
    now_ = std::max(now_, time);
    ++result_.events;
    if (sent) {
      store_part_ended(links_.pop(now_));
    } else if (source) {
      const int32_t who = source->pop(now_);
      if (who < 0) continue;  // written back: nobody waits for it
      flow_ended(who / 2, who % 2);
    } else {
      const Event e = events_.front();
      std::pop_heap(events_.begin(), events_.end());
      events_.pop_back();
      switch (e.what) {
        case What::fetch:
          workers_[e.worker].fetching = false;
          fetch(e.worker);
          break;
        case What::head:
          begin_head(e.worker);
          break;
        case What::ready:
          begin_body(e.worker);
          break;
        case What::begin:
          computing(e.worker);
          break;
        case What::end:
          computed(e.worker);
          break;
        case What::stored:
          store_part_ended(e.worker);
          break;
      }
    }
    result_.step_s = now_;
  }
  for (int32_t r = 0; r < p_.ranks; ++r) {
    result_.memory_bytes += memory(r).carried;
    result_.cache_bytes += cache_rate(r).carried;
  }
  result_.link_bytes = links_.carried;
  for (size_t i = 0; i < workers_.size(); ++i) {
    const Worker& w = workers_[i];
    if (w.ended && w.stored == w.fetched) continue;
    const Run& blocked = w.runs[w.loaded % kDepth];
    result_.stuck_stream = static_cast<int32_t>(i);
    result_.stuck_record = blocked.record;
    result_.stuck_layer = blocked.layer;
    break;
  }
  return result_;
}

// To the worker's next record; false where its stream has ended.
bool Engine::seek(Worker& w) const {
  const int32_t stream = static_cast<int32_t>(&w - workers_.data());
  while (w.task == w.task_end) {
    const int32_t end = p_.offsets[w.segment][stream + 1];
    if (w.record != end) break;
    if (w.segment == kBody && ++w.layer < p_.layers && p_.offsets[kBody][stream] != end) {
      w.record = p_.offsets[kBody][stream];
      continue;
    }
    if (w.segment == kEpilogue) return false;
    w.layer = 0;
    w.record = p_.offsets[++w.segment][stream];
  }
  return true;
}

// The next task into the run that it sets up.
void Engine::take(Worker& w) {
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
  Run& run = w.run(w.fetched);
  run = Run{};
  run.record = w.current;
  run.task = w.task++;
  run.layer = w.layer;
  run.segment = w.segment;
}

// -- controller

// Whether the worker's next task comes from a queue.
bool Engine::claims(Worker& w) const {
  return seek(w) && w.task == w.task_end && p_.records[w.record].queue >= 0;
}

// Which part of a task's loads the ring holds when the last of its pages has been asked for, outputs
// included.
double Engine::kept(const Task& task) const {
  const double ring = c_.ring_bytes - task.held_bytes - task.output_bytes;
  return task.ring_bytes <= ring ? 1.0 : std::max(0.0, ring / task.ring_bytes);
}

// When the loads of the last task that was set up have all been asked for: its waits are met, and what is
// left to compute on is in the ring. The pages before that have come, and been computed on. kNever: that is
// not known yet.
double Engine::asked_for(Worker& w) {
  const Run& run = w.run(w.fetched - 1);
  const Task& task = p_.tasks[run.task];
  const double kept = this->kept(task);
  if (kept >= 1.0) return run.body_begin;
  if (run.begin == kNever || run.last_begin == kNever) return kNever;
  return std::max(run.begin + stalled(run) + (1.0 - kept) * task.compute_s,
                  run.last_begin + c_.latency_s + task.tail_s);
}

void Engine::fetch(int32_t i) {
  Worker& w = workers_[i];
  if (w.ended || w.fetching) return;
  if (!seek(w)) {
    w.ended = true;
    return;
  }
  const bool claims = this->claims(w);
  if (w.fetched - w.stored >= (claims ? c_.claim_in_flight : c_.in_flight)) return;
  if (claims && w.fetched > w.stored) {
    const double from = asked_for(w);
    if (from == kNever) return;
    w.fetch_free = std::max(w.fetch_free, from);
  }
  if (w.fetch_free > now_) {
    w.fetching = true;
    schedule(w.fetch_free, What::fetch, i);
    return;
  }
  take(w);
  Run& run = w.run(w.fetched++);
  const bool claimed = claims && run.record != w.record - 1;
  run.fetched = now_;
  if (run.task == p_.records[run.record].first_task)
    run.fetched += c_.dispatch_s + (claimed ? c_.claim_s : 0.0);
  w.fetch_free = run.fetched;
  record(i, run, Role::CONTROLLER, IntervalKind::FETCH, now_, run.fetched);
  load(i);
  fetch(i);
}

// -- loaders

// What the ring has left for task n, when the task that is computed on has left its pages, which it does as
// it goes if all of it has come. `leaving`: its pages, if it has come.
double Engine::room(Worker& w, int64_t n, double& leaving) {
  double bytes = c_.ring_bytes;
  leaving = 0.0;
  for (int64_t m = w.stored; m < n; ++m) {
    const Task& before = p_.tasks[w.run(m).task];
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

// When does the next task's head begin? Once there is room behind the pages of the tasks before it.
void Engine::load(int32_t i) {
  Worker& w = workers_[i];
  if (w.headed == w.fetched || w.flows[0] + w.flows[1] > 0) return;  // loads come in order
  const Run& run = w.run(w.headed);
  const Task& task = p_.tasks[run.task];
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
  if (from > now_)
    schedule(from, What::head, i);
  else
    begin_head(i);
}

// Flows of the head (part 0) or the body (1) of a load; `missing` of its bytes come from memory, all pass the
// cache.
void Engine::flow(int32_t i, int part, double bytes, double missing) {
  Worker& w = workers_[i];
  cache_rate(w.rank).add(now_, bytes, 2 * i + part);
  ++w.flows[part];
  if (missing > 0) {
    memory(w.rank).add(now_, missing, 2 * i + part);
    ++w.flows[part];
  }
}

void Engine::write_back(int32_t rank) {
  const double bytes = caches_[rank].take_written_back();
  if (bytes > 0) memory(rank).add(now_, bytes, -1);
}

void Engine::begin_head(int32_t i) {
  Worker& w = workers_[i];
  if (w.head_due > now_) return;  // it has begun already
  w.head_due = kNever;
  Run& run = w.run(w.headed++);
  record(i, run, Role::LOADER, IntervalKind::PAGE_WAIT, w.head_asked, now_);
  w.head_asked = kNever;
  const Task& task = p_.tasks[run.task];
  run.head_begin = run.head_end = run.ready = now_;
  run.from = w.rank;
  run.rest = run.rest_missing = task.weight_bytes;
  if (task.weight_key >= 0) {
    run.rest_missing = caches_[w.rank].read(task.weight_key, run.layer, run.rest, filled(w.rank));
    write_back(w.rank);
  }
  const int64_t number = w.headed;
  if (w.loaded + 1 == w.headed) begin_waits(i);
  if (w.headed > number || run.body_begin != kNever) {  // the body brings all
    load(i);
    return;
  }
  if (w.loaded + 1 == number && met(w) && task.ring_bytes > 0) {
    add_reads(w);
    run.read_ahead = true;
  }
  const double head = run.rest * w.head_part, missing = run.rest_missing * w.head_part;
  if (head <= 0) {
    load(i);
    return;
  }
  run.rest -= head;
  run.rest_missing -= missing;
  run.head_end = kNever;
  flow(i, 0, head, missing);
}

// What tasks[loaded] reads, to what it still has to load.
void Engine::add_reads(Worker& w) {
  Run& run = w.run(w.loaded);
  const Task& task = p_.tasks[run.task];
  if (run.read_ahead || task.read_bytes <= 0) return;
  run.rest += task.read_bytes;
  run.rest_missing += task.read_key >= 0
                          ? caches_[w.rank].read(task.read_key, run.layer, task.read_bytes, filled(w.rank))
                          : task.read_bytes;
  write_back(w.rank);
}

// The input loader gets to tasks[loaded], whose head has begun.
void Engine::begin_waits(int32_t i) {
  Worker& w = workers_[i];
  w.wait = p_.tasks[w.run(w.loaded).task].first_wait;
  wait_on(i);
}

// Goes on through the task's waits, from `w.wait`; stops at the first that is not met.
void Engine::wait_on(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.loaded);
  for (; w.wait < p_.tasks[run.task].end_wait; ++w.wait) {
    Counter& counter = this->counter(w.rank, block(run), p_.waits[w.wait].counter);
    if (counter.left > 0) {
      w.next_waiter = counter.waiter;
      counter.waiter = i;
      return;
    }
    if (counter.met > run.ready) {
      run.ready = counter.met;
      run.slot = p_.waits[w.wait].slot;
      run.from = counter.from;
    }
  }
  w.wait = -1;
  if (run.ready > now_) {
    schedule(run.ready, What::ready, i);
  } else {
    begin_body(i);
  }
}

// The rest of a task's loads, once its waits are met; what the ring cannot hold beside the task before, only
// when that is computed.
void Engine::begin_body(int32_t i) {
  Worker& w = workers_[i];
  if (!met(w)) return;
  Run& run = w.run(w.loaded);
  if (run.body_begin != kNever) return;
  const Task& task = p_.tasks[run.task];
  if (w.computed < w.loaded && task.weight_bytes + task.read_bytes > 0) {
    double leaving = 0.0;
    const double room = this->room(w, w.loaded, leaving) - leaving;
    if (task.ring_bytes <= 0 || task.ring_bytes + task.held_bytes > room) return;
  }
  run.body_begin = now_;
  add_reads(w);
  // Where the next task is claimed beside this one, it matters when the last pages are asked for.
  const bool before_claim = c_.claim_in_flight > 1 && w.loaded + 1 == w.fetched && claims(w);
  const double last = before_claim ? kept(task) * (task.weight_bytes + task.read_bytes) : run.rest;
  if (run.rest <= last) run.last_begin = now_;
  if (run.rest > 0)
    load_rest(i, run.rest > last ? 1.0 - last / run.rest : 1.0);
  else
    run.body_end = now_;
  begin_compute(i);
  fetch(i);
  if (run.body_end == now_) loaded(i);
}

// So much of what is left to load of tasks[loaded].
void Engine::load_rest(int32_t i, double part) {
  Worker& w = workers_[i];
  Run& run = w.run(w.loaded);
  const double bytes = run.rest * part, missing = run.rest_missing * part;
  run.rest -= bytes;
  run.rest_missing -= missing;
  flow(i, 1, bytes, missing);
}

void Engine::flow_ended(int32_t i, int part) {
  Worker& w = workers_[i];
  if (--w.flows[part] > 0) return;
  if (part == 1) {
    Run& run = w.run(w.loaded);
    if (run.last_begin == kNever) {
      run.last_begin = now_;
      load_rest(i, 1.0);
      fetch(i);
      return;
    }
    run.body_end = now_;
    loaded(i);
    return;
  }
  Run& run = w.run(w.headed - 1);
  run.head_end = now_;
  if (w.loaded + 1 == w.headed) loaded(i);
  load(i);
}

// Is all of tasks[loaded] there?
void Engine::loaded(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.loaded);
  if (run.head_end == kNever || run.body_end == kNever) return;
  record(i, run, Role::LOADER, IntervalKind::LOAD, run.head_begin, run.head_end);
  record(i, run, Role::LOADER, IntervalKind::LOAD, run.body_begin, run.body_end);
  result_.inside_worker[1] += run.head_end - run.head_begin + run.body_end - run.body_begin;
  const bool next = ++w.loaded < w.headed;  // else its head is still to begin, and the waits with it
  if (run.began) decide_end(i);
  if (next) begin_waits(i);
  load(i);
}

// -- consumers

// The oldest task that is not computed begins when its first bytes are there.
void Engine::begin_compute(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.computed);
  if (w.computed == w.headed || run.body_begin == kNever || run.begin != kNever) return;
  const Task& task = p_.tasks[run.task];
  const bool reads_late = task.read_bytes > 0 && !run.read_ahead;
  double begin = now_;
  if (task.weight_bytes > 0 || run.read_ahead) begin = std::max(begin, run.head_begin + c_.latency_s);
  if (reads_late) begin = std::max(begin, run.body_begin + c_.latency_s);
  run.begin = begin;
  if (begin > now_)
    schedule(begin, What::begin, i);
  else
    computing(i);
}

void Engine::computing(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.computed);
  run.began = true;
  change(w, run, 1);
  const double idle = std::max(w.compute_end[0], run.head_begin);
  if (run.ready > idle) {
    record(i, run, Role::CONSUMER, IntervalKind::COUNTER_WAIT, idle, run.ready, run.slot);
    result_.wait_s += run.ready - idle;
    if (run.from != w.rank) result_.remote_wait_s += run.ready - idle;
  }
  const double until = std::min(run.begin, now_);
  result_.inside_worker[0] += hidden(w, run, run.head_begin, std::min(run.head_end, until)) +
                              hidden(w, run, run.body_begin, std::min(run.body_end, until));
  if (w.loaded > w.computed) decide_end(i);
}

// Of [begin, end), what lies under computing of the two tasks before or under the task's own wait.
double Engine::hidden(const Worker& w, const Run& run, double begin, double end) const {
  const auto common = [&](double from, double to) {
    return std::max(0.0, std::min(end, to) - std::max(begin, from));
  };
  return common(w.compute_begin[0], w.compute_end[0]) + common(w.compute_begin[1], w.compute_end[1]) +
         common(std::max(w.compute_end[0], run.head_begin), run.ready);
}

// The task is computed and loaded: when will both have ended?
void Engine::decide_end(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.computed);
  double end = run.begin + p_.tasks[run.task].compute_s;
  if (p_.tasks[run.task].weight_bytes + p_.tasks[run.task].read_bytes > 0) {
    const double last = run.body_end > run.body_begin ? std::max(run.body_end, run.head_end) : run.head_end;
    end = std::max(end, last + c_.latency_s + p_.tasks[run.task].tail_s);
  }
  run.end = end + stalled(run);
  schedule(run.end, What::end, i);
  load(i);
  fetch(i);
}

double Engine::stalled(const Run& run) const {
  const bool here = run.segment == stall_.segment && p_.records[run.record].number == stall_.number &&
                    (run.segment != kBody || run.layer == stall_.layer);
  return here ? stall_.seconds : 0.0;
}

void Engine::computed(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.computed);
  change(w, run, -1);
  record(i, run, Role::CONSUMER, IntervalKind::COMPUTE, run.begin, run.end);
  result_.compute_s += run.end - run.begin;
  w.compute_begin[1] = w.compute_begin[0];
  w.compute_end[1] = w.compute_end[0];
  w.compute_begin[0] = run.begin;
  w.compute_end[0] = run.end;
  ++w.computed;
  store(i);
  begin_body(i);
  begin_compute(i);
  load(i);
}

// -- storer

void Engine::store(int32_t i) {
  Worker& w = workers_[i];
  if (w.storing || w.stored == w.computed) return;
  w.storing = true;
  Run& run = w.run(w.stored);
  run.store_begin = now_;
  const double* bytes = p_.stores + static_cast<int64_t>(run.task) * p_.ranks;
  const int32_t key = p_.tasks[run.task].write_key;
  double most = 0.0;
  w.store_flows = 1;
  for (int32_t r = 0; r < p_.ranks; ++r) {
    if (bytes[r] <= 0) continue;
    most = std::max(most, bytes[r]);
    if (key >= 0) {
      caches_[r].write(key, bytes[r], filled(r));
      stored_[r] += bytes[r];
      write_back(r);
    }
    if (r == w.rank) continue;
    links_.add(now_, w.rank, r, bytes[r], i);
    ++w.store_flows;
  }
  const double local = most > 0 ? c_.store_s + bytes[w.rank] / c_.worker_bytes_per_s : 0.0;
  if (local > 0)
    schedule(now_ + local, What::stored, i);
  else
    store_part_ended(i);
}

void Engine::store_part_ended(int32_t i) {
  if (--workers_[i].store_flows == 0) done(i);
}

void Engine::done(int32_t i) {
  Worker& w = workers_[i];
  Run& run = w.run(w.stored);
  record(i, run, Role::STORER, IntervalKind::STORE, run.store_begin, now_);
  w.storing = false;
  const int32_t split = p_.tasks[run.task].split;
  bool final = true;
  if (split >= 0) {
    int32_t& arrived = splits_[static_cast<int64_t>(w.rank) * p_.splits + split];
    final = ++arrived == p_.tasks[run.task].parts;
    if (final) arrived = 0;
  }
  const Run finished = run;  // its place may be taken when a signal lets this worker go on
  ++w.stored;
  if (final) signal(finished, w.rank);
  store(i);
  load(i);
  begin_body(i);
  fetch(i);
}

void Engine::signal(const Run& run, int32_t rank) {
  for (int32_t s = p_.tasks[run.task].first_signal; s < p_.tasks[run.task].end_signal; ++s) {
    const Signal& signal = p_.signals[s];
    const int32_t to = block(run) + signal.next;
    if (signal.rank >= 0) {
      arrive(signal.rank, to, signal, rank);
    } else {
      for (int32_t r = 0; r < p_.ranks; ++r) arrive(r, to, signal, rank);
    }
  }
}

void Engine::arrive(int32_t rank, int32_t block, const Signal& signal, int32_t from) {
  Counter& counter = this->counter(rank, block, signal.counter);
  counter.left -= signal.arrivals;
  if (counter.left < 0) result_.crowded_counter = signal.counter;
  const double known = now_ + (rank == from ? c_.signal_s : c_.remote_signal_s);
  if (known >= counter.met) {
    counter.met = known;
    counter.from = from;
  }
  if (counter.left != 0) return;
  for (int32_t i = counter.waiter; i >= 0;) {
    const int32_t next = workers_[i].next_waiter;
    wait_on(i);
    i = next;
  }
  counter.waiter = -1;
}

// -- what is told of it

void Engine::record(int32_t i, const Run& run, Role role, IntervalKind kind, double begin, double end,
                    int32_t slot) {
  if (intervals_ == nullptr || (end <= begin && kind != IntervalKind::COMPUTE)) return;
  if (result_.intervals < most_) {
    Interval& out = intervals_[result_.intervals];
    out = {};
    out.begin = static_cast<uint64_t>(begin * 1e9);
    out.end = static_cast<uint64_t>(end * 1e9);
    out.instruction = static_cast<uint32_t>(p_.records[run.record].number);
    out.launch = 1;
    out.worker = static_cast<uint16_t>(i % p_.workers);
    out.layer = static_cast<uint16_t>(run.segment == kPrologue   ? kTracePrologue
                                      : run.segment == kEpilogue ? kTraceEpilogue
                                                                 : run.layer);
    out.rank = static_cast<uint8_t>(workers_[i].rank);
    out.role = static_cast<uint8_t>(c_.roles ? role : Role::WORKER);
    out.kind = static_cast<uint8_t>(kind);
    out.slot = static_cast<uint8_t>(slot);
  }
  ++result_.intervals;
}

void Engine::count_overlaps() {
  const double time = now_ - counted_;
  counted_ = now_;
  if (computing_ == 0 || time <= 0) return;
  if (memory_bound_ > 0) {
    result_.across_workers[1] += time;
    if (compute_bound_ > 0) result_.across_workers[0] += time;
  }
  result_.phases[1] += time;
  result_.across_ranks[1] += time;
  if (kinds_ > 1) result_.phases[0] += time;
  if (kinds_ > 1 && busy_ranks_ > 1) result_.across_ranks[0] += time;
}

// A worker begins (by = 1) or ends (-1) computing.
void Engine::change(const Worker& w, const Run& run, int by) {
  count_overlaps();
  const int32_t phase = p_.records[run.record].phase;
  computing_ += by;
  if (p_.compute_bound[phase] == 1) compute_bound_ += by;
  if (p_.compute_bound[phase] == 0) memory_bound_ += by;
  const auto used = [by](int32_t& count) {
    const int before = count > 0;
    count += by;
    return (count > 0) - before;
  };
  busy_ranks_ += used(rank_computing_[w.rank]);
  const int64_t layer = run.segment == kPrologue   ? p_.layers
                        : run.segment == kEpilogue ? p_.layers + 1
                                                   : run.layer;
  kinds_ += used(kind_computing_[layer * (kMaxPhases + 1) + phase]);
}

}  // namespace mk::simulate
