// Shared rates as fluids: whoever uses one at a moment gets an equal share of it, and what a share leaves
// unused is free to the others.
#pragma once
#include <stdint.h>

#include <limits>
#include <vector>

namespace mk::simulate {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Flows of equal speed. Their progress is counted once for all of them: `v_` is what a flow would have got
// that was there from the start, so a flow of some bytes ends when v_ has grown by as many.
class Flows {
 public:
  bool empty() const { return heap_.empty(); }
  int64_t count() const { return static_cast<int64_t>(heap_.size()); }
  // Time at which the first flow ends, at the present speed.
  double next() const { return next_; }
  void add(double now, double bytes, int32_t who);
  int32_t pop(double now);  // the flow that ends at `now`
  void set_speed(double now, double speed);
  double speed() const { return speed_; }
  // Bytes that have come to all flows by `now`.
  double delivered(double now) const {
    return delivered_ + (now - at_) * speed_ * static_cast<double>(heap_.size());
  }

 private:
  struct Flow {
    double end;  // in v_
    int32_t who;
    bool operator<(const Flow& o) const { return end > o.end || (end == o.end && who > o.who); }
  };
  void advance(double now);
  void look_ahead();

  std::vector<Flow> heap_;
  double v_ = 0.0, at_ = 0.0, speed_ = 0.0, next_ = kNever, delivered_ = 0.0;
};

// One rate for all, of which no flow takes more than `cap`.
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

  double carried = 0.0;

 private:
  void share(double now) {
    if (flows_.empty()) return;
    const double part = rate_ / static_cast<double>(flows_.count());
    flows_.set_speed(now, part < cap_ ? part : cap_);
  }

  double rate_, cap_;
  Flows flows_;
};

// Ports of ranks on one switch. A flow goes out of one port and into another, and all pass the switch; speeds
// are max-min fair: no flow can be faster without slowing one that is not faster than it.
class Links {
 public:
  Links(int ranks, double port, double total, double cap);
  double next();
  void add(double now, int from, int to, double bytes, int32_t who);
  int32_t pop(double now);

  double carried = 0.0;

 private:
  // From one rank to another: all flows between them are equally fast.
  struct Pair {
    int out, in;  // which places they pass, beside the switch
    Flows flows;
  };
  void share();
  void pass(const Pair& pair, double flows);

  // Places that flows pass: the ports out of the ranks, those into them, the switch.
  static constexpr int kMostRanks = 16, kMostPlaces = 2 * kMostRanks + 1;

  const int ranks_, switch_;
  const double port_, total_, cap_;
  double now_ = 0.0, next_ = kNever;
  Pair* next_pair_ = nullptr;
  bool stale_ = false;
  double passing_[kMostPlaces] = {};  // flows through each place
  std::vector<Pair> pairs_;           // [from][to]
  std::vector<Pair*> used_, rising_;  // those with flows; those that are not yet as fast as they can be
};

}  // namespace mk::simulate
