// Models how data transfers (flows) share bandwidth. Bytes flow continuously, like a fluid. All flows get
// equal shares; if a flow cannot use its share, the others get the rest.
#pragma once
#include <stdint.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <queue>
#include <vector>

namespace mk::simulate {

constexpr double kNever = std::numeric_limits<double>::infinity();

// A set of data transfers (flows) that always have equal speeds. One number measures the progress of all
// flows: `v_` is how many bytes a flow has received if it was present from the start. A flow of n bytes that
// begins at v_ = v ends at v_ = v + n.
class Flows {
 public:
  bool empty() const { return heap_.empty(); }
  int64_t count() const { return static_cast<int64_t>(heap_.size()); }
  // Returns the time at which the next flow ends if the speed does not change; kNever if there is no flow.
  double next() const { return next_; }
  void add(double now, double bytes, int32_t who) {
    advance(now);
    heap_.push({v_ + bytes, who});
    look_ahead();
  }
  // Removes the flow that ends at `now` and returns the number `who` that add() received for it.
  int32_t pop(double now) {
    advance(now);
    const auto [end, who] = heap_.top();
    heap_.pop();
    v_ = end;  // corrects rounding
    look_ahead();
    return who;
  }
  void set_speed(double now, double speed) {
    advance(now);
    speed_ = speed;
    look_ahead();
  }
  double speed() const { return speed_; }
  // Returns the bytes that all flows together have received by `now`.
  double delivered(double now) const {
    return delivered_ + (now - at_) * speed_ * static_cast<double>(heap_.size());
  }

 private:
  struct Flow {
    double end;  // in v_
    int32_t who;
    bool operator<(const Flow& o) const { return end > o.end || (end == o.end && who > o.who); }
  };

  void advance(double now) {
    delivered_ = delivered(now);
    v_ += (now - at_) * speed_;
    at_ = now;
  }
  void look_ahead() {
    next_ = heap_.empty() || speed_ <= 0 ? kNever : at_ + std::max(0.0, heap_.top().end - v_) / speed_;
  }

  std::priority_queue<Flow> heap_;
  double v_ = 0.0, at_ = 0.0, speed_ = 0.0, next_ = kNever, delivered_ = 0.0;
};

// A bandwidth of `rate` bytes per second that all data transfers (flows) share equally. No flow gets more
// than `cap` bytes per second.
class Shared {
 public:
  Shared(double rate, double cap) : rate_(rate), cap_(cap) {}
  double next() const { return flows_.next(); }
  void add(double now, double bytes, int32_t who) {
    flows_.add(now, bytes, who);
    share(now);
    carried += bytes;
  }
  int32_t pop(double now) {
    const int32_t who = flows_.pop(now);
    share(now);
    return who;
  }
  double delivered(double now) const { return flows_.delivered(now); }
  // Returns in how many seconds all bytes in flight arrive. Each flow has at most `window` bytes in flight.
  double backlog_s(double now, double window) const {
    return std::min(carried - delivered(now), window * static_cast<double>(flows_.count())) / rate_;
  }

  double carried = 0.0;

 private:
  void share(double now) {
    if (flows_.empty()) return;
    flows_.set_speed(now, std::min(rate_ / static_cast<double>(flows_.count()), cap_));
  }

  double rate_, cap_;
  Flows flows_;
};

// Models GPUs (ranks) connected by a switch. Each data transfer (flow) uses the sender's output port, the
// switch and the receiver's input port, which all have limited bandwidth. Bandwidth is shared max-min fairly:
// no flow can become faster without slowing down a flow that is at most as fast.
class Links {
 public:
  Links(int ranks, double port, double total, double cap)
      : ranks_(ranks), switch_(2 * ranks), port_(port), total_(total), cap_(cap) {
    for (int from = 0; from < ranks; ++from)
      for (int to = 0; to < ranks; ++to) pairs_.push_back({from, ranks + to, {}});
  }

  double next() {
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
  void add(double now, int from, int to, double bytes, int32_t who) {
    Pair& pair = pairs_[from * ranks_ + to];
    if (pair.flows.empty()) used_.push_back(&pair);
    pair.flows.add(now, bytes, who);
    changed(now, pair, 1);
    carried += bytes;
  }
  int32_t pop(double now) {
    const int32_t who = next_pair_->flows.pop(now);
    if (next_pair_->flows.empty()) used_.erase(std::find(used_.begin(), used_.end(), next_pair_));
    changed(now, *next_pair_, -1);
    return who;
  }

  double carried = 0.0;

 private:
  // The flows from one rank to another, which all have the same speed.
  struct Pair {
    int out, in;  // the sender's port and the receiver's port
    Flows flows;
  };

  void changed(double now, const Pair& pair, double flows) {
    for (int place : {pair.out, pair.in, switch_}) passing_[place] += flows;
    now_ = now;
    stale_ = true;
  }

  // Computes the speeds of all flows by water-filling. All speeds rise together. When a port or the switch is
  // full, the flows through it keep their speed, and the others rise further, up to the cap.
  void share() {
    double room[kMostPlaces], flows[kMostPlaces];
    uint32_t rising[kMostRanks] = {};  // for each rank, the receivers for which speeds still rise
    for (const Pair* pair : used_) rising[pair->out] |= 1u << (pair->in - ranks_);
    std::fill_n(room, switch_, port_);
    room[switch_] = total_;
    std::copy_n(passing_, switch_ + 1, flows);
    double speed = 0.0;
    while (flows[switch_] > 0) {
      const double to_cap = cap_ - speed;
      double step = to_cap, steps[kMostPlaces];
      for (int i = 0; i <= switch_; ++i) {
        steps[i] = flows[i] > 0 ? room[i] / flows[i] : kNever;
        step = std::min(step, steps[i]);
      }
      speed = step == to_cap ? cap_ : speed + step;
      uint64_t full = 0;  // the places that are used up, one bit each
      for (int i = 0; i <= switch_; ++i) {
        full |= static_cast<uint64_t>(steps[i] <= step * (1 + 1e-9)) << i;
        room[i] -= step * flows[i];
      }
      const bool all = speed == cap_ || full >> switch_ & 1;
      for (int from = 0; from < ranks_; ++from) {
        const bool sends = all || full >> from & 1;
        uint32_t ended = rising[from] & (sends ? ~0u : static_cast<uint32_t>(full >> ranks_));
        rising[from] &= ~ended;
        for (; ended; ended &= ended - 1) {
          Pair& pair = pairs_[from * ranks_ + std::countr_zero(ended)];
          const double n = static_cast<double>(pair.flows.count());
          for (int place : {pair.out, pair.in, switch_}) flows[place] -= n;
          if (pair.flows.speed() != speed) pair.flows.set_speed(now_, speed);
        }
      }
    }
  }

  // Places that limit the bandwidth of flows: an output port and an input port for each rank, and the switch.
  static constexpr int kMostRanks = 16, kMostPlaces = 2 * kMostRanks + 1;

  const int ranks_, switch_;
  const double port_, total_, cap_;
  double now_ = 0.0, next_ = kNever;
  Pair* next_pair_ = nullptr;
  bool stale_ = false;
  double passing_[kMostPlaces] = {};  // flows through each place
  std::vector<Pair> pairs_;           // [from][to]
  std::vector<Pair*> used_;           // pairs that have flows
};

}  // namespace mk::simulate
