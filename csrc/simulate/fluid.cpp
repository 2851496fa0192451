#include "fluid.h"

#include <algorithm>

namespace mk::simulate {

void Flows::advance(double now) {
  delivered_ = delivered(now);
  v_ += (now - at_) * speed_;
  at_ = now;
}

void Flows::look_ahead() {
  next_ = heap_.empty() || speed_ <= 0 ? kNever : at_ + std::max(0.0, heap_.front().end - v_) / speed_;
}

void Flows::set_speed(double now, double speed) {
  advance(now);
  speed_ = speed;
  look_ahead();
}

void Flows::add(double now, double bytes, int32_t who) {
  advance(now);
  heap_.push_back({v_ + bytes, who});
  std::push_heap(heap_.begin(), heap_.end());
  look_ahead();
}

int32_t Flows::pop(double now) {
  delivered_ = delivered(now);
  v_ = heap_.front().end;
  at_ = now;
  const int32_t who = heap_.front().who;
  std::pop_heap(heap_.begin(), heap_.end());
  heap_.pop_back();
  look_ahead();
  return who;
}

Links::Links(int ranks, double port, double total, double cap)
    : ranks_(ranks), switch_(2 * ranks), port_(port), total_(total), cap_(cap) {
  for (int from = 0; from < ranks; ++from)
    for (int to = 0; to < ranks; ++to) pairs_.push_back({from, ranks + to, {}});
}

void Links::pass(const Pair& pair, double flows) {
  for (int place : {pair.out, pair.in, switch_}) passing_[place] += flows;
}

void Links::add(double now, int from, int to, double bytes, int32_t who) {
  Pair& pair = pairs_[from * ranks_ + to];
  if (pair.flows.empty()) used_.push_back(&pair);
  pair.flows.add(now, bytes, who);
  pass(pair, 1);
  carried += bytes;
  now_ = now;
  stale_ = true;
}

int32_t Links::pop(double now) {
  const int32_t who = next_pair_->flows.pop(now);
  pass(*next_pair_, -1);
  if (next_pair_->flows.empty()) used_.erase(std::find(used_.begin(), used_.end(), next_pair_));
  now_ = now;
  stale_ = true;
  return who;
}

double Links::next() {
  if (!stale_) return next_;
  stale_ = false;
  share();
  next_ = kNever;
  for (Pair* pair : used_) {
    const double end = pair->flows.next();
    if (end < next_) {
      next_ = end;
      next_pair_ = pair;
    }
  }
  return next_;
}

// Water-filling: all flows speed up alike until a port, the switch or the cap is full; its flows stay at that
// speed, the others go on.
void Links::share() {
  double room[kMostPlaces], flows[kMostPlaces];
  std::fill_n(room, switch_, port_);
  room[switch_] = total_;
  std::copy_n(passing_, switch_ + 1, flows);
  rising_ = used_;
  double speed = 0.0;
  while (!rising_.empty()) {
    const double to_cap = cap_ - speed;
    double step = to_cap, steps[kMostPlaces];
    for (int i = 0; i <= switch_; ++i) {
      steps[i] = flows[i] > 0 ? room[i] / flows[i] : kNever;
      step = std::min(step, steps[i]);
    }
    const bool capped = step == to_cap;
    speed = capped ? cap_ : speed + step;
    bool full[kMostPlaces];
    for (int i = 0; i <= switch_; ++i) {
      full[i] = steps[i] <= step * (1 + 1e-9);
      room[i] -= step * flows[i];
    }
    const bool all = capped || full[switch_];
    size_t kept = 0;
    for (Pair* pair : rising_) {
      if (!all && !full[pair->out] && !full[pair->in]) {
        rising_[kept++] = pair;
        continue;
      }
      const double n = static_cast<double>(pair->flows.count());
      for (int place : {pair->out, pair->in, switch_}) flows[place] -= n;
      if (pair->flows.speed() != speed) pair->flows.set_speed(now_, speed);
    }
    rising_.resize(kept);
  }
}

}  // namespace mk::simulate
