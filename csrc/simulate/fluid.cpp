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
    : ranks_(ranks), port_(port), total_(total), cap_(cap), pairs_(ranks * ranks) {}

void Links::add(double now, int from, int to, double bytes, int32_t who) {
  const int pair = from * ranks_ + to;
  if (pairs_[pair].empty()) used_.push_back(pair);
  pairs_[pair].add(now, bytes, who);
  carried += bytes;
  now_ = now;
  stale_ = true;
}

int32_t Links::pop(double now) {
  const int32_t who = pairs_[next_pair_].pop(now);
  if (pairs_[next_pair_].empty()) used_.erase(std::find(used_.begin(), used_.end(), next_pair_));
  now_ = now;
  stale_ = true;
  return who;
}

double Links::next() {
  if (!stale_) return next_;
  stale_ = false;
  share();
  next_ = kNever;
  for (int pair : used_) {
    const double end = pairs_[pair].next();
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
  constexpr int kMost = 2 * 16 + 1;
  const int ports = 2 * ranks_;
  double room[kMost], flows[kMost] = {};
  std::fill_n(room, ports, port_);
  room[ports] = total_;
  rising_ = used_;
  for (int pair : rising_) {
    const double n = static_cast<double>(pairs_[pair].count());
    flows[pair / ranks_] += n;
    flows[ranks_ + pair % ranks_] += n;
    flows[ports] += n;
  }
  double speed = 0.0;
  while (!rising_.empty()) {
    const double to_cap = cap_ - speed;
    double step = to_cap;
    for (int r = 0; r <= ports; ++r)
      if (flows[r] > 0) step = std::min(step, room[r] / flows[r]);
    const bool capped = step == to_cap;
    speed = capped ? cap_ : speed + step;
    bool full[kMost];
    for (int r = 0; r <= ports; ++r) {
      full[r] = flows[r] > 0 && room[r] / flows[r] <= step * (1 + 1e-9);
      room[r] -= step * flows[r];
    }
    const bool all = capped || full[ports];
    size_t kept = 0;
    for (int pair : rising_) {
      const int from = pair / ranks_, to = ranks_ + pair % ranks_;
      if (!all && !full[from] && !full[to]) {
        rising_[kept++] = pair;
        continue;
      }
      const double n = static_cast<double>(pairs_[pair].count());
      flows[from] -= n;
      flows[to] -= n;
      flows[ports] -= n;
      if (pairs_[pair].speed() != speed) pairs_[pair].set_speed(now_, speed);
    }
    rising_.resize(kept);
  }
}

}  // namespace mk::simulate
