#include "fluid.h"

#include <algorithm>

namespace mk::simulate {

void Flows::advance(double now) {
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
}

int32_t Flows::pop(double now) {
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
  double room[kMost];
  int64_t open[kMost] = {};
  const int ports = 2 * ranks_;
  std::fill_n(room, ports, port_);
  room[ports] = total_;
  std::vector<int> rising = used_;
  for (int pair : rising) {
    const int64_t n = pairs_[pair].count();
    open[pair / ranks_] += n;
    open[ranks_ + pair % ranks_] += n;
    open[ports] += n;
  }
  double speed = 0.0;
  while (!rising.empty()) {
    double step = cap_ - speed;
    for (int r = 0; r <= ports; ++r)
      if (open[r]) step = std::min(step, room[r] / static_cast<double>(open[r]));
    speed += step;
    for (int r = 0; r <= ports; ++r) room[r] -= step * static_cast<double>(open[r]);
    const auto full = [&](int r) { return open[r] && room[r] <= port_ * 1e-12; };
    const bool all = speed >= cap_ || full(ports);
    size_t kept = 0;
    bool any = false;
    bool fixed[kMost];
    for (int r = 0; r < ports; ++r) fixed[r] = full(r);
    for (int pair : rising) {
      if (!all && !fixed[pair / ranks_] && !fixed[ranks_ + pair % ranks_]) {
        rising[kept++] = pair;
        continue;
      }
      any = true;
      const int64_t n = pairs_[pair].count();
      open[pair / ranks_] -= n;
      open[ranks_ + pair % ranks_] -= n;
      open[ports] -= n;
      pairs_[pair].set_speed(now_, speed);
    }
    rising.resize(kept);
    if (!any) break;
  }
}

}  // namespace mk::simulate
